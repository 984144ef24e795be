"""Running averages of gradients, as the adaptive optimizers share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc import primitives, tree
from zfunc.context import reuse

__all__ = ["blend", "first", "second", "wide", "zeros"]

Tree = Any


def zeros(params: Tree) -> Tree:
    """Moments of nothing seen yet, of the parameters' shapes and dtypes."""
    return tree.map(lambda p: torch.zeros_like(p), params)


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision in which updates are computed: at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def blend(new: Tree, old: Tree, keep: float, gain: float, square: bool = False) -> Tree:
    """``keep * old + gain * new`` in the dtypes of ``old``, in donated memory if any.

    Multiplications and additions only: each of them is rounded in the same way in
    and beside the vectors of a CPU, so that placed and plain trees agree bitwise.

    Args:
        new: gradients, whatever has no value there is ``None`` in the result.
        square: take ``new * new`` for ``new``.

    >>> blend(torch.tensor([3.0]), torch.tensor([1.0]), 0.5, 0.5, square=True)
    tensor([5.])
    """

    def one(x: Tensor, a: Tensor) -> Tensor:
        x = wide(x) * wide(x) if square else wide(x)
        return wide(reuse(a)).mul_(keep).add_(x if gain == 1 else x * gain).to(a.dtype)

    # Aliases of all first: `reuse` blanks every tensor of the old state in the same storage.
    return tree.map(one, new, tree.map(lambda a: a.view_as(a), old))


def first(grads: Tree, mu: Tree, decay: float) -> Tree:
    """The running mean of the gradients, averaged over ranks where it is not yet."""
    return primitives.reduced(blend(grads, mu, decay, 1 - decay))


def second(grads: Tree, nu: Tree, decay: float) -> Tree:
    """The running mean of their squares, unless a transform has frozen it."""
    kept = tree.map(torch.clone, nu) if primitives.compressing() else nu
    return primitives.settled(kept, blend(grads, nu, decay, 1 - decay, square=True))
