"""Schedules: pure functions from the number of updates made so far to a value.

A schedule takes an ``int`` or a 0-d integer tensor and returns a 0-d float64
tensor. It is made of tensor operations alone, so it may be compiled, and it is
right for any count, also beyond its end. As in optax, the first update sees 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

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
    "exponential",
    "join_schedules",
    "linear",
    "one_cycle",
    "piecewise_constant",
    "polynomial",
    "scale_by_schedule",
    "warmup_cosine",
    "warmup_stable_decay",
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


def polynomial(start: float, end: float, power: float, steps: int, begin: int = 0) -> Schedule:
    """From ``start`` to ``end`` by a power of what is left: 1 is a line, 2 slows down at the end.

    Args:
        steps: how many counts it takes.
        begin: the count at which it begins.

    Raises:
        ValueError: ``steps`` is not positive.

    >>> [polynomial(1.0, 0.0, 2, 4)(count).item() for count in (0, 2, 4, 9)]
    [1.0, 0.25, 0.0, 0.0]
    """
    _positive("steps", steps)
    return lambda count: end + (start - end) * (1 - _progress(count, begin, steps)) ** power


def exponential(
    start: float,
    rate: float,
    steps: int,
    begin: int = 0,
    staircase: bool = False,
    end: float | None = None,
) -> Schedule:
    """``start * rate ** ((count - begin) / steps)``.

    Args:
        rate: by which it is multiplied in ``steps`` counts.
        begin: the count until which it is ``start``.
        staircase: multiply once every ``steps`` counts, not a little at each.
        end: it goes no further than this.

    Raises:
        ValueError: ``steps`` or ``rate`` is not positive.

    >>> [exponential(1.0, 0.25, 2, end=0.1)(count).item() for count in (0, 1, 2, 9)]
    [1.0, 0.5, 0.25, 0.1]
    """
    _positive("steps", steps)
    if not rate > 0:
        raise ValueError(f"rate is {rate}; what a schedule is multiplied by is positive.")

    def schedule(count: Any) -> Tensor:
        part = ((_real(count) - begin) / steps).clamp(min=0.0)
        value = start * rate ** (part.floor() if staircase else part)
        if end is None:
            return value
        return value.clamp(min=end) if rate < 1 else value.clamp(max=end)

    return schedule


def piecewise_constant(start: float, scales: Mapping[int, float]) -> Schedule:
    """Constant between some counts, at each of which it is multiplied.

    Args:
        scales: ``{count: factor}``; from that count on.

    Raises:
        ValueError: a factor is negative.

    >>> [piecewise_constant(1.0, {2: 0.5, 4: 0.1})(count).item() for count in (1, 2, 3, 4)]
    [1.0, 0.5, 0.5, 0.05]
    """
    if below := {count: factor for count, factor in scales.items() if factor < 0}:
        raise ValueError(
            f"the factors {below} are negative; a schedule is multiplied by 0 or more."
        )

    def schedule(count: Any) -> Tensor:
        number = _real(count)
        value = torch.full_like(number, start)
        for first, factor in sorted(scales.items()):
            value = torch.where(number >= first, value * factor, value)
        return value

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each counts from where it begins.

    Args:
        boundaries: the counts at which the second, the third, ... begin.

    Raises:
        ValueError: these are not as many as they must be, or do not ascend.

    >>> schedule = join_schedules([linear(0.0, 1.0, 4), constant(1.0), linear(1.0, 0.0, 2)], [4, 9])
    >>> [schedule(count).item() for count in (0, 2, 4, 8, 9, 10, 11)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if len(boundaries) != len(schedules) - 1 or any(a >= b for a, b in pairwise(boundaries)):
        raise ValueError(
            f"{len(schedules)} schedules are joined at {[*boundaries]}. Give the counts at which "
            "all but the first begin, in ascending order."
        )

    def schedule(count: Any) -> Tensor:
        value = schedules[0](count)
        for first, after in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(_real(count) < first, value, after(count - first))
        return value

    return schedule


def warmup_stable_decay(
    peak: float,
    warmup: int,
    steps: int,
    decay: int,
    end: float = 0.0,
    start: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """A line up to ``peak``, ``peak`` for most of the time, and down to ``end`` in the last steps.

    A run may be continued from before the decay, for its length was not planned with it.

    Args:
        peak: the value from count ``warmup`` on.
        warmup: the length of the line; 0 for none.
        steps: the length of the whole schedule.
        decay: how many of them go down.
        end: the value at ``steps`` and beyond.
        start: the value at count 0.
        shape: how it goes down; ``"sqrt"`` is ``1 - sqrt(part)``.

    Source: Hu et al., MiniCPM: Unveiling the Potential of Small Language Models with Scalable
    Training Strategies, 2024; Hägele et al., Scaling Laws and Compute-Optimal Training Beyond
    Fixed Training Durations, 2024 (the root).

    Raises:
        ValueError: no step goes down, or warmup and decay are longer than ``steps``; an unknown
            shape.

    >>> schedule = warmup_stable_decay(1.0, warmup=2, steps=10, decay=4)
    >>> [schedule(count).item() for count in (0, 1, 2, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _positive("decay", decay)
    _positive("steps - warmup - decay + 1", steps - warmup - decay + 1)
    if shape not in _FALLS:
        raise ValueError(f"shape is {shape!r}; it is one of {', '.join(map(repr, _FALLS))}.")

    def schedule(count: Any) -> Tensor:
        up = _mix(start, peak, _progress(count, 0, max(warmup, 1)))
        down = _mix(peak, end, _FALLS[shape](_progress(count, steps - decay, decay)))
        return torch.where(_real(count) < warmup, up, down)

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


_FALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda part: part,
    "cosine": _wave,
    "sqrt": torch.sqrt,
}


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
