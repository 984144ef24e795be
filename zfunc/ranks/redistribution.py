"""Collectives that move parts between ranks, with gradients: ``all_gather`` and its like.

Names, shapes and transposes are JAX's (``jax.lax``). Cotangents are summed over ranks, since
what ranks compute is one function of all their inputs:

| function | transpose |
|---|---|
| ``all_gather`` | ``psum_scatter`` |
| ``psum_scatter`` | ``all_gather`` |
| ``all_to_all(split, concat)`` | ``all_to_all(concat, split)`` |
| ``ppermute(perm)`` | ``ppermute`` of the inverse |
| ``pmax``, ``pmin`` | the sum, to the elements that attain it |

Source: Bradbury et al., JAX, 2018, module ``jax.lax`` (parallel operators).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from zfunc.ranks.axes import alone
from zfunc.ranks.collectives import counts, ranks_along, transposable
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Axes
from zfunc.trees.nodes import NAMESPACE

__all__ = ["all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum_scatter"]

Tree = TypeVar("Tree")
Perm = Iterable[tuple[int, int]]


def all_gather(x: Tree, axis: Axes | None = None, dim: int = 0, tiled: bool = False) -> Tree:
    """What every rank has, put together in the order of ranks; of a tensor or of each in a pytree.

    Differentiable; its gradient is summed over ranks, and each gets its part of that.

    Args:
        x: of one shape ``[..., d, ...]`` and dtype on all ranks.
        axis: an axis of the mesh, or several; by default all ranks that have other rows.
        dim: along which dimension of the result.
        tiled: concatenate instead of stacking.

    Returns:
        ``[..., size, d, ...]``, with a new dimension ``dim`` of as many ranks; if ``tiled``,
        ``[..., size * d, ...]``.

    Raises:
        ValueError: the mesh has no such axis, or ``x`` no such dimension.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> all_gather(torch.ones(3)).shape, all_gather(torch.ones(3), tiled=True).shape
    (torch.Size([1, 3]), torch.Size([3]))
    """
    ranks, (tensors, rebuilt) = ranks_along(axis), _leaves(x)
    rows = _moved(tensors, ranks, "all_gather", _gather, _scatter)
    return rebuilt([_placed(row, dim, tiled, "all_gather") for row in rows])


def psum_scatter(x: Tree, axis: Axes | None = None, dim: int = 0, tiled: bool = False) -> Tree:
    """The sum over ranks, of which each gets its part; of a tensor or of each in a pytree.

    Differentiable; its gradient is that of every rank, put together. Bools are counted, in int64.

    Args:
        x: ``[..., size, ...]``, of one shape and dtype on all ranks; if ``tiled``,
            ``[..., size * d, ...]``.
        axis: an axis of the mesh, or several; by default all ranks that have other rows.
        dim: which dimension is dealt out.
        tiled: leave the dimension there.

    Returns:
        ``[...]``, without ``dim``; if ``tiled``, ``[..., d, ...]``.

    Raises:
        ValueError: the mesh has no such axis; ``dim`` has not as many elements as there are
            ranks, or no multiple if ``tiled``.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> psum_scatter(torch.ones(1, 3)).shape, psum_scatter(torch.ones(6), tiled=True).shape
    (torch.Size([3]), torch.Size([6]))
    """
    ranks, (tensors, rebuilt) = ranks_along(axis), _leaves(counts(x))
    rows = [_dealt(t, dim, tiled, ranks, "psum_scatter") for t in tensors]
    return rebuilt(_moved(rows, ranks, "psum_scatter", _scatter, _gather))


def all_to_all(x: Tree, axis: Axes | None, split: int, concat: int, tiled: bool = False) -> Tree:
    """Each rank's i-th part for rank i; of a tensor or of each in a pytree.

    Differentiable; its gradient goes the way back.

    Args:
        x: of one shape and dtype on all ranks.
        axis: an axis of the mesh, or several; None is all ranks that have other rows.
        split: the dimension that is dealt out, of as many elements as there are ranks; if
            ``tiled``, of a multiple.
        concat: the dimension along which what comes is stacked, in the order of ranks.
        tiled: concatenate instead of stacking, and leave the dimension ``split`` there.

    Returns:
        ``x`` without ``split``, with a new dimension ``concat`` of as many elements as there are
        ranks; if ``tiled``, ``x`` with ``split`` so many times shorter, ``concat`` longer.

    Raises:
        ValueError: the mesh has no such axis; ``split`` has another number of elements.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> all_to_all(torch.ones(4, 6), None, split=1, concat=0, tiled=True).shape
    torch.Size([4, 6])
    """
    ranks, (tensors, rebuilt) = ranks_along(axis), _leaves(x)
    rows = [_dealt(t, split, tiled, ranks, "all_to_all") for t in tensors]
    came = _moved(rows, ranks, "all_to_all", _swap, _swap)
    return rebuilt([_placed(row, concat, tiled, "all_to_all") for row in came])


def ppermute(x: Tree, axis: Axes | None, perm: Perm) -> Tree:
    """What another rank has; of a tensor or of each in a pytree.

    Differentiable; its gradient goes from each receiver back to its source.

    Args:
        x: of one shape and dtype on all ranks.
        axis: an axis of the mesh, or several; None is all ranks that have other rows.
        perm: pairs ``(source, receiver)`` of indices along the axis, the same on all ranks. None
            is a source twice or a receiver twice.

    Returns:
        Like ``x``: the source's, or zeros where no pair has this rank as its receiver.

    Raises:
        ValueError: the mesh has no such axis; ``perm`` is no partial permutation of the ranks.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> ppermute(torch.ones(2), None, [(0, 0)]), ppermute(torch.ones(2), None, [])
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    ranks, pairs = ranks_along(axis), [(int(source), int(to)) for source, to in perm]
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    for ends in ([source for source, _ in pairs], [to for _, to in pairs]):
        if len(set(ends)) < len(ends) or not set(ends) <= set(range(size)):
            raise ValueError(
                f"ppermute: perm={pairs}, expected pairs (source, receiver) of ranks 0 to "
                f"{size - 1}, with no source twice and no receiver twice"
            )
    to, source = dict(pairs).get(rank, -1), {b: a for a, b in pairs}.get(rank, -1)
    tensors, rebuilt = _leaves(x)
    way, back = partial(_pass, to=to, source=source), partial(_pass, to=source, source=to)
    return rebuilt(_moved(tensors, ranks, "ppermute", way, back))


