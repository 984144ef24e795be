"""Explicit, differentiable collectives over a named mesh axis: ``psum``, ``pmean``, ``axis_index``.

As in JAX, the transpose of a sum over ranks is the sum over ranks of the cotangents; a mean is
its own transpose. Outside a world, each is the identity. Where no axis is named they go over all
ranks that have other rows of the batch: those along ``data``, and ``replica`` where a mesh has it.
Those that move parts are in :mod:`zfunc.ranks.redistribution`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Axes
from zfunc.ranks.world import MESH, current
from zfunc.trees.nodes import NAMESPACE

__all__ = [
    "axis_index",
    "counts",
    "differentiable",
    "largest",
    "mean_over",
    "pmean",
    "psum",
    "ranks_along",
    "transposable",
]

Tree = TypeVar("Tree")
Way = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def psum(x: Tree, axis: Axes | None = None) -> Tree:
    """The sum over ranks, of a tensor or of every tensor in a pytree.

    They are those along ``axis``, or several; by default all that have other rows of the batch.

    Differentiable, as often as you like; its gradient is the sum over ranks of the gradients.
    Bools are counted, in int64.

    Raises:
        ValueError: the current mesh has no such axis.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> psum(torch.ones(2)), psum(torch.tensor(True))
    (tensor([1., 1.]), tensor(1))
    """
    return _over(counts(x), axis, "psum", mean=False)


def pmean(x: Tree, axis: Axes | None = None) -> Tree:
    """The mean over ranks, of a tensor or of every tensor in a pytree.

    They are those along ``axis``, or several; by default all that have other rows of the batch.

    Differentiable, as often as you like; its gradient is the mean over ranks of the gradients.

    Raises:
        TypeError: a leaf is not of a floating or complex dtype.
        ValueError: the current mesh has no such axis.
        DesyncError: another rank is in another collective, silent or gone.

    >>> pmean({"loss": torch.tensor(3.0)})
    {'loss': tensor(3.)}
    """
    return _over(x, axis, "pmean", mean=True)


def axis_index(axis: Axes | None = None) -> int:
    """This rank's index along ``axis``, by default among all with other rows; 0 outside a world.

    >>> axis_index("data")
    0
    """
    ranks = ranks_along(axis)
    return 0 if ranks is None else ranks.rank


def ranks_along(axis: Axes | None) -> Group | None:
    """The group along ``axis`` of the current mesh; ``None`` outside a world."""
    mesh = MESH.get()
    if mesh is None and current().size == 1:
        return None
    return group(mesh, axis or ("data" if mesh is None else mesh.batch))


def counts(x: Tree) -> Tree:
    """Bools as int64, of which a sum is a number."""

    def count(x: Any) -> Any:
        return x.long() if isinstance(x, Tensor) and x.dtype is torch.bool else x

    return cast(Tree, optree.tree_map(count, cast(Any, x), namespace=NAMESPACE))


def mean_over(ranks: Group, x: Tensor) -> Tensor:
    """The mean of a tensor over the ranks of a group; differentiable."""
    if ranks.size == 1:
        return x
    return _reduced([x], ranks, "pmean", mean=True)[0]


def _over(x: Tree, axis: Axes | None, label: str, mean: bool) -> Tree:
    ranks = ranks_along(axis)
    leaves, treedef = optree.tree_flatten(cast(Any, x), namespace=NAMESPACE)
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    if mean:
        exact = [t.dtype for t in tensors if not differentiable(t)]
        if exact:
            raise TypeError(f"pmean of {exact[0]}: expected floats; use psum, or x.float()")
    if ranks is None or ranks.size == 1 or not tensors:
        return x
    reduced = _reduced(tensors, ranks, label, mean)
    return cast(Tree, optree.tree_unflatten(treedef, reduced))


def largest(x: Tensor, ranks: Group, label: str = "") -> Tensor:
    """The elementwise maximum over ranks, the same bits on all of them; NaN if a rank has one.

    Not differentiable. It is for few numbers, scales say: every rank sends its own to all others.

    Args:
        x: of one shape and dtype on all ranks.
        ranks: the group.
        label: names it in errors and ledgers.

    Returns:
        A new tensor, except where a rank is alone.

    Raises:
        DesyncError: another rank is in another collective, silent or gone.

    >>> from zfunc.ranks.axes import alone
    >>> largest(torch.tensor([1.0, 3.0]), alone())
    tensor([1., 3.])
    """
    if ranks.size == 1:
        return x
    mine = x.detach().reshape(-1)
    every = mine.new_empty(ranks.size * mine.numel())
    ranks.all_gather(every, mine, label=label).wait()
    return every.view(ranks.size, *x.shape).amax(0)


def _reduced(xs: Sequence[Tensor], ranks: Group, label: str, mean: bool) -> Sequence[Tensor]:
    """Linear and symmetric, so its own transpose."""
    way = partial(_reduce, ranks=ranks, mean=mean)
    return transposable(xs, partial(way, label=label), partial(way, label=f"{label} backward"))


def _reduce(xs: Sequence[Tensor], ranks: Group, label: str, mean: bool) -> Sequence[Tensor]:
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in xs]
    handles = [ranks.all_reduce(copy, label=label) for copy in copies]
    sums = [handle.wait() for handle in handles]
    return [total.div_(ranks.size) for total in sums] if mean else sums


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of this dtype may have a gradient."""
    return x.is_floating_point() or x.is_complex()


def transposable(xs: Sequence[Tensor], way: Way, back: Way) -> Sequence[Tensor]:
    """``way(xs)``, whose gradients go ``back``, and theirs go ``way`` again.

    Args:
        xs: tensors, to which ``way`` is linear. Those of integers have no gradient.
        way, back: linear maps that are each other's transpose, of any number of tensors; each
            result has memory of its own.
    """
    found: Sequence[Tensor] = _Transposable.apply(way, back, *xs)
    return found


class _Transposable(torch.autograd.Function):
    """A linear map, which saves nothing."""

    @staticmethod
    def forward(way: Way, back: Way, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(way(xs))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.way, ctx.back, *xs = inputs  # type: ignore[attr-defined]
        ctx.floats = [differentiable(x) for x in xs]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sent = [grad for grad, is_float in zip(grads, ctx.floats, strict=True) if is_float]
        came = iter(_Transposable.apply(ctx.back, ctx.way, *sent))
        return None, None, *(next(came) if is_float else None for is_float in ctx.floats)
