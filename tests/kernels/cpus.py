"""The kinds of CPU that the low-bit products are written for, as far as this one can be each."""

from __future__ import annotations

import pytest

from zfunc.kernels import panels
from zfunc.kernels.llvm import ISAS, Host, host

CPUS = {
    "tiles": Host("avx512vnni", True, "matrix registers"),
    "avx512": Host("avx512vnni", False, "512-bit dot products"),
    "avx": Host("avxvnni", False, "256-bit dot products"),
    "avx2": Host("avx2", False, "256-bit vectors"),
}


def be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU be that one; skip where it cannot."""
    cpu = CPUS[name]
    if not host().isa:
        pytest.skip(f"no low-bit products of ours here: {host().why}")
    from llvmlite import binding as llvm

    has = llvm.get_host_cpu_features()
    if not all(has.get(f) for f in ISAS[cpu.isa]) or (cpu.tiles and not host().tiles):
        pytest.skip(f"this CPU has no {cpu.why}")
    monkeypatch.setattr(panels, "host", lambda: cpu)
