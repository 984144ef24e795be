"""Products with split weights: ``column`` begins the work in parts, and ``row`` ends it.

Between them each rank works on its own heads or hidden units, and nothing is sent. A column and
its row together make one all-reduce in forward and one in backward, each of the size of ``x``.

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from zfunc.errors import PlacementError
from zfunc.layout.splits import Encoded, Part, Split, mark
from zfunc.operators.conjugates import copied, shared
from zfunc.operators.parts import found, found_beside, refused, runs_of
from zfunc.operators.stream import gathered_stream, in_parts_of, is_cut, own_positions
from zfunc.ranks.comm import Group
from zfunc.trees.marks import part_of

__all__ = ["between", "column", "row", "summand"]


def column(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """``x @ w.T + b``, where each rank has some of the outputs.

    Columns of the same tensor ``x`` share one all-reduce in backward. ``x`` must be the same
    object: ``h = norm(x)``, then ``column(h, wq)`` and ``column(h, wk)``.

    Args:
        x: ``[..., in]``, whole on all ranks, or under ``zf.split(sequence=True)`` this rank's
            positions of it, ``[..., s / T, in]``: they are put together.
        w: ``[out / T, in]``, split along dimension 0, or a whole leaf ``[out, in]``.
        b: ``[out / T]``, split as ``w``, or ``None``.

    Returns:
        ``[..., out / T]``, this rank's outputs; all of them where ``w`` is whole. Outside of a
        step that splits, and on one rank, that is ``F.linear(x, w, b)``.

    Raises:
        PlacementError: leaves are split in another way, or are copies, or ``x`` is no whole input.

    >>> import torch
    >>> column(torch.ones(1, 2), torch.eye(2))
    tensor([[1., 1.]])
    """
    part = found("column", w, "w")
    if part is None:
        return F.linear(x, w, b)
    _check(x, w, part, "column", 0, _COLUMN)
    if b is not None:
        _check_bias(b, part.split, "column")
    if (given := part_of(x)) is not None and given.split is not None:
        raise refused("column", x, "x", given, "a whole input", _PARTED)
    if part.split is None:  # the work is whole, and a stream that is cut has all positions in it
        x = gathered_stream(x, part.group) if is_cut() else x
        return mark(F.linear(x, w, b), replace(part))
    ranks, split = part.group, part.split
    w, b = shared(w, ranks, split), None if b is None else shared(b, ranks, split)
    y = F.linear(gathered_stream(x, ranks), w, b)
    return mark(y, replace(part, split=replace(split, dim=y.dim() - 1)))


def row(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """``x @ w.T + b``, where each rank has some of the inputs: their products are summed.

    Args:
        x: ``[..., in / T]``, this rank's inputs, as columns made them; whole where ``w`` is whole.
        w: ``[out, in / T]``, split along dimension 1, or a whole leaf ``[out, in]``.
        b: ``[out]``, a whole leaf, which is added once, or ``None``.

    Returns:
        ``[..., out]``, the same bits on all ranks; under ``zf.split(sequence=True)`` this rank's
        positions, ``[..., s / T, out]``. Outside of a step that splits, and on one rank, that is
        ``F.linear(x, w, b)``.

    Raises:
        PlacementError: leaves are split in another way, or are copies, or ``x`` is of another size.

    >>> import torch
    >>> row(torch.ones(1, 2), torch.eye(2))
    tensor([[1., 1.]])
    """
    part = found("row", w, "w")
    if part is None:
        return F.linear(x, w, b)
    _check(x, w, part, "row", 1, _ROW)
    if b is not None:
        _check_bias(b, None, "row")
    split = part.split
    if split is None:
        if (given := part_of(x)) is not None and given.split is not None:
            raise refused("row", x, "x", given, "a whole input, as w is whole", _ROW)
        return F.linear(own_positions(x, part.group, -2), w, b)
    if split.shared:
        raise refused("row", w, "w", part, "each input on one rank: a sum counts all", _ROW)
    if (runs := runs_of(x)) is not None and runs != split.runs:
        rank = part.group.rank
        raise PlacementError(
            f"zf.row: x has features {runs[rank]} on rank {rank}, and w {list(w.shape)} takes "
            f"{split.runs[rank]}. Give the column and the row rules alike: parts=, by= and grain=."
        )
    y = in_parts_of(summand(x, w, part.group), part.group)
    return y if b is None else y + b


def summand(x: Tensor, w: Tensor, ranks: Group, turned: bool = False) -> Tensor:
    """This rank's summand of a product over inputs in parts.

    Args:
        x: ``[..., in / T]``.
        w: ``[out, in / T]``, or in low bits.
        ranks: those that have the other parts.
        turned: whether ``w`` is ``[in / T, out]``.
    """
    if isinstance(w, Encoded):
        return w.summand(x, ranks)
    return F.linear(x, w.mT if turned else w)


def between(leaf: Tensor) -> Tensor:
    """A whole leaf for work in parts, between a column and its row.

    Each rank uses it for its own heads, as with a norm of each head's queries; its gradient is
    summed over ranks.

    Args:
        leaf: of any shape, whole on all ranks.

    Returns:
        The leaf; outside of a step that splits, and on one rank, that very tensor.

    Raises:
        PlacementError: it is split, or it is a copy.

    >>> import torch
    >>> between(torch.ones(2))
    tensor([1., 1.])
    """
    part = found("operators.between", leaf, "the leaf")
    if part is None:
        return leaf
    if part.split is not None:
        remedy = "A split leaf enters as it is: its gradient is this rank's own."
        raise refused("operators.between", leaf, "the leaf", part, "a whole leaf", remedy)
    if is_cut():  # all whole leaves have gradients that are parts there
        return leaf
    return copied(leaf, part.group, "tensor between")


_COLUMN = "Cut it by zf.Cut(0), or leave it whole; products of inputs in parts are zf.row."
_ROW = "Cut it by zf.Cut(1), or leave it whole; products of whole inputs are zf.column."
_PARTED = "It comes from another column: end the work in parts with zf.row."


def _check(x: Tensor, w: Tensor, part: Part, name: str, dim: int, remedy: str) -> None:
    split = part.split
    if w.dim() != 2 or (split is not None and split.dim != dim):
        wish = f"a matrix split along dimension {dim}, or a whole one"
        raise refused(name, w, "w", part, wish, remedy)
    if x.shape[-1] != w.shape[1]:
        of = f" of {split.size}" if split is not None and dim == 1 else ""
        raise PlacementError(
            f"zf.{name}: x {list(x.shape)} has {x.shape[-1]} inputs, and w {list(w.shape)} takes "
            f"{w.shape[1]}{of} on rank {part.group.rank}. " + (_SIZES if dim else _PARTED)
        )


_SIZES = "x is in parts where columns made it, split alike: by as many blocks as w (by=)."


def _check_bias(b: Tensor, split: Split | None, name: str) -> None:
    part = found_beside(name, b, "b")
    runs = None if part.split is None else part.split.runs
    if runs != (None if split is None else split.runs) or b.dim() != 1:
        wish = "a whole vector" if split is None else "a vector that is split as the rows of w"
        remedy = "The rule of a column's weight goes for its bias, too; a row's bias stays whole."
        raise refused(name, b, "b", part, wish, remedy)
