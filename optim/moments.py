"""Running averages of gradients, as the adaptive optimizers share them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zfunc.engine import primitives
from zfunc.errors import CompositionError
from zfunc.kernels.frozen import wide
from zfunc.layout.unreduced import linear_map
from zfunc.optim import units
from zfunc.optim.schedules import plain
from zfunc.trees import tree
from zfunc.trees.memory import reuse

__all__ = ["blend", "check_begun", "first", "growth", "second", "wide", "zeros"]

LEAPS = 16  # in which moments of 16 bits double, once they are frozen

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
    if (used := primitives.missed()) is not None:  # what a step has not used stays
        return tree.map_leaves(lambda path, x, a: one(x, a) if path in used else a, new, old)
    return tree.map(one if square else linear_map(one), new, old)


def first(
    grads: Tree, mu: Tree, decay: float, nu: Tree = None, correction: float | Tensor = 1.0
) -> Tree:
    """The running mean of the gradients, averaged over ranks where it is not yet.

    Args:
        nu, correction: frozen second moments; see :mod:`zfunc.optim.units`.
    """
    if nu is None or not units.local(grads):
        return primitives.reduced(blend(grads, mu, decay, 1 - decay), momentum=True)
    shares = primitives.reduced(units.shares(grads, mu, nu, decay, correction))
    return units.momentum(shares, nu, correction)


def second(grads: Tree, nu: Tree, decay: float, count: Tensor) -> Tree:
    """The running mean of their squares, unless a transform has frozen it.

    A frozen one stays what it was *after* its bias is corrected: it grows as the mean of
    equal squares would, by ``(1 - decay**count) / (1 - decay**(count - 1))``.

    Args:
        count: the number of this step, from 1; 0-d.
    """
    if primitives.frozen():
        kept = tree.map(lambda v: (wide(v) * growth(decay, count, v.dtype)).to(v.dtype), nu)
        return primitives.settled(kept, kept, decay)
    kept = tree.map(torch.clone, nu) if primitives.compressing() else None
    new = blend(primitives.reduced(grads), nu, decay, 1 - decay, square=True)
    return primitives.settled(kept, new, decay)


def growth(decay: float, count: Tensor, dtype: torch.dtype = torch.float32) -> float | Tensor:
    """By how much a running mean of equal numbers that starts from 0 grows in this step.

    Args:
        dtype: of the mean. In 16 bits a growth of a fraction of a per cent would be rounded away
            in every step; there it comes in leaps of ``2**(1/16)``, so that the mean is at most
            4.4 % from where it should be, and its root 2.2 %.

    Raises:
        CompositionError: it is the first, from nothing.

    >>> count = torch.tensor(100)
    >>> growth(0.999, count), growth(0.999, count, torch.bfloat16)
    (1.0096..., 1.0)
    """
    number = plain(count)
    if isinstance(number, Tensor):
        both = torch.stack([1 - decay**number, (1 - decay ** (number - 1)).clamp_min(1e-38)])
        if dtype.itemsize < 4:
            both = torch.exp2((both.log2() * LEAPS).floor() / LEAPS)
        return torch.where(number > 1, both[0] / both[1], 1.0)
    check_begun(number)
    now, before = 1 - decay**number, 1 - decay ** (number - 1)
    if dtype.itemsize < 4:
        return 2.0 ** ((_leap(now) - _leap(before)) / LEAPS)
    return now / before


def _leap(correction: float) -> int:
    return math.floor(math.log2(correction) * LEAPS)


def check_begun(number: float) -> None:
    """Raise ``CompositionError`` where moments are frozen in step ``number`` 1."""
    if number <= 1:
        raise CompositionError(
            "compress_grads freezes second moments in the first step of an optimizer, before "
            "anything has gone into them. Give it a freeze_step of 1 at least; it counts from the "
            "step of the state that it places, so with a new optimizer let that begin at 0: "
            "state.replace(step=torch.tensor(0))."
        )
