"""Running averages of gradients, as the adaptive optimizers share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc import primitives, tree
from zfunc.context import reuse

__all__ = ["average", "first", "second", "wide", "zeros"]

Tree = Any


def zeros(params: Tree) -> Tree:
    """Moments of nothing seen yet, of the parameters' shapes and dtypes."""
    return tree.map(lambda p: torch.zeros_like(p, requires_grad=False), params)


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision in which updates are computed: at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def average(new: Tensor, old: Tensor, decay: float) -> Tensor:
    """``decay * old + (1 - decay) * new`` in the dtype of ``old``, in donated memory if any.

    Multiplications and additions only: each of them is rounded in the same way in
    and beside the vectors of a CPU, so that placed and plain trees agree bitwise.
    """
    return wide(reuse(old)).mul_(decay).add_(wide(new) * (1 - decay)).to(old.dtype)


def first(grads: Tree, mu: Tree, decay: float) -> Tree:
    """The running mean of the gradients, averaged over ranks where it is not yet."""
    return primitives.reduced(tree.map(lambda g, m: average(g, m, decay), grads, mu))


def second(grads: Tree, nu: Tree, decay: float) -> Tree:
    """The running mean of their squares, unless a transform has frozen it."""
    kept = tree.map(torch.clone, nu) if primitives.compressing() else nu
    new = tree.map(lambda g, v: average(wide(g) * wide(g), v, decay), grads, nu)
    return primitives.settled(kept, new)
