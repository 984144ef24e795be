"""When operations begin and end: on the host's clock, or by events on a GPU's stream.

An event is written into the stream and read when the step is over, so the host waits for nothing
in between.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["EventTimes", "HostTimes", "Times"]


class Times(Protocol):
    """Takes times of one step."""

    def now(self, on_gpu: bool) -> Any:
        """A mark of this moment, or of where the GPU's stream will be."""

    def seconds(self, mark: Any) -> float:
        """When that was, from the beginning of the step; asked once the step is over."""

    def finish(self) -> None:
        """The step is over: wait until the device has done it."""


class HostTimes:
    """Of operations that are done when they return."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def now(self, on_gpu: bool) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self._begin

    def finish(self) -> None:
        return


class EventTimes(HostTimes):
    """Of operations on a GPU, and of those on the host beside it.

    What is taken of the host counts from where the device was told to begin.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()  # nothing of an earlier step is left
        self._first: Any = self._event()
        super().__init__()

    def now(self, on_gpu: bool) -> Any:
        return self._event() if on_gpu else time.perf_counter()

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return super().seconds(mark)
        return float(self._first.elapsed_time(mark)) / 1e3

    def finish(self) -> None:
        torch.cuda.synchronize()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
