"""Sums of squares that keep their digits, of which norms are made."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["square_sum", "wide_dtype"]

PIECE = 1 << 20  # elements


def wide_dtype(x: Tensor) -> torch.dtype:
    """In what squares of ``x`` are added up: float32 at least."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of a tensor's elements, 0-d.

    On a CPU torch adds up a long tensor in a few float32 lanes: ``vector_norm`` of 100 million
    elements is wrong by 1 %. Here each piece of a million has a sum of its own.
    """
    x = x.detach()
    if x.device.type != "cpu" or not x.is_contiguous():
        return _square_sum(x)
    if x.numel() <= PIECE:
        return _square_sum(x.view(-1))
    return torch.stack([_square_sum(piece) for piece in x.view(-1).split(PIECE)]).sum()


def _square_sum(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.ndim == 1 and x.dtype in (torch.float32, torch.float64):
        return torch.dot(x, x)
    return torch.linalg.vector_norm(x, dtype=wide_dtype(x)).square()
