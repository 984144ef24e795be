"""``preemption``: what asks one rank to stop, a signal or the clock, is decided alike on all.

A scheduler tells each process by itself, and clocks differ. A rank that stopped at once would
leave the others in the middle of a step. So the ranks add up who has been asked, once a step: the
sum is sent at one boundary and read at the next. By then every rank has been through the step's own
collectives, which are behind it, and nobody waits.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from zfunc.files import background
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Handle

__all__ = ["Stop", "preemption"]


class Stop:
    """Whether to stop, asked once after each step, by all ranks.

    Args:
        seconds: after which this rank asks for it; ``None`` is never.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._asked = False
        # By world: one object may serve the ranks of a simulated one, which are threads.
        self._turns: weakref.WeakKeyDictionary[world.World, _Turns]
        self._turns = weakref.WeakKeyDictionary()

    def ask(self) -> None:
        """Ask all ranks to stop, as the signal does; on one rank or several."""
        self._asked = True

    def __call__(self) -> bool:
        """Whether all ranks are to stop now: the same answer on each; a collective.

        What was asked for by the last call counts. Alone, a rank hears it at once.

        Raises:
            DesyncError: a rank did not come here.
        """
        here = world.current()
        asked = self._asked or time.monotonic() >= self._end
        if here.size == 1:
            self._asked = asked
            return asked
        return self._turns.setdefault(here, _Turns()).next(asked)

    def _conclude(self) -> None:
        """At the end of the block: nothing of it is under way any longer."""
        turns = self._turns.pop(world.current(), None)
        stopped = turns.decided if turns is not None else self._asked
        if turns is not None:
            turns.end()
        if stopped:
            background.settle()


class _Turns:
    """The sums of one rank: one under way at a time."""

    def __init__(self) -> None:
        self._under_way: Handle[Tensor] | None = None
        self.decided = False

    def next(self, asked: bool) -> bool:
        if not self.decided:
            self.end()
        if not self.decided:  # as all ranks know
            mine = torch.full((), int(asked), dtype=torch.int32, device="cpu")
            self._under_way = group(None, "data").all_reduce(mine, label="preemption")
        return self.decided

    def end(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self.decided = int(under_way.wait()) > 0


@contextmanager
def preemption(seconds: float | None = None) -> Iterator[Stop]:
    """Inside, SIGTERM ends the training at a step's boundary, the same one on all ranks.

    Call what it gives once after every step, on all ranks. Once one rank has been asked to stop,
    by SIGTERM, by the clock or by ``stop.ask()``, the next call but one at the latest is true on
    all of them: the decision travels beside the step in between, and has no wait of its own. Save
    then, and leave the loop. A save that is still under way is complete when the block ends.

        with zf.preemption(seconds=3.9 * 3600) as stop:
            for batch in data:
                state, metrics = step(state, batch)
                if stop():
                    zf.save(path, state)
                    break

    Works under ``zf.launch`` and torchrun, which pass SIGTERM on to the ranks. The handler is set
    in the main thread only, and what was there before is put back; in another thread, such as a
    simulated rank's, the clock and ``stop.ask()`` do the same.

    Args:
        seconds: the wall-clock limit, from now on; ``None`` is no limit. Leave room for two steps
            and the save.

    Returns:
        ``stop() -> bool``, with ``stop.ask()``.

    Raises:
        ValueError: ``seconds`` is no positive number.
        DesyncError: a rank left the block before the others.

    >>> with preemption() as stop:
    ...     for k in range(10):
    ...         if k == 3:
    ...             stop.ask()
    ...         if stop():
    ...             break
    >>> k
    3
    """
    if seconds is not None and not float(seconds) > 0:
        raise ValueError(f"preemption(seconds={seconds}): expected a positive number, or None")
    stop = Stop(None if seconds is None else float(seconds))
    with _heard(stop):
        yield stop
        stop._conclude()


@contextmanager
def _heard(stop: Stop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    if before is None:
        warnings.warn(
            "SIGTERM is handled by something outside Python, which preemption() could not put "
            "back: it is left alone, and only the clock and stop.ask() are heard",
            stacklevel=4,
        )
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        stop.ask()

    signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
