"""Tensors that lie one behind another in memory, as one.

The flats of a placed state, and what was gathered or averaged as one, lie so whatever the number
of leaves in them; on small leaves an operation costs more to begin than to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

__all__ = ["joined"]

Row = tuple[Tensor, ...]


def joined(rows: Sequence[Row]) -> Iterator[Row]:
    """1-D views of rows of contiguous tensors; consecutive rows, where possible, in one.

    They are joined where in every column the next tensor begins where the last one ends.

    Args:
        rows: tensors of one number of elements each; all rows of one length.

    >>> import torch
    >>> a, b = torch.zeros(5), torch.ones(5)
    >>> [len(x) for x, _ in joined([(a[:2], b[:2]), (a[2:4], b[2:4]), (a[4:], b[:1])])]
    [4, 1]
    """
    run: list[Row] = []
    for row in rows:
        if run and not all(map(_follows, run[-1], row)):
            yield _one(run)
            run = []
        run.append(row)
    if run:
        yield _one(run)


def _follows(a: Tensor, b: Tensor) -> bool:
    end = a.storage_offset() + a.numel()
    return (
        b.storage_offset() == end
        and b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.dtype == a.dtype
    )


def _one(run: list[Row]) -> Row:
    total = sum(row[0].numel() for row in run)
    return tuple(x.as_strided((total,), (1,)) for x in run[0])
