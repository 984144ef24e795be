"""Whether a schedule has every action once, where it belongs. Timelines find deadlocks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from zfunc.errors import ScheduleError
from zfunc.schedules.actions import KINDS, Action

__all__ = ["as_actions", "as_count", "as_owners", "check_actions"]

NAMED = 3  # of many missing actions these are named


def as_count(value: Any, what: str) -> int:
    """A whole number that is 1 at least.

    Raises:
        ScheduleError: it is none.
    """
    try:
        count = index(value)
    except TypeError:
        raise ScheduleError(f"{what} is {value!r}, and must be a whole number") from None
    if count < 1:
        raise ScheduleError(f"{what} is {count}, and must be 1 at least")
    return count


def as_owners(rank_of: Any) -> tuple[int, ...]:
    """The owners of chunks as a tuple of whole numbers.

    Raises:
        ScheduleError: they are no such numbers, or there are none.
    """
    try:
        owners = tuple(index(r) for r in rank_of)
    except TypeError:
        raise ScheduleError(f"rank_of is {rank_of!r}: it has a rank for each chunk") from None
    if not owners:
        raise ScheduleError("rank_of is empty: a pipeline has one chunk at least")
    return owners


def as_actions(rows: Any) -> tuple[tuple[Action, ...], ...]:
    """Actions by rank, from any triples in any sequences.

    Raises:
        ScheduleError: something is no triple of a kind and two whole numbers.
    """
    try:
        found = [tuple(row) for row in rows]
    except TypeError:
        raise ScheduleError(
            f"actions is {rows!r}: it has a row of actions for each rank, such as [('F', 0, 0)]"
        ) from None
    return tuple(tuple(_as_action(x, rank) for x in row) for rank, row in enumerate(found))


def _as_action(found: Any, rank: int) -> Action:
    try:
        kind, microbatch, chunk = found
        return Action(kind, index(microbatch), index(chunk))
    except (TypeError, ValueError):
        raise ScheduleError(
            f"rank {rank} has {found!r}, which is no action: an action is a kind, a microbatch and "
            "a chunk, such as ('F', 0, 0)"
        ) from None


def check_actions(
    rank_of: Sequence[int], microbatches: int, actions: Sequence[Sequence[Action]]
) -> frozenset[tuple[int, int]]:
    """Every chunk has forward and backward of every microbatch, once, on the rank that owns it.

    Returns:
        the pairs (microbatch, chunk) whose backward is one action, B.

    Raises:
        ScheduleError: names the first action that is wrong, there twice, or missing.
    """
    ranks = len(actions)
    for chunk, owner in enumerate(rank_of):
        if not 0 <= owner < ranks:
            raise ScheduleError(
                f"chunk {chunk} is owned by rank {owner}, and there are actions of ranks "
                f"0 to {ranks - 1}"
            )
    seen: set[Action] = set()
    for rank, row in enumerate(actions):
        for action in row:
            _check_place(action, rank, rank_of, microbatches)
            if action in seen:
                raise ScheduleError(f"rank {rank} has {action} twice")
            seen.add(action)
    _check_complete(seen, rank_of, microbatches)
    return frozenset((i, k) for kind, i, k in seen if kind == "B")


def _check_place(action: Action, rank: int, rank_of: Sequence[int], microbatches: int) -> None:
    kind, i, k = action
    if kind not in KINDS or len(kind) != 1:
        raise ScheduleError(f"rank {rank} has {action}: kinds are {', '.join(KINDS)}")
    if not 0 <= k < len(rank_of):
        raise ScheduleError(f"rank {rank} has {action}: chunks are 0 to {len(rank_of) - 1}")
    if not 0 <= i < microbatches:
        raise ScheduleError(f"rank {rank} has {action}: microbatches are 0 to {microbatches - 1}")
    if rank_of[k] != rank:
        raise ScheduleError(f"rank {rank} has {action}, and chunk {k} is owned by {rank_of[k]}")


def _check_complete(seen: set[Action], rank_of: Sequence[int], microbatches: int) -> None:
    missing: list[tuple[int, Action]] = []
    for k, rank in enumerate(rank_of):
        for i in range(microbatches):
            whole, halves = Action("B", i, k), (Action("I", i, k), Action("W", i, k))
            some = [x for x in halves if x in seen]
            if whole in seen and some:
                raise ScheduleError(
                    f"rank {rank} has {whole} and {some[0]}: backward is either B, or I and W"
                )
            if Action("F", i, k) not in seen:
                missing.append((rank, Action("F", i, k)))
            if whole not in seen:
                wanted = halves if some else [whole]
                missing += [(rank, x) for x in wanted if x not in seen]
    if missing:
        named = ", ".join(f"{x} on rank {rank}" for rank, x in missing[:NAMED])
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise ScheduleError(f"missing: {named}{more}")
