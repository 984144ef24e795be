"""The architectures that the kernels are compiled for with no such GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """An architecture.

    Attributes:
        example: a GPU that has it, as torch names it.
        arch: as Triton names it.
        processors: of that GPU.
        shared: bytes that one program may ask for at most; the compiler does not check it.
    """

    example: str
    arch: int | str
    processors: int
    shared: int

    @property
    def amd(self) -> bool:
        return isinstance(self.arch, str)

    @property
    def gpu(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip" if self.amd else "cuda", self.arch, 64 if self.amd else 32)


TARGETS = {
    "sm_80": Target("NVIDIA A100-SXM4-80GB", 80, 108, 166912),
    "sm_90": Target("NVIDIA H200", 90, 132, 232448),
    "sm_100": Target("NVIDIA B200", 100, 148, 232448),
    "gfx90a": Target("AMD Instinct MI250X", "gfx90a", 110, 65536),
    "gfx942": Target("AMD Instinct MI300X", "gfx942", 304, 65536),
}
