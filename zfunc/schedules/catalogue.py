"""Schedules by name, and whatever else says which one is meant."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TypeAlias

from zfunc.errors import ScheduleError
from zfunc.schedules.checks import as_count
from zfunc.schedules.in_turn import gpipe, interleaved, one_f_one_b
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.schedules.zero_bubble import zb, zb_lean, zbv

__all__ = ["SCHEDULES", "ScheduleLike", "check_schedule", "schedule"]

ScheduleLike: TypeAlias = str | Schedule | Callable[..., Schedule]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb": zb,
    "zb_lean": zb_lean,
    "zbv": zbv,
}


def schedule(which: ScheduleLike, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule that is meant, checked.

    Args:
        which: a name in :data:`SCHEDULES`, a :class:`Schedule`, or a function of (ranks,
            microbatches) that returns one.
        ranks: how many the pipeline has.
        microbatches: how many a step has.
        chunks: of each rank, where that can be chosen: for ``"interleaved"``, and for a function
            that has a parameter of this name. ``"zbv"`` has two on each rank, the others one.

    Raises:
        ScheduleError: there is no such name, the function returns something else, the schedule is
            for other numbers of ranks or microbatches, or it cannot run.

    >>> schedule("1f1b", ranks=2, microbatches=4).makespan()
    15.0
    >>> schedule("1f1b", ranks=2, microbatches=4) == schedule(one_f_one_b, 2, 4)
    True
    """
    ranks, microbatches = as_count(ranks, "ranks"), as_count(microbatches, "microbatches")
    check_schedule(which)
    make = SCHEDULES[which] if isinstance(which, str) else which
    found = make if isinstance(make, Schedule) else _made(make, ranks, microbatches, chunks)
    if (found.ranks, found.microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"this schedule is for {found.ranks} ranks and {found.microbatches} microbatches. Here "
            f"are {ranks} ranks and {microbatches} microbatches"
        )
    return found.check()


def check_schedule(which: object) -> None:
    """Raise ``ScheduleError`` if it is none, or cannot run, for whatever ranks."""
    if isinstance(which, Schedule):
        which.check()
    elif isinstance(which, str):
        if which not in SCHEDULES:
            raise ScheduleError(f"there is no schedule {which!r}: there are {', '.join(SCHEDULES)}")
    elif not callable(which):
        raise ScheduleError(f"{which!r} is no schedule: give a name, a Schedule or a function")


def _made(make: Callable[..., object], ranks: int, microbatches: int, chunks: int) -> Schedule:
    """What a function of ranks and microbatches returns, and of chunks if it asks for them."""
    try:
        choice = "chunks" in signature(make).parameters
    except ValueError:  # a builtin tells nothing of its parameters
        choice = False
    found = make(ranks, microbatches, chunks=chunks) if choice else make(ranks, microbatches)
    if not isinstance(found, Schedule):
        name = getattr(make, "__name__", type(make).__name__)
        raise ScheduleError(f"{name} returns {type(found).__name__}, and not a Schedule")
    return found
