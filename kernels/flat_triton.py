"""What Triton kernels over flat buffers share: their launch, and how hyperparameters are read.

A program has a block of elements. Hyperparameters are float64 and computed with in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.flat_updates import Buffers

__all__ = ["betas", "number", "over_flat", "updating"]


@triton.jit
def number(hyper, i: tl.constexpr):
    """A hyperparameter."""
    return tl.load(hyper + i).to(tl.float32)


@triton.jit
def betas(hyper):
    """Both decays, and what is left of 1, which is taken in float64."""
    rest1 = (1.0 - tl.load(hyper + 1)).to(tl.float32)
    rest2 = (1.0 - tl.load(hyper + 2)).to(tl.float32)
    return number(hyper, 1), number(hyper, 2), rest1, rest2


def over_flat(name: str, kernel: Any, x: Tensor, *rest: Tensor, **constants: bool) -> None:
    """Launch a kernel ``(x, *rest, n)``, with ``BLOCK`` as it is configured for ``name``."""
    if n := x.numel():
        how = dispatch.config(name, x.device)
        kernel[(triton.cdiv(n, how["BLOCK"]),)](x, *rest, n, **constants, **how)


def updating(name: str, kernel: Any) -> Callable[..., None]:
    """The launcher of a :class:`~zfunc.kernels.flat_updates.FlatUpdate` of that name.

    Args:
        kernel: ``(grad, *state, *new state, low, hyper, n)``, with the constant ``LOW``.
    """

    def launch(
        grad: Tensor, state: Buffers, new: Buffers, low: Tensor | None, *, hyper: Tensor
    ) -> None:
        copy = low if low is not None else state[0]  # stands for a pointer that is not read
        over_flat(name, kernel, grad, *state, *new, copy, hyper, LOW=low is not None)

    return launch
