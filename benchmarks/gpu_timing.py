"""How long a call takes on a GPU, and what copies and products reach there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.gpu_cases import Size

__all__ = ["Ceilings", "Clock", "Timing", "ceilings"]

CALLS, REPLAYS = 20, 20
SECONDS = 0.25  # that one figure may take; long calls are repeated less often, but twice at least
Call = Callable[[int], object]


@dataclass(frozen=True)
class Ceilings:
    """TB/s of a copy (read and written), TFLOP/s of a product in bfloat16."""

    copy: float
    product: float

    def si(self) -> Ceilings:
        """In bytes and operations a second."""
        return Ceilings(self.copy * 1e12, self.product * 1e12)


class Timing(NamedTuple):
    """Seconds of a call, whether two medians agree within 2 %, and whether a graph was timed: in
    what is not captured the host's time to launch is counted, too."""

    seconds: float
    steady: bool
    graph: bool


@dataclass(frozen=True)
class Clock:
    """Times calls on the current GPU; where it is not ``real`` it only runs them, once.

    >>> Clock(real=False)(lambda i: print("copy", i), 2)
    copy 0
    Timing(seconds=0.0, steady=True, graph=True)
    """

    real: bool

    def __call__(self, call: Call, copies: int = 1, *, patience: float = SECONDS) -> Timing:
        """How long a call takes.

        Args:
            call: gets the number of the copy of its buffers that it is to use.
            copies: how many there are.
            patience: seconds that it may take to find out.
        """
        if not self.real:
            call(0)
            return Timing(0.0, True, True)
        turn = itertools.cycle(range(copies))
        for _ in range(max(3, copies)):
            call(next(turn))
        torch.cuda.synchronize()
        once = timed(lambda: call(next(turn)))  # with the host's launches: at most so long
        calls = max(2, min(CALLS, int(patience / 4 / once)))
        replay, graph = graphed(lambda: [call(next(turn)) for _ in range(calls)])
        replays = max(3, min(REPLAYS, int(patience / 2 / min(timed(replay) for _ in range(2)))))
        halves = [median(timed(replay) for _ in range(replays)) / calls for _ in range(2)]
        steady = abs(halves[0] - halves[1]) <= 0.02 * min(halves)
        return Timing(min(halves), steady, graph)


def graphed(body: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """``body`` as a CUDA graph, and True; as it is, and False, if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            body()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                body()
    except RuntimeError:
        torch.cuda.synchronize()
        return body, False
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, True


def timed(body: Callable[[], object]) -> float:
    """Seconds between two events around ``body``."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    body()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def ceilings(clock: Clock, size: Size, device: torch.device) -> Ceilings:
    """A copy of several GB and a square product of random numbers.

    In a graph a copy may go by the copy engines, which can be slower than a kernel that copies: the
    quicker of both counts.
    """
    x = torch.empty(size.copy // 4, device=device).uniform_()
    y = torch.empty_like(x)
    seconds = min(
        clock(lambda i: y.copy_(x)).seconds, clock(lambda i: torch.mul(x, 2, out=y)).seconds
    )
    a, b = (torch.randn(size.square, size.square, device=device).bfloat16() for _ in range(2))
    square = clock(lambda i: a @ b).seconds
    if not clock.real:
        return Ceilings(0.0, 0.0)
    return Ceilings(2 * size.copy / seconds / 1e12, 2 * size.square**3 / square / 1e12)
