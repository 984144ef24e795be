"""The kinds of CPU that machine code is written for, as far as this one can be each."""

from __future__ import annotations

from typing import Any

import pytest

from zfunc.kernels import panels
from zfunc.kernels.llvm import ISAS, Host, host

CPUS = {
    "tiles": Host("avx512vnni", True, "matrix registers"),
    "avx512": Host("avx512vnni", False, "512-bit dot products"),
    "avx": Host("avxvnni", False, "256-bit dot products"),
    "avx2": Host("avx2", False, "256-bit vectors"),
}


def able() -> list[str]:
    """Which of them this CPU can be."""
    if not host().isa:
        return []
    from llvmlite import binding as llvm

    has = llvm.get_host_cpu_features()
    return [
        name
        for name, cpu in CPUS.items()
        if all(has.get(f) for f in ISAS[cpu.isa]) and (host().tiles or not cpu.tiles)
    ]


def be(name: str, monkeypatch: pytest.MonkeyPatch, *rooms: Any) -> None:
    """Let this CPU be that one for these modules, the products by default; skip if it cannot."""
    cpu = CPUS[name]
    if not host().isa:
        pytest.skip(f"no machine code here: {host().why}")
    if name not in able():
        pytest.skip(f"this CPU has no {cpu.why}")
    for room in rooms or (panels,):
        monkeypatch.setattr(room, "host", lambda: cpu)
