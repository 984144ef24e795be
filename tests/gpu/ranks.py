"""Ranks of ``zf.launch`` with a pretended GPU each, from before they join their world.

A rank reads its function from its parent before it joins. Reading a :class:`OnGPUs` pretends CUDA
there, so that ``zf.init`` chooses devices and backends as it does beside GPUs.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, TypeVar

import zfunc as zf
from tests.gpu.cuda import Cuda

__all__ = ["OnGPUs", "launch"]

T = TypeVar("T")


class OnGPUs:
    """A function for ``zf.launch`` that finds ``devices`` GPUs, or one for each local rank."""

    def __init__(self, fn: Callable[..., Any], devices: int | None = None) -> None:
        self.fn, self.devices = fn, devices

    def __reduce__(self) -> Any:
        return _arrived, (self.fn, self.devices)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def _arrived(fn: Callable[..., Any], devices: int | None) -> Callable[..., Any]:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return OnGPUs(fn, devices)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = Cuda(ranks if devices is None else devices)
    cuda.__enter__()
    atexit.register(cuda.__exit__)
    return fn


def launch(
    fn: Callable[..., T], *args: Any, nprocs: int = 2, devices: int | None = None
) -> list[T]:
    """``zf.launch`` with a GPU for each rank; the results, by rank."""
    return zf.launch(OnGPUs(fn, devices), *args, nprocs=nprocs, timeout=300)