def pmax(x: Tree, axis: Axes | None = None) -> Tree:
    """The elementwise maximum over ranks, of a tensor or of every tensor in a pytree.

    Differentiable: the gradient, summed over ranks, goes to the elements that attain the maximum,
    in equal shares. A NaN on one rank is a NaN on all. Every rank sends its own to all others.

    Args:
        x: of one shape and dtype on all ranks, which is not complex.
        axis: an axis of the mesh, or several; by default all ranks that have other rows.

    Raises:
        TypeError: a leaf is complex.
        ValueError: the mesh has no such axis.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> pmax(torch.tensor([1.0, 3.0]))
    tensor([1., 3.])
    """
    return _extreme(x, axis, "pmax", torch.amax)


def pmin(x: Tree, axis: Axes | None = None) -> Tree:
    """The elementwise minimum over ranks, of a tensor or of every tensor in a pytree.

    Differentiable: the gradient, summed over ranks, goes to the elements that attain the minimum,
    in equal shares. A NaN on one rank is a NaN on all. Every rank sends its own to all others.

    Args:
        x: of one shape and dtype on all ranks, which is not complex.
        axis: an axis of the mesh, or several; by default all ranks that have other rows.

    Raises:
        TypeError: a leaf is complex.
        ValueError: the mesh has no such axis.
        DesyncError: another rank is in another collective or has another shape, is silent or gone.

    >>> pmin(torch.tensor([1.0, 3.0]))
    tensor([1., 3.])
    """
    return _extreme(x, axis, "pmin", torch.amin)


