"""Eight or four bits an element: gradients as integers, a scale for each group of them.

What rounding leaves out is kept as an error and added to the next gradient, so that a coarse
grid costs time and not accuracy (Karimireddy et al., Error Feedback Fixes SignSGD, 2019). The
arithmetic is that of :mod:`zfunc.kernels.payloads`: one pass over memory, on a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zfunc.kernels.payloads import (
    Payload,
    dequantize_payload,
    mean_payloads_,
    quantize_payload_,
)

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

    def over(self, leaves: Sequence[tuple[int, int, int]]) -> Int8:
        """Itself: groups run across leaves."""
        return self

    def of_momentum(self) -> Int8:
        """Itself."""
        return self

    def nbytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of ``n`` elements whose errors are in ``dtype``, as the scales are then."""
        return self._form(n, dtype).bytes

    def pack_(self, x: Tensor, error: Tensor) -> Tensor:
        """``x + error`` as bytes; ``error`` becomes what they leave out."""
        return quantize_payload_(x, self._form(len(x), error.dtype), error)

    def mean_(self, received: Sequence[Tensor], error: Tensor) -> Tensor:
        """The mean of what came from all ranks, plus ``error``, as bytes; likewise."""
        form = self._form(len(error), error.dtype)
        return mean_payloads_(torch.stack(list(received)), form, error)

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The numbers, of ``dtype``, that bytes stand for: ``[n]``, or one row each."""
        return dequantize_payload(data, self._form(n, dtype), dtype)

    def unpack_(self, data: Tensor, out: Tensor) -> None:
        """The same into the 1-D ``out``."""
        out.copy_(self.unpack(data, len(out), out.dtype))

    def _form(self, n: int, dtype: torch.dtype) -> Payload:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Payload(n, self.bits, self.group, dtype=wide)


@dataclass(frozen=True)
class Int4(Int8):
    """The same on fifteen steps, two of them a byte: the earlier one in the lower half."""

    group: int = 128

    bits: ClassVar[int] = 4
