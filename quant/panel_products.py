"""Products with low-bit weights on a CPU of x86-64, by :mod:`zfunc.kernels.panels`.

All formats take this route. Weights are put into panels when they are first multiplied with, and
the panels replace the stored codes. ``dynamic`` formats round inputs to 8 bits, others to 16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zfunc.kernels import dispatch, panels
from zfunc.kernels.panels import Panels, Rounded
from zfunc.quant.large_pages import into_large_pages
from zfunc.quant.low_bit import LowBit
from zfunc.trees.kinds import FORESEEN

__all__ = ["holds", "product", "several", "takes"]

FEW = 4  # rows that are rounded in less time than it takes to keep them
_PLAIN = (Tensor, torch.nn.Parameter)


def takes(x: Tensor, weight: LowBit) -> bool:
    """Whether this route is there; ``kernels.use("torch")`` closes it.

    It reads memory itself, so tensors without any (traced, or under a transform of torch.func)
    go elsewhere, and those that stand for the negative of what lies there.
    """
    if (
        dispatch.forced() not in (None, "llvm")
        or type(x) not in _PLAIN
        or FORESEEN.get()
        or torch.compiler.is_compiling()
    ):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_neg():
        return False
    if not panels.worth(x.shape[0]):
        return False
    if holds(weight):  # between narrow layers Python counts
        return True
    n, k = weight.rows
    return n > 0 and k > 0 and panels.takes(weight.format.width(k), weight.format.groups(k))


def holds(weight: LowBit) -> bool:
    """Whether the codes lie in panels."""
    return type(weight._store.ready) is Panels


def product(x: Tensor, weight: LowBit) -> Tensor:
    """``x W^T`` for fp32 ``x`` ``[m, k]``."""
    ready: Panels = weight.ready(Panels, functools.partial(_panels, weight))
    return panels.linear(x, ready, 8 if weight.format.dynamic else 16)


def several(x: Tensor, weights: Sequence[LowBit]) -> list[Tensor]:
    """``x W^T`` for each of several weights: many rows are rounded once for those of one format."""
    if x.shape[0] <= FEW:
        return [product(x, weight) for weight in weights]
    made: dict[tuple[int, int, int, int], Rounded] = {}
    out = []
    for weight in weights:
        ready: Panels = weight.ready(Panels, functools.partial(_panels, weight))
        bits = 8 if weight.format.dynamic else 16
        key = bits, ready.bits, ready.groups, ready.filled  # as many groups may be narrower
        if key not in made:
            made[key] = panels.rounded(x, ready, bits)
        out.append(panels.matmul(made[key], ready))
    return out


def _panels(weight: LowBit) -> Panels:
    (n, k), form = weight.rows, weight.format
    short = weight.scale.dtype == torch.bfloat16
    scale = weight.scale if short else weight.scale.float()
    bits = 4 if form.packed else 8
    made = panels.panels(weight.codes, scale, weight.zero, bits, form.width(k))
    into_large_pages(made.data)
    into_large_pages(made.scale)
    # The grid is read from where the panels have it, so that nothing is kept twice.
    weight.scale = made.scale[:, :n].t()
    if made.zero is not None:
        weight.zero = made.zero[:, :n].t()
    return made
