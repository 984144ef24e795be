"""Eight or four bits an element: gradients as integers, a scale for each group of them.

What rounding leaves out is kept as an error and added to the next gradient, so that a coarse
grid costs time and not accuracy (Karimireddy et al., Error Feedback Fixes SignSGD, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Int4", "Int8"]


@dataclass(frozen=True)
class Int8:
    """Symmetric integers: ``round(x / s)`` with ``s = max |x| / 127`` over ``group`` elements."""

    group: int = 256

    bits: ClassVar[int] = 8
    freezes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group < 2 or self.group % 2:
            raise ValueError(f"group={self.group!r}: expected an even number of elements.")

    @property
    def _top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of ``n`` elements; the scales are float32."""
        return 4 * -(-n // self.group) + -(-n * self.bits // 8)

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        error += x
        rows = self._rows(error)
        scale = (rows.abs().amax(1, keepdim=True) / self._top).float()
        steps = rows.div(scale.to(rows.dtype)).nan_to_num_(0.0).round_()
        steps.clamp_(-self._top, self._top)  # float32 scales may fall a little short
        error -= (steps * scale).view(-1)[: len(x)]
        data = self._narrowed(steps.to(torch.int8).view(-1)[: len(x)])
        return torch.cat([scale.view(-1).view(torch.uint8), data])

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        mean = self.unpack(torch.stack(list(received)), len(error), error.dtype).mean(0)
        return self.pack_(mean, error)

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        groups = -(-n // self.group)
        scale = data[..., : 4 * groups].reshape(-1).clone().view(torch.float32)
        scale = scale.view(*data.shape[:-1], groups, 1)
        steps = self._widened(data[..., 4 * groups :], n)
        steps = F.pad(steps, (0, groups * self.group - n)).unflatten(-1, (groups, self.group))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (steps.to(wide) * scale).flatten(-2)[..., :n].to(dtype)

    def _rows(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -len(x) % self.group)).view(-1, self.group)

    def _narrowed(self, steps: Tensor) -> Tensor:
        return steps.view(torch.uint8)

    def _widened(self, data: Tensor, n: int) -> Tensor:
        return data.contiguous().view(torch.int8)


@dataclass(frozen=True)
class Int4(Int8):
    """The same on fifteen steps, two of them a byte: the earlier one in the lower half."""

    group: int = 128

    bits: ClassVar[int] = 4

    def _narrowed(self, steps: Tensor) -> Tensor:
        pairs = F.pad(steps, (0, len(steps) % 2)).view(-1, 2)
        return (pairs[:, 0] & 15 | pairs[:, 1] << 4).view(torch.uint8)

    def _widened(self, data: Tensor, n: int) -> Tensor:
        both = data.contiguous().view(torch.int8)
        low = both << 4 >> 4  # arithmetic shifts: the sign comes along
        return torch.stack([low, both >> 4], -1).flatten(-2)[..., :n]
