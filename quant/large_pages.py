"""Low-bit weights in large pages of memory, where the system has them.

A product of a few rows waits for its weights, and a core reads ahead only within a page: in pages
of 2 MiB in place of 4 KiB the same bytes arrive sooner. Linux moves memory that is in use into
large pages when it is asked to (``madvise(2)``, from 6.1 on at once, before that in its own time).
Elsewhere, or where the system refuses, everything stays where it is.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["collapse", "into_large_pages"]

LEAST = 4 << 20  # bytes: in fewer there are hardly two large pages
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of Linux's uapi/asm-generic/mman-common.h


def into_large_pages(x: Tensor) -> Tensor:
    """``x`` itself, on the CPU, plain or in oneDNN's order, moved where that is worth it."""
    if x.nbytes >= LEAST:
        if not x.is_mkldnn:
            collapse(x.data_ptr(), x.nbytes)
        elif hasattr(torch.ops.mkldnn, "data_ptr"):
            collapse(torch.ops.mkldnn.data_ptr(x), x.nbytes)
    return x


def collapse(address: int, length: int) -> bool:
    """Whether Linux has put the memory between two addresses into large pages.

    Args:
        address: of the first byte, in memory that this process has written.
        length: in bytes; large pages that lie in there as a whole count.
    """
    advise = _madvise()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is None or end <= start:
        return False
    advise(start, end - start, MADV_HUGEPAGE)  # what stays small may be moved later
    return advise(start, end - start, MADV_COLLAPSE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
