"""Tensors that have addresses, and no memory behind them until somebody writes there."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["pageless"]

# From here on memory is asked of the system itself, which gives a page when it is first written.
# Below it malloc may give out pages that were written before: they are there anyway.
LARGE = 1 << 24
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def pageless(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An ordinary tensor of the CPU, of any size: a large one holds no memory.

    >>> x = pageless((1 << 20, 1 << 18), (1 << 18, 1), torch.float32)
    >>> x.shape, x.nbytes >> 40
    (torch.Size([1048576, 262144]), 1)
    """
    nbytes = span(size, stride) * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory: Any = mmap.mmap(-1, nbytes, flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole.view(dtype).as_strided(tuple(size), tuple(stride))


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last of a strided tensor, both included.

    >>> span((2, 3), (10, 1)), span((2, 0), (1, 1))
    (13, 0)
    """
    if not all(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
