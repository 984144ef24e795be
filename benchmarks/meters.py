"""What the kernel says about this process and this machine. Linux only."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MIB = 2**20
PACKAGES = ("zfunc-torch", "torch", "optree", "numpy", "deepspeed")


def status_bytes(field: str) -> int:
    """One size of ``/proc/self/status``: ``VmRSS`` is resident memory now, ``VmHWM`` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Let ``VmHWM`` start again from the memory resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def loopback_bytes() -> int:
    """Bytes that left through ``lo`` since boot, TCP headers included, from every process."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def hardware() -> dict[str, str | int | float]:
    """The machine, as far as a reader of the numbers needs to know it."""
    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpu if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """The installed version of everything that was measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
