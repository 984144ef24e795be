"""Schedules: pure functions from the number of updates made so far to a value.

A schedule takes an ``int`` or a 0-d integer tensor and returns a 0-d float64
tensor. It is made of tensor operations alone, so it may be compiled, and it is
right for any count, also beyond its end. As in optax, the first update sees 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.optim.base import GradientTransformation
from zfunc.optim.rates import Rate, Schedule, at, started
from zfunc.trees import tree
from zfunc.trees.reduction import linear_map

__all__ = [
    "ScheduleState",
    "constant",
    "cosine",
    "linear",
    "one_cycle",
    "scale_by_schedule",
    "warmup_cosine",
]


def constant(value: float) -> Schedule:
    """The same value always.

    >>> constant(0.5)(7)
    tensor(0.5000, dtype=torch.float64)
    """
    return lambda count: torch.full_like(_real(count), value)


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line from ``start`` at count 0 to ``end`` at ``steps`` and beyond.

    Raises:
        ValueError: ``steps`` is not positive.

    >>> [linear(1.0, 0.0, 4)(count).item() for count in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    _positive("steps", steps)
    return lambda count: _mix(start, end, _progress(count, 0, steps))


def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from ``peak`` at count 0 down to ``end`` at ``steps`` and beyond.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm
    Restarts, 2017.

    Raises:
        ValueError: ``steps`` is not positive.

    >>> [round(cosine(1.0, 4)(count).item(), 3) for count in (0, 1, 2, 4, 9)]
    [1.0, 0.854, 0.5, 0.0, 0.0]
    """
    _positive("steps", steps)
    return lambda count: _mix(peak, end, _wave(_progress(count, 0, steps)))


def warmup_cosine(
    peak: float, warmup: int, steps: int, end: float = 0.0, start: float = 0.0
) -> Schedule:
    """A line from ``start`` up to ``peak``, then half a cosine down to ``end``.

    Args:
        peak: the value at count ``warmup``.
        warmup: the length of the line; 0 for none.
        steps: the length of the whole schedule, the line included.
        end: the value at ``steps`` and beyond.
        start: the value at count 0.

    Raises:
        ValueError: ``steps`` is not greater than ``warmup``.

    >>> schedule = warmup_cosine(1.0, warmup=2, steps=6)
    >>> [round(schedule(count).item(), 3) for count in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _positive("steps - warmup", steps - warmup)

    def schedule(count: Any) -> Tensor:
        up = _mix(start, peak, _progress(count, 0, max(warmup, 1)))
        down = _mix(peak, end, _wave(_progress(count, warmup, steps - warmup)))
        return torch.where(_real(count) < warmup, up, down)

    return schedule


def one_cycle(
    peak: float, steps: int, warmup: float = 0.3, start: float = 1 / 25, end: float = 1 / 25e4
) -> Schedule:
    """Half a cosine up to ``peak``, half a cosine down to next to nothing.

    Args:
        peak: the value at count ``int(warmup * steps)``.
        steps: the length of the whole cycle.
        warmup: the part of it that goes up.
        start: the value at count 0, as a fraction of ``peak``.
        end: the value at ``steps`` and beyond, as a fraction of ``peak``.

    Source: Smith and Topin, Super-Convergence: Very Fast Training of Neural
    Networks Using Large Learning Rates, 2018.

    Raises:
        ValueError: there is no step before or after the peak.

    >>> schedule = one_cycle(2.0, 10, warmup=0.5, start=0.1, end=0.01)
    >>> [round(schedule(count).item(), 3) for count in (0, 5, 10)]
    [0.2, 2.0, 0.02]
    """
    top = int(warmup * steps)
    _positive("int(warmup * steps)", top)
    _positive("the steps after the peak", steps - top)

    def schedule(count: Any) -> Tensor:
        up = _mix(start * peak, peak, _wave(_progress(count, 0, top)))
        down = _mix(peak, end * peak, _wave(_progress(count, top, steps - top)))
        return torch.where(_real(count) < top, up, down)

    return schedule


def _real(count: Any) -> Tensor:
    return torch.as_tensor(count).to(torch.float64)


def _progress(count: Any, begin: int, steps: int) -> Tensor:
    return ((_real(count) - begin) / steps).clamp(0.0, 1.0)


def _mix(start: float, end: float, part: Tensor) -> Tensor:
    # Exactly `start` at 0 and exactly `end` at 1, which start + part * (end - start) is not.
    return (1 - part) * start + part * end


def _wave(part: Tensor) -> Tensor:
    return (1 - torch.cos(part * math.pi)) / 2


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} is {value}; a schedule needs at least one step there.")


class ScheduleState(NamedTuple):
    """How many updates have been made: 0-d int64."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed


def scale_by_schedule(schedule: Rate) -> GradientTransformation:
    """Multiply updates by ``schedule(count)``; for a descent its sign is negative.

    >>> tx = scale_by_schedule(linear(-1.0, 0.0, 4))
    >>> updates, state = tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(1)}))
    >>> updates, state
    ({'w': tensor([-1.])}, ScheduleState(count=tensor(1)))
    """

    def update(grads: Any, state: ScheduleState, params: Any) -> tuple[Any, ScheduleState]:
        factor = at(schedule, state.count)
        return tree.map(linear_map(lambda g: (g * factor).to(g.dtype)), grads), ScheduleState(
            state.count + 1
        )

    return GradientTransformation(
        lambda params: ScheduleState(started()), update, checked=True, unfit=None
    )
