"""Memory behind which there is none: a byte too far ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_BOTH = 0, 3

_kept: list[mmap.mmap] = []


def fenced(x: Tensor, end: bool = True) -> Tensor:
    """A copy that ends (or begins) where the memory ends: the pages around it are inaccessible."""
    size = x.numel() * x.element_size()
    pages = -(-size // PAGE)
    room = mmap.mmap(-1, (pages + 2) * PAGE)
    _kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    at = PAGE + (pages * PAGE - size if end else 0)
    if not size:
        return x.clone()
    out = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=at).view(x.shape)
    out.copy_(x)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for page in (start, start + (pages + 1) * PAGE):
        assert protect(ctypes.c_void_p(page), PAGE, PROT_NONE) == 0
    return out
