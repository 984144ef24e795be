"""Running averages of gradients, as the adaptive optimizers share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import primitives, tree
from zfunc.context import reuse
from zfunc.errors import CompositionError
from zfunc.nodes import NAMESPACE
from zfunc.optim.schedules import plain
from zfunc.placed.unreduced import Unreduced, linear_map

__all__ = ["CHUNK", "blend", "check_begun", "first", "growth", "second", "wide", "zeros"]

CHUNK = 1 << 15  # elements that stay in cache between the operations

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
    f = one if square else linear_map(one)
    return tree.map(f, new, tree.map(lambda a: a.view_as(a), old))


def first(
    grads: Tree, mu: Tree, decay: float, nu: Tree = None, correction: float | Tensor = 1.0
) -> Tree:
    """The running mean of the gradients, averaged over ranks where it is not yet.

    Args:
        nu: frozen second moments. Then an element travels in units of the root of its own, which
            makes all of one size: few bits serve them best. The scaling coefficients of 1-bit LAMB
            do that for each leaf. An element without a second moment becomes 0.
        correction: of their bias. What is left of one step's rounding goes into the next, so units
            must not grow as ``nu`` does.
    """
    new = blend(grads, mu, decay, 1 - decay)
    if nu is None or not _are_local(new):
        return primitives.reduced(new)
    shares = primitives.reduced(tree.map(linear_map(partial(_share, correction)), new, nu))
    return tree.map(partial(_times, correction), shares, nu)


def _share(correction: float | Tensor, x: Tensor, v: Tensor) -> Tensor:
    def one(part: Tensor, size: Tensor) -> Tensor:
        return part.div_(size).masked_fill_(size == 0, 0.0)

    return _by_roots(one, x, v, correction)


def _times(correction: float | Tensor, x: Tensor, v: Tensor) -> Tensor:
    return _by_roots(Tensor.mul_, x, v, correction)


def _by_roots(
    f: Callable[[Tensor, Tensor], Tensor], x: Tensor, v: Tensor, correction: float | Tensor
) -> Tensor:
    """``f(x, sqrt(v / correction))`` in the memory of ``x``, which is ours, chunk by chunk."""
    out = x.contiguous()
    flat, seconds = out.view(-1), v.contiguous().view(-1)
    for a in range(0, flat.numel(), CHUNK):
        part = flat[a : a + CHUNK]
        size = (wide(seconds[a : a + CHUNK]) / correction).sqrt_()
        part.copy_(f(part.to(size.dtype, copy=True), size))
    return out


def _are_local(tree_: Tree) -> bool:
    found = optree.tree_leaves(
        tree_, is_leaf=lambda node: isinstance(node, Unreduced), namespace=NAMESPACE
    )
    return any(isinstance(node, Unreduced) and not node.done for node in found)


def second(grads: Tree, nu: Tree, decay: float, count: Tensor) -> Tree:
    """The running mean of their squares, unless a transform has frozen it.

    A frozen one stays what it was *after* its bias is corrected: it grows as the mean of
    equal squares would, by ``(1 - decay**count) / (1 - decay**(count - 1))``.

    Args:
        count: the number of this step, from 1; 0-d.
    """
    if primitives.frozen():
        grown = growth(decay, count)
        kept = tree.map(lambda v: (wide(v) * grown).to(v.dtype), nu)
        return primitives.settled(kept, kept, decay)
    kept = tree.map(torch.clone, nu) if primitives.compressing() else None
    new = blend(primitives.reduced(grads), nu, decay, 1 - decay, square=True)
    return primitives.settled(kept, new, decay)


def growth(decay: float, count: Tensor) -> float | Tensor:
    """By how much a running mean of equal numbers that starts from 0 grows in this step.

    Raises:
        CompositionError: it is the first, from nothing.
    """
    number = plain(count)
    if isinstance(number, Tensor):
        before = 1 - decay ** (number - 1)
        return torch.where(number > 1, (1 - decay**number) / before.clamp_min(1e-38), 1.0)
    check_begun(number)
    return (1 - decay**number) / (1 - decay ** (number - 1))


def check_begun(number: float) -> None:
    """Raise ``CompositionError`` where moments are frozen in step ``number`` 1."""
    if number <= 1:
        raise CompositionError(
            "compress_grads freezes second moments in the first step of an optimizer, before "
            "anything has gone into them. Give it a freeze_step of 1 at least; it counts from the "
            "step of the state that it places, so with a new optimizer let that begin at 0: "
            "state.replace(step=torch.tensor(0))."
        )
