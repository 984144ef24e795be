"""The bit schedule of mixture-of-quantization training (MoQ), as a pure function of its state.

Every weight has its own number of bits and its own period. A step counts if it is taken. When the
count, from ``offset`` on, reaches a weight's period, the weight loses one bit and its period
becomes ``2 * factor`` times as long. With ``factor = 1`` bits fall after P, 2P, 4P, ... steps.
Weights with large curvature get a larger factor (1 to 5), and so lose their bits later.

After it has lost a bit, a weight may be mixed with its rounded form,
``ratio * w + (1 - ratio) * rounded``. The ratio falls from 1 by ``mix_rate`` a step.

Source: the MoQ tutorial and configuration of DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.readings import number

__all__ = ["FULL", "Rules", "advance", "dropping", "factors", "start"]

FULL = 16  # bits from which on nothing is rounded

Schedule = dict[str, Tensor]


@dataclass(frozen=True)
class Rules:
    """How bits fall.

    ``start_bits`` and ``period`` decide how a schedule begins, and mean nothing later; the others
    count step by step, and may change between two steps.

    Attributes:
        start_bits, target_bits: from where to where, one at a time. Bits that are below a target
            stay where they are.
        period: steps until the first bit falls.
        offset: steps before anything is rounded or counted.
        mix_rate: how fast the mixing ratio falls; None mixes nothing.

    Raises:
        ValueError: a schedule that means nothing.
    """

    start_bits: int = 16
    target_bits: int = 8
    period: int = 100
    offset: int = 0
    mix_rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("start_bits", "target_bits"):
            bits = getattr(self, name)
            if type(bits) is not int or not 2 <= bits <= FULL:
                raise ValueError(f"{name}={bits!r}: expected a whole number from 2 to {FULL}.")
        if self.start_bits < self.target_bits:
            raise ValueError(
                f"start_bits={self.start_bits} lies below target_bits={self.target_bits}: bits "
                "only fall. Start at the target for a fixed width."
            )
        if type(self.period) is not int or self.period < 1:
            raise ValueError(f"period={self.period!r}: expected a number of steps, at least 1.")
        if type(self.offset) is not int or self.offset < 0:
            raise ValueError(f"offset={self.offset!r}: expected a number of steps, at least 0.")
        if self.mix_rate is not None and not 0 < self.mix_rate <= 1:
            raise ValueError(f"mix_rate={self.mix_rate!r}: expected 0 < mix_rate <= 1, or None.")


def start(rules: Rules, count: int) -> Schedule:
    """The schedule of ``count`` weights before the first step: a dict of tensors.

    ``steps`` is 0-d int64, ``bits`` and ``periods`` are int64 ``[count]``, ``ratio`` and
    ``curvature`` fp32 ``[count]``; ``begun``, int64 ``[2]``, has the rules' bits and period.
    """
    return {
        "steps": torch.zeros((), dtype=torch.int64),
        "bits": torch.full((count,), rules.start_bits),
        "periods": torch.full((count,), rules.period),
        "ratio": torch.full((count,), 0.0 if rules.mix_rate is None else 1.0),
        "curvature": torch.zeros(count),
        "begun": torch.tensor([rules.start_bits, rules.period], device="cpu"),
    }


def dropping(schedule: Schedule, rules: Rules) -> Tensor:
    """Which weights lose a bit when the running step is done: bool ``[count]``."""
    counted = number(schedule["steps"]) + 1 - rules.offset
    return (schedule["bits"] > rules.target_bits) & (counted >= schedule["periods"])


def advance(schedule: Schedule, rules: Rules, curvature: Tensor | None = None) -> Schedule:
    """The schedule after one more step.

    Args:
        curvature: of each weight's layer, relative to the largest, in [0, 1], where it was
            measured in this step.

    >>> state, seen = start(Rules(16, 13, period=2), 1), []
    >>> for _ in range(10):
    ...     state = advance(state, Rules(16, 13, period=2))
    ...     seen.append(int(state["bits"]))
    >>> seen
    [16, 15, 15, 14, 14, 14, 14, 13, 13, 13]
    """
    new: dict[str, Any] = {**schedule, "steps": schedule["steps"] + 1}
    if curvature is not None:
        new["curvature"] = curvature.to(torch.float32)
    if number(new["steps"]) <= rules.offset:
        return new
    drop = dropping(schedule, rules)
    slower = 2 * schedule["periods"] * factors(new["curvature"])
    new["bits"] = schedule["bits"] - drop.long()
    new["periods"] = torch.where(drop, slower, schedule["periods"])
    if rules.mix_rate is None:
        new["ratio"] = torch.zeros_like(schedule["ratio"])
    else:
        ratio = (schedule["ratio"] - rules.mix_rate).clamp_min(0)
        new["ratio"] = torch.where(drop, torch.ones_like(ratio), ratio)
    return new


def factors(curvature: Tensor) -> Tensor:
    """``1 + floor(4 curvature)``, int64, of curvatures in [0, 1].

    >>> factors(torch.tensor([0.0, 0.3, 1.0]))
    tensor([1, 2, 5])
    """
    return 1 + (4 * curvature).floor().long()
