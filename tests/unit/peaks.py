"""What a script of its own process holds at its peak, by Linux's account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["measured", "needs_peaks"]

needs_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="needs Linux's account of a process's memory",
)

MARKS = """
import sys, torch, zfunc as zf
def mark(what):
    for line in open("/proc/self/status"):
        if line.startswith(what): return int(line.split()[1]) * 1024
def held():
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    return mark("VmRSS")
torch.set_num_threads(1)
"""

# Left to itself, glibc keeps up to 64 MiB of what was freed, more or less of it by chance.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def measured(script: str, *args: str) -> list[int]:
    """The numbers that ``script`` prints; in it ``held()`` begins a peak, ``mark`` reads one."""
    ran = subprocess.run(
        [sys.executable, "-c", MARKS + script, *args],
        env=os.environ | AT_ONCE,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [int(word) for word in ran.stdout.split()]
