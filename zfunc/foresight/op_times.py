"""When operations begin and end: on the host's clock, or by events on a GPU's stream.

An event is written into the stream and read when the step is over, so the host waits for nothing
in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["EventTimes", "HostTimes", "Times"]


class Times(Protocol):
    """Takes times of one step."""

    def begin(self) -> None:
        """The step begins."""

    def now(self, on_gpu: bool) -> Any:
        """A mark of this moment, or of where the GPU's stream will be."""

    def end(self) -> float:
        """The step is over: its seconds, once the device is through with it."""

    def seconds(self, mark: Any) -> float:
        """When that was, from the beginning of the step; asked behind its end."""


class HostTimes:
    """Of operations that are done when they return.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begin = clock, 0.0

    def begin(self) -> None:
        self._begin = self._clock()

    def now(self, on_gpu: bool) -> Any:
        return self._clock()

    def end(self) -> float:
        return self._clock() - self._begin

    def seconds(self, mark: Any) -> float:
        return float(mark - self._begin)


class EventTimes(HostTimes):
    """Of operations on a GPU, and of those on the host beside it.

    What is taken of the host counts from where the device was told to begin.
    """

    _first: Any = None

    def begin(self) -> None:
        torch.cuda.synchronize()  # nothing of an earlier step is left
        self._first = _event()
        super().begin()

    def now(self, on_gpu: bool) -> Any:
        return _event() if on_gpu else super().now(on_gpu)

    def end(self) -> float:
        last = _event()
        torch.cuda.synchronize()
        return self.seconds(last)

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return super().seconds(mark)
        return float(self._first.elapsed_time(mark)) / 1e3


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
