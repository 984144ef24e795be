"""What the C library keeps of memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["return_freed"]


def return_freed() -> None:
    """Let glibc return the pages of all blocks that are free, small ones between others too.

    By itself it returns what lies at the end of its heap alone. Work that makes many small tensors
    once, before a state is there, would else stay in a process's memory for good. Other C libraries
    are left to themselves.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
