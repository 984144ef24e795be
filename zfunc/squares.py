"""Sums of squares that keep their digits, of which norms are made."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["square_sum", "wide_dtype"]

ROW = 1 << 12  # elements that are added up in their own precision


def wide_dtype(x: Tensor) -> torch.dtype:
    """In what squares of ``x`` are added up: float32 at least."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of a tensor's elements, 0-d.

    A CPU adds up a long tensor in a few float32 lanes, how many depends on the CPU: the sum of a
    million squares is wrong by some 1e-5. Here rows of a few thousand have sums of their own,
    which are added in float64.
    """
    x = x.detach()
    if x.device.type != "cpu" or not x.is_contiguous():
        return _square_sum(x)
    flat = x.view(-1)
    if flat.numel() <= ROW:
        return _square_sum(flat)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=wide_dtype(x))
    total = rows.double().square_().sum()
    if whole < flat.numel():
        total += _square_sum(flat[whole:])
    return total.to(wide_dtype(x))


def _square_sum(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.ndim == 1 and x.dtype in (torch.float32, torch.float64):
        return torch.dot(x, x)
    return torch.linalg.vector_norm(x, dtype=wide_dtype(x)).square()
