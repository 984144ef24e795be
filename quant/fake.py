"""Fake quantisation: weights rounded to a grid, but kept in their dtype. Training sees these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.splits import Split
from zfunc.quant import grids
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import rows_of

__all__ = ["Grouping", "fake_quantize"]


@dataclass(frozen=True)
class Grouping:
    """Which weights of a leaf share a scale, and how they are rounded.

    Attributes:
        groups: how many scales a leaf has: blocks of whole rows, or, if there are more groups
            than rows, equal runs of each row.
        group_size: runs of so many weights of each row instead.
        symmetric: whether 0 is the middle of the grid.

    Raises:
        ValueError: fewer than one group, or a group of fewer than one weight.
    """

    groups: int = 1
    group_size: int | None = None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if type(self.groups) is not int or self.groups < 1:
            raise ValueError(f"groups={self.groups!r}: expected a number of groups, at least 1.")
        Format(8, self.group_size)

    def format(self, shape: Sequence[int], bits: int) -> Format:
        """The format of a leaf of this shape.

        >>> Grouping(groups=2).format((6, 4), 8).shared, Grouping(groups=12).format((6, 4), 8)
        (3, Format(bits=8, group_size=2, symmetric=True, dynamic=False, shared=1))
        """
        *lead, k = shape
        n = math.prod(lead)
        if self.group_size is not None:
            return Format(bits, self.group_size, self.symmetric)
        if self.groups <= n:
            return Format(bits, None, self.symmetric, shared=-(-n // self.groups))
        return Format(bits, max(1, -(-k // -(-self.groups // max(1, n)))), self.symmetric)

    def check_split(self, path: str, shape: Sequence[int], split: Split) -> None:
        """Check that a rank's part of a leaf gets the scales that all of it would get.

        Args:
            path, shape: of the leaf; the last dimension is summed over.
            split: how it is split over ranks.

        Raises:
            PlacementError: weights that share a scale lie on several ranks.
        """
        size = self.group_size
        if size is None:
            raise PlacementError(
                f"{path} is split over {split.ways} ranks, and its weights share scales over whole "
                "rows. Give quantize(group_size=...): groups within a rank's part, 64 say."
            )
        ends = {end for runs in split.runs for run in runs for end in run} - {split.size}
        if split.dim == len(shape) - 1 and any(end % size for end in ends):
            raise PlacementError(
                f"{path} of shape {tuple(split.full(shape))} is split over {split.ways} ranks at "
                f"{sorted(ends - {0})} of its last dimension, within groups of {size}. Give "
                "quantize(group_size=...) a divisor of these, or leave the leaf whole "
                f"(split(rules={{{path!r}: None}}))."
            )


def fake_quantize(
    x: Tensor,
    form: Format,
    noise: Tensor | None = None,
    name: str = "weight",
    check: bool = True,
) -> Tensor:
    """``x`` ``[..., k]`` on the grid of ``form``, in its own shape and dtype.

    What a ``QTensor`` of the same format stands for, bit by bit, for up to 8 bits.

    Args:
        noise: as in :func:`zfunc.quant.grids.quantize`, of the shape of ``x``.
        name: of the weight, for the error.
        check: otherwise a weight that is not finite makes its group NaN, and nobody waits for a
            device to learn it.

    Raises:
        NonFiniteError: a weight is NaN or infinite.

    >>> import torch
    >>> fake_quantize(torch.tensor([[0.5, -2.0, 1.0]]), Format(3, None))
    tensor([[ 0.5000, -2.0000,  1.0000]])
    """
    rows = rows_of(x, False)
    grid = grids.fit(rows, form, name, check)
    codes = grids.quantize(rows, grid, form, None if noise is None else rows_of(noise, False))
    return grids.dequantize(codes, grid, form, x.dtype).reshape(x.shape)
