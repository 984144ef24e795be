"""Two 4-bit codes in a byte: the even element of a row in the low half, the odd one in the high."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]


def pack(codes: Tensor) -> Tensor:
    """``[n, k]`` int8 codes in [-8, 7] as ``[n, ceil(k / 2)]`` uint8; an odd end is filled with 0.

    >>> pack(torch.tensor([[-8, 7, 1]], dtype=torch.int8))
    tensor([[240, 137]], dtype=torch.uint8)
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    halves = (codes + 8).view(torch.uint8)
    return halves[:, 0::2] | (halves[:, 1::2] << 4)


def unpack(packed: Tensor, k: int) -> Tensor:
    """The codes ``[n, k]`` int8 in ``packed``.

    >>> unpack(torch.tensor([[240, 137]], dtype=torch.uint8), 3)
    tensor([[-8,  7,  1]], dtype=torch.int8)
    """
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(torch.int8)
    return (codes.flatten(1) - 8)[:, :k]
