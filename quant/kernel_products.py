"""Products of a few rows with low-bit weights on a GPU, by :mod:`zfunc.kernels.skinny`.

The kernel has an order of its own for 4-bit codes. They are put in this order once, and it replaces
the stored one. Where no kernel applies (more rows, other groups, no Triton), the dispatch says so
and another route is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zfunc import kernels
from zfunc.kernels import Packed, dispatch
from zfunc.quant.low_bit import LowBit
from zfunc.trees.kinds import kind

__all__ = ["Words", "packed", "product", "readable", "takes"]


@dataclass(frozen=True)
class Words:
    """4-bit codes as :func:`zfunc.kernels.w4_mm` reads them."""

    data: Tensor
    length: int

    def codes(self) -> Tensor:
        """``[n, k]`` int8."""
        return kernels.unpack_words(self.data, self.length)


def kernel_of(weight: LowBit) -> str:
    """Which kernel multiplies with such weights."""
    if weight.format.dynamic:
        return "w8a8_mm"
    return "w4_mm" if weight.format.packed else "w8_mm"


def takes(x: Tensor, weight: LowBit) -> bool:
    """Whether the dispatch has a kernel for this product here."""
    if kind(x.device) == "cpu" and dispatch.forced() != "triton":
        return False  # what the dispatch would say, without the time that it takes
    if _odd(weight) or x.device != weight.device:
        return False
    how = {"group": _group(weight) or 0, "rows": len(x), "dtype": x.dtype}
    tensors = (x, weight.scale, weight.zero)
    return kernels.choose(kernel_of(weight), *tensors, **how).route == "triton"


def readable(weight: LowBit) -> bool:
    """Whether a kernel reads such weights, from rows of the matrix that is given."""
    return weight.depth == 2 and not (weight.transposed or _odd(weight))


def packed(weight: LowBit) -> Packed:
    """The weights as :mod:`zfunc.kernels.skinny` reads them, without a copy that is kept twice."""
    name, group = kernel_of(weight), _group(weight)
    if weight.scale.stride(0) != 1:  # a group's scales are read together
        weight.scale = weight.scale.t().contiguous().t()
        weight.zero = None if weight.zero is None else weight.zero.t().contiguous().t()
    if name != "w4_mm":
        return Packed(name, weight.codes, weight.rows[1], weight.scale, weight.zero, group)
    words = weight.ready(Words, lambda: _words(weight))
    return Packed(name, words.data, weight.rows[1], weight.scale, weight.zero, group)


def product(x: Tensor, weight: LowBit, bias: Tensor | None = None) -> Tensor:
    """``x W^T`` for ``x`` ``[m, k]``, in the dtype of ``x``."""
    return kernels.packed_mm(x, packed(weight), bias)


def _group(weight: LowBit) -> int | None:
    """How many weights of a row share a scale; None: all of them, of a part of a row, too."""
    return weight.format.fitted(weight.rows[1]).group_size


def _odd(weight: LowBit) -> bool:
    """Whether codes of 4 bits are multiplied with 8-bit inputs, which no kernel does."""
    return weight.format.dynamic and weight.format.packed


def _words(weight: LowBit) -> Words:
    return Words(kernels.pack_words(weight.codes), weight.rows[1])
