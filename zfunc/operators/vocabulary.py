"""``embed``: rows of a table of which each rank has some.

Source: Shoeybi et al., Megatron-LM, 2019, section 3 (the embedding along the vocabulary).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zfunc.layout.splits import Runs, Split
from zfunc.operators.parts import found, refused
from zfunc.operators.stream import in_parts_of, positions
from zfunc.trees.kinds import kind

__all__ = ["embed", "local_indices"]


def embed(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows ``table[ids]``, where each rank has some rows of the table.

    Args:
        ids: ``[...]``, int64 or int32, of the full table.
        table: ``[vocab / T, w]``, split along dimension 0, or a whole leaf ``[vocab, w]``.
        padding_idx: a row of the full table that gets no gradient; from the end if negative.

    Returns:
        ``[..., w]``, the same bits on all ranks; under ``zf.split(sequence=True)`` this rank's
        positions, ``[..., s / T, w]``. Outside of a step that splits, and on one rank, that is
        ``F.embedding(ids, table, padding_idx)``.

    Raises:
        IndexError: on a CPU, an id is no row of the full table (on a GPU the device asserts).
        PlacementError: the table is split in another way, or is a copy.

    >>> embed(torch.tensor([1]), torch.eye(2))
    tensor([[0., 1.]])
    """
    part = found("embed", table, "table")
    if part is None or part.split is None:
        return F.embedding(positions(ids, -1), table, padding_idx)
    split, ranks = part.split, part.group
    if table.dim() != 2 or split.dim != 0 or split.shared:
        wish = "a matrix split along dimension 0, each row on one rank, or a whole one"
        raise refused("embed", table, "table", part, wish, "Cut it by zf.Cut(0).")
    _check_ids(ids, split.size)
    at, mine = local_indices(ids, split.runs[ranks.rank])
    if len(table):
        rows = F.embedding(at, table, _local_padding(padding_idx, split, ranks.rank))
        rows = rows.masked_fill(~mine[..., None], 0.0)
    else:  # a sum of no rows
        rows = table.sum(0).expand(*ids.shape, -1).clone()
    return in_parts_of(rows, ranks, "tensor embed")


def local_indices(ids: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Where among this rank's indices the given ones are, 0 for those that it has not; and whether
    it has them."""
    at, mine, first = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool), 0
    for start, stop in runs:
        here = (ids >= start) & (ids < stop)
        at = torch.where(here, ids - (start - first), at)
        mine = mine | here
        first += stop - start
    return at, mine


def _local_padding(padding: int | None, split: Split, rank: int) -> int | None:
    """This rank's own row of that index."""
    if padding is None:
        return None
    if not -split.size <= padding < split.size:
        raise IndexError(f"zf.embed: padding_idx={padding} is no row of a table of {split.size}")
    index, first = padding % split.size, 0
    for start, stop in split.runs[rank]:
        if start <= index < stop:
            return first + index - start
        first += stop - start
    return None


def _check_ids(ids: Tensor, size: int) -> None:
    """As ``F.embedding`` does: where looking costs nothing the host looks, else the device."""
    if ids.is_meta or not ids.numel():
        return
    right = ((ids >= 0) & (ids < size)).all()
    if kind(ids.device) != "cpu":
        torch._assert_async(right)
    elif not right:
        wrong = ids[(ids < 0) | (ids >= size)]
        raise IndexError(f"zf.embed: id {int(wrong[0])} is no row of a table of {size}")
