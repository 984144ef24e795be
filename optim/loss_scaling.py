"""Loss scales: keep 16-bit gradients inside the range of their dtype.

fp16 gradients underflow long before fp32 ones would. Backward therefore starts from a
large number instead of 1, and the gradients are divided by it in the end. How large
it may be is found by trial: a step whose gradients overflow is left out and the scale
halved; when none has overflowed for a while it is doubled.

Source: Micikevicius et al., Mixed Precision Training, 2018,
https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zfunc.buffers.readings import number
from zfunc.errors import NonFiniteError

__all__ = ["DynamicScale", "ScaleState", "next_scale"]

LARGEST = 2.0**127  # of the powers of two that fp32 holds; twice that could never be halved


class ScaleState(NamedTuple):
    """What a dynamic loss scale remembers; 0-d CPU tensors.

    Attributes:
        scale: fp32; multiplies the loss.
        patience: int64; overflows that are borne before the scale is halved, this one
            included.
        last_overflow: int64; in which step the last one was, -1 if there was none.
        steps: int64; how many steps there were, skipped ones included.
    """

    scale: Tensor
    patience: Tensor
    last_overflow: Tensor
    steps: Tensor


@dataclass(frozen=True)
class DynamicScale:
    """The rules of a dynamic loss scale.

    Attributes:
        power: it begins at ``2 ** power``.
        window: good steps after which it is doubled; one more is needed after an overflow
            and at the beginning.
        hysteresis: overflows that it takes to halve it.
        minimum: it never falls below this.
        consecutive: whether a good step forgives the overflows before it; otherwise only
            doubling does.

    Raises:
        ValueError: a rule that means nothing.
    """

    power: float = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False

    def __post_init__(self) -> None:
        if not self.power <= math.log2(LARGEST):
            raise ValueError(
                f"{self}: it would begin at 2 ** {self.power:g}, and float32 ends at 2 ** 127. "
                "power is an exponent: 16 begins at 65536."
            )
        if self.window < 1 or self.hysteresis < 1 or not 0 < self.minimum <= 2.0**self.power:
            raise ValueError(
                f"{self}: expected a window and a hysteresis of at least 1, and 0 < minimum <= "
                f"2 ** power ({2.0**self.power:g})"
            )

    def init(self) -> ScaleState:
        """The state before the first step.

        >>> DynamicScale(power=4).init().scale
        tensor(16.)
        """
        return ScaleState(
            torch.tensor(2.0**self.power, dtype=torch.float32, device="cpu"),
            *(torch.tensor(n, device="cpu") for n in (self.hysteresis, -1, 0)),
        )


def next_scale(
    state: ScaleState,
    overflow: bool | Tensor,
    rules: DynamicScale | None = None,
    leaf: str = "",
) -> ScaleState:
    """The state after a step, a pure function.

    Args:
        state: before it.
        overflow: whether a gradient of the step had a NaN or an infinity on any rank.
        rules: the defaults if None.
        leaf: path of the gradient that overflowed, for the error.

    Raises:
        NonFiniteError: an overflow is to halve the scale, which is at its minimum.

    >>> rules = DynamicScale(power=4, window=2, hysteresis=1)
    >>> state = next_scale(rules.init(), True, rules)
    >>> scales = [state.scale]
    >>> for _ in range(3):
    ...     state = next_scale(state, False, rules)
    ...     scales.append(state.scale)
    >>> [int(scale) for scale in scales]
    [8, 8, 8, 16]
    """
    rules = rules or DynamicScale()
    scale, patience, last, steps = map(number, state)
    if number(overflow):
        last = steps
        if rules.hysteresis > 1 and patience > 1:
            patience -= 1
        elif scale <= rules.minimum:
            raise NonFiniteError(
                f"the gradient of {leaf or 'a parameter'} overflows at a loss scale of {scale:g}, "
                f"its minimum, in step {steps}. "
                "Lower the learning rate, clip the gradients, or compute in bfloat16, whose range "
                "is that of float32."
            )
        else:
            scale = max(scale / 2, rules.minimum)
    else:
        good = steps - last - 1
        doubled = good > 0 and good % rules.window == 0
        if rules.consecutive or doubled:
            patience = rules.hysteresis
        if doubled:
            scale = min(scale * 2, LARGEST)
    return ScaleState(
        torch.tensor(scale, dtype=torch.float32, device="cpu"),
        *(torch.tensor(n, device="cpu") for n in (patience, last, steps + 1)),
    )