def _extreme(x: Tree, axis: Axes | None, label: str, of: Callable[..., Tensor]) -> Tree:
    """Autograd's own derivative of an extreme divides among ties."""
    ranks, (tensors, rebuilt) = ranks_along(axis), _leaves(x)
    for tensor in tensors:
        if tensor.is_complex():
            raise TypeError(f"{label} of {tensor.dtype}: complex numbers have no order")
    rows = _moved(tensors, ranks, label, _gather, _scatter)
    return rebuilt([of(row, dim=0) for row in rows])


# --- leaves, and their dimensions ----------------------------------------------------------------


def _leaves(x: Tree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tree]]:
    leaves, treedef = optree.tree_flatten(cast(Any, x), namespace=NAMESPACE)
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    return tensors, lambda new: cast(Tree, optree.tree_unflatten(treedef, new))


def _placed(rows: Tensor, dim: int, tiled: bool, label: str) -> Tensor:
    """What came from each rank, ``[size, ...]``, along another dimension."""
    dim = _checked(dim, rows.dim() - tiled, label)
    moved = rows.movedim(0, dim)
    return moved.flatten(dim, dim + 1) if tiled else moved


def _dealt(x: Tensor, dim: int, tiled: bool, ranks: Group | None, label: str) -> Tensor:
    """What each rank gets of ``x``, ``[size, ...]``."""
    dim, size = _checked(dim, x.dim(), label), 1 if ranks is None else ranks.size
    found = x.shape[dim]
    if found % size or (found != size and not tiled):
        expected = f"a multiple of {size}" if tiled else f"{size}"
        raise ValueError(
            f"{label}: dimension {dim} of {list(x.shape)} has {found} elements, expected "
            f"{expected}, the ranks along {'the axis' if ranks is None else repr(ranks.axis)}"
            + ("" if tiled else "; tiled=True takes a multiple")
        )
    return (x.unflatten(dim, (size, found // size)) if tiled else x).movedim(dim, 0)


def _checked(dim: int, dims: int, label: str) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"{label}: dimension {dim}, expected one of {dims}")
    return dim % dims


# --- between ranks: `[size, ...]` is a row for each, and what a row looks like is compared --------

Wire = Callable[[Tensor, Group, str], Callable[[], Tensor]]


def _moved(
    xs: Sequence[Tensor], ranks: Group | None, label: str, way: Wire, back: Wire
) -> Sequence[Tensor]:
    """All leaves are under way before the first is waited for."""
    group = alone() if ranks is None else ranks
    if not xs:
        return xs
    return transposable(
        xs, partial(_run, way, group, label), partial(_run, back, group, f"{label} backward")
    )


def _run(wire: Wire, ranks: Group, label: str, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    waits = [wire(x.detach().contiguous(), ranks, label) for x in xs]
    return [wait() for wait in waits]


def _gather(x: Tensor, ranks: Group, label: str) -> Callable[[], Tensor]:
    full = x.new_empty(ranks.size * x.numel())
    handle = ranks.all_gather(full, x[None], label=label)
    return lambda: handle.wait().view(ranks.size, *x.shape)


def _scatter(x: Tensor, ranks: Group, label: str) -> Callable[[], Tensor]:
    handle = ranks.reduce_scatter(x, label=label)
    return lambda: handle.wait().view(x.shape[1:])


def _swap(x: Tensor, ranks: Group, label: str) -> Callable[[], Tensor]:
    handle = ranks.all_to_all(x.split(1), label=label)
    return lambda: torch.cat(handle.wait())


def _pass(x: Tensor, ranks: Group, label: str, to: int, source: int) -> Callable[[], Tensor]:
    row, n = x[None], x.numel()
    chunks = [row if r == to else row[:0] for r in range(ranks.size)]
    sizes = [n if r == source else 0 for r in range(ranks.size)]
    handle = ranks.all_to_all(chunks, sizes=sizes, label=label)

    def take() -> Tensor:
        rows = handle.wait()  # also where nothing comes: what goes must have left
        return torch.zeros_like(x) if source < 0 else rows[source].view(x.shape)

    return take
