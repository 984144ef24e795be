"""How a low-bit tensor travels: its data in one run of bytes, the rest as a static value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zfunc.quant.grids import Format

if TYPE_CHECKING:
    from zfunc.quant.qtensor import QTensor

__all__ = ["Code", "padded"]


@dataclass(frozen=True)
class Code:
    """What a :class:`QTensor` is apart from its data: how it is read from bytes.

    The bytes are codes, scales and zero points, each part filled up to a multiple of 16.
    """

    format: Format
    rows: tuple[int, int]
    shape: torch.Size
    dtype: torch.dtype
    transposed: bool

    @property
    def parts(self) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of the codes, the scales and, if there are any, the zero points."""
        (n, k), form = self.rows, self.format
        codes = ((n, -(-k // 2)), torch.uint8) if form.packed else ((n, k), torch.int8)
        grid = (n, form.groups(k))
        zeros = [] if form.symmetric else [(grid, torch.int8)]
        return [codes, (grid, form.scale_dtype), *zeros]

    @property
    def bytes(self) -> int:
        """How many there are."""
        return sum(padded(n * m * dtype.itemsize) for (n, m), dtype in self.parts)

    def read(self, data: Tensor) -> QTensor:
        """The tensor whose data lie in ``data``, 1-D uint8; nothing is copied."""
        from zfunc.quant.qtensor import QTensor

        found, at = [], 0
        for shape, dtype in self.parts:
            size = shape[0] * shape[1] * dtype.itemsize
            found.append(data[at : at + size].view(dtype).view(shape))
            at += padded(size)
        zero = found[2] if len(found) > 2 else None
        return QTensor(
            found[0], found[1], zero, self.format, self.shape, self.dtype, self.transposed
        )


def padded(size: int) -> int:
    """``size`` and its filling."""
    return -(-size // 16) * 16
