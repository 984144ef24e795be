"""Products with 4-bit codes on a CPU: torch's own kernel, for groups of 32, 64, 128 or 256.

The kernel reads half a byte for each weight and takes inputs in bf16. (In fp32 it is slower than a
product with plain weights.) Its order of the codes replaces the stored one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc.quant.large_pages import into_large_pages
from zfunc.quant.low_bit import LowBit

__all__ = ["Int4Blocks", "product", "takes"]

GROUPS = (32, 64, 128, 256)
ROWS = 512  # of the input at once


@functools.cache
def works() -> bool:
    """Whether the kernel is there and gives what is expected of it."""
    try:
        codes = (torch.arange(64 * 64, dtype=torch.int32) % 16).reshape(64, 64)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.ones(2, 64, 2, dtype=torch.bfloat16)
        scales[..., 1] = 0
        eye = torch.eye(64, dtype=torch.bfloat16)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, packed, 32, scales)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return bool((y.t() == codes - 8).all())


def takes(weight: LowBit, m: int) -> bool:
    """Whether this route is there and worth it."""
    n, k = weight.rows
    size = weight.format.width(k)
    return m > 0 and size in GROUPS and k % size == 0 and n % 64 == 0 and n > 0 and works()


@dataclass(frozen=True)
class Int4Blocks:
    """Codes as the kernel reads them, with scales ``[groups, n, 2]`` bf16 beside them."""

    data: Tensor
    scales: Tensor
    size: int

    def codes(self) -> Tensor:
        """``[n, k]`` int8, found by multiplying with the identity."""
        k = self.size * len(self.scales)
        ones = torch.zeros_like(self.scales)
        ones[..., 0] = 1
        eye = torch.eye(k, dtype=torch.bfloat16)
        columns = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(part, self.data, self.size, ones)
            for part in eye.split(256)
        ]
        return torch.cat(columns).t().to(torch.int8).contiguous()


def product(x: Tensor, weight: LowBit) -> Tensor:
    """``x W^T`` for ``x`` ``[m, k]`` bf16."""
    blocks: Int4Blocks = weight.ready(Int4Blocks, lambda: _blocks(weight))
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, blocks.data, blocks.size, blocks.scales)


def _blocks(weight: LowBit) -> Int4Blocks:
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int() + 8, 1)
    scale = weight.scale.to(torch.bfloat16)
    # The kernel's weight is scale * (code - 8) + shift, the codes counted from 0.
    shift = torch.zeros_like(scale) if weight.zero is None else -scale * weight.zero
    return Int4Blocks(
        into_large_pages(data),
        torch.stack([scale, shift], dim=-1).transpose(0, 1).contiguous(),
        weight.format.width(weight.rows[1]),
    )
