"""Matrices in pieces that stay in a core's cache while several functions of torch go over them.

A twin is made of functions that each read and write memory. On a CPU they take turns over a piece,
so that main memory is read and written once; elsewhere a matrix is one piece, and one launch each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zfunc.trees.kinds import kind

__all__ = ["element_pieces", "row_pieces"]

PIECE = 1 << 17  # elements for each thread: 512 KiB of float32, of which some are open at a time
FEWEST = 4  # rows, however long: calls take time too


def row_pieces(*matrices: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The same rows of all of them.

    Args:
        matrices: ``[M, ...]``, the first of them ``[M, N]``; ``None`` stays what it is.
    """
    first = matrices[0]
    assert first is not None
    rows, width = first.shape
    step = rows
    if kind(first.device) == "cpu":
        step = max(FEWEST, PIECE * torch.get_num_threads() // max(width, 1))
    if step >= rows:
        yield matrices
        return
    for a in range(0, rows, step):
        yield tuple(None if x is None else x[a : a + step] for x in matrices)


def element_pieces(*matrices: Tensor) -> Iterator[tuple[Any, ...]]:
    """The same elements of all of them, whose shapes ``[M, N]`` are the same.

    They are cut between rows; where there is one row, anywhere.
    """
    rows, width = matrices[0].shape
    if rows == 1:  # columns of rows of a single element
        matrices = tuple(x.view(width, 1) for x in matrices)
    return row_pieces(*matrices)
