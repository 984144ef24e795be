"""What the C library keeps of memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache

__all__ = ["return_freed"]


def return_freed() -> None:
    """Let glibc return the pages of all blocks that are free, small ones between others too.

    By itself it returns what lies at the end of its heap alone. Work that makes many small tensors
    would else stay in a process's memory for good. It takes some microseconds where little is
    free. Other C libraries are left to themselves.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return ctypes.CDLL(None).malloc_trim if platform.libc_ver()[0] == "glibc" else None
