"""Explicit, differentiable collectives over a named mesh axis: ``psum``, ``pmean``, ``axis_index``.

As in JAX, the transpose of a sum over ranks is the sum over ranks of the cotangents; a mean is
its own transpose. Outside a world, each is the identity. Where no axis is named they go over all
ranks that have other rows of the batch: those along ``data``, and ``replica`` where a mesh has it.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Axes
from zfunc.ranks.world import MESH, current
from zfunc.trees.nodes import NAMESPACE

__all__ = ["axis_index", "largest", "mean_over", "pmean", "psum"]

Tree = TypeVar("Tree")


def psum(x: Tree, axis: Axes | None = None) -> Tree:
    """The sum over ranks, of a tensor or of every tensor in a pytree.

    They are those along ``axis``, or several; by default all that have other rows of the batch.

    Differentiable; its gradient is the sum over ranks of the gradients.

    Raises:
        ValueError: the current mesh has no such axis.
        DesyncError: another rank is in another collective, silent or gone.

    >>> psum(torch.ones(2))
    tensor([1., 1.])
    """
    return _over(x, axis, "psum", mean=False)


def pmean(x: Tree, axis: Axes | None = None) -> Tree:
    """The mean over ranks, of a tensor or of every tensor in a pytree.

    They are those along ``axis``, or several; by default all that have other rows of the batch.

    Differentiable; its gradient is the mean over ranks of the gradients.

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
    ranks = _ranks(axis)
    return 0 if ranks is None else ranks.rank


def _ranks(axis: Axes | None) -> Group | None:
    """The group along ``axis`` of the current mesh; ``None`` outside a world."""
    mesh = MESH.get()
    if mesh is None and current().size == 1:
        return None
    return group(mesh, axis or ("data" if mesh is None else mesh.batch))


def mean_over(ranks: Group, x: Tensor) -> Tensor:
    """The mean of a tensor over the ranks of a group; differentiable."""
    if ranks.size == 1:
        return x
    return _Reduce.apply(ranks, "pmean", True, x)[0]


def _over(x: Tree, axis: Axes | None, label: str, mean: bool) -> Tree:
    ranks = _ranks(axis)
    leaves, treedef = optree.tree_flatten(cast(Any, x), namespace=NAMESPACE)
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    if mean:
        exact = [t.dtype for t in tensors if not (t.is_floating_point() or t.is_complex())]
        if exact:
            raise TypeError(f"pmean of {exact[0]}: expected floats; use psum, or x.float()")
    if ranks is None or ranks.size == 1 or not tensors:
        return x
    reduced = _Reduce.apply(ranks, label, mean, *tensors)
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


class _Reduce(torch.autograd.Function):
    """Sum (and divide) each tensor over ranks: linear and symmetric, so its own transpose."""

    @staticmethod
    def forward(ranks: Group, label: str, mean: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in xs]
        handles = [ranks.all_reduce(copy, label=label) for copy in copies]
        sums = [handle.wait() for handle in handles]
        return tuple(total.div_(ranks.size) for total in sums) if mean else tuple(sums)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.ranks, ctx.label, ctx.mean = inputs[:3]  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = _Reduce.forward(ctx.ranks, f"{ctx.label} backward", ctx.mean, *grads)
        return None, None, None, *back
