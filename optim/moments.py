"""Running averages of gradients, as the adaptive optimizers share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.trees import tree
from zfunc.trees.memory import missed, reuse
from zfunc.trees.reduction import linear_map
from zfunc.trees.squares import wide

__all__ = ["blend", "zeros"]

Tree = Any


def zeros(params: Tree) -> Tree:
    """Moments of nothing seen yet, of the parameters' shapes and dtypes."""
    return tree.map(lambda p: torch.zeros_like(p), params)


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
    old = tree.map(lambda a: a.view_as(a), old)
    if (used := missed()) is not None:  # what a step has not used stays
        return tree.map_leaves(lambda path, x, a: one(x, a) if path in used else a, new, old)
    return tree.map(one if square else linear_map(one), new, old)
