"""Parts of codes and scales along a dimension, and wholes of parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfunc.layout.splits import Runs

__all__ = ["coarser", "in_pairs", "joined", "taken"]


def coarser(runs: Runs, size: int) -> Runs:
    """Runs of indices as runs of groups of so many; the last group may be shorter.

    >>> coarser(((0, 32), (64, 100)), 32)
    ((0, 1), (2, 4))
    """
    return tuple((start // size, -(-stop // size)) for start, stop in runs)


def in_pairs(runs: Runs) -> bool:
    """Whether two in a byte stay together, but for an odd end.

    >>> in_pairs(((0, 2), (4, 7))), in_pairs(((0, 3), (4, 6)))
    (True, False)
    """
    return all(start % 2 == 0 for start, _ in runs) and all(stop % 2 == 0 for _, stop in runs[:-1])


def taken(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """Some indices of a dimension, in memory of their own."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)


def joined(parts: Sequence[Tensor], dim: int, runs: Sequence[Runs]) -> Tensor:
    """The tensor of which these are what :func:`taken` gives for each of ``runs``."""
    size = max(row[-1][1] for row in runs if row)
    shape = parts[0].shape
    full = parts[0].new_empty((*shape[:dim], size, *shape[dim + 1 :]))
    for part, row in zip(parts, runs, strict=True):
        at = 0
        for start, stop in row:
            full.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start
    return full
