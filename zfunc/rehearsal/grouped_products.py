"""Products of groups for tensors without memory: torch's own kernel takes bfloat16 alone."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUPED", "grouped_shape"]

GROUPED = torch.ops.aten._grouped_mm.default
"""As experts have them (``torch.nn.functional.grouped_mm``). With numbers it takes float32, too."""


def grouped_shape(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of groups of rows, of columns, or of stacks; rows of the result begin at 16 bytes each."""
    rows, columns = a.shape[-2], b.shape[-1]
    if a.dim() == b.dim():
        stacks = a.shape[:-2] if a.dim() == 3 or offs is None else offs.shape
        shape = [*stacks, rows, columns]
    else:
        shape = [rows, columns]
    dtype = out_dtype or a.dtype
    line = -(-columns // (16 // dtype.itemsize)) * (16 // dtype.itemsize)
    strides = [rows * line, line, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
