"""How much of a step on a GPU is communication with nothing beside it, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["exposure", "kernels_of"]

Kernel = tuple[str, float, float]  # name, start, end
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kernels_of(trace: dict[str, Any]) -> Iterator[Kernel]:
    """What ran on the GPU, in microseconds, of a trace as ``export_chrome_trace`` writes it."""
    for event in trace["traceEvents"]:
        if event.get("cat") in ON_GPU and "dur" in event:
            yield event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])


def exposure(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds of communication, of that with no computation beside it, and of nothing at all.

    >>> exposure([("ncclAllGather", 0, 3000), ("gemm", 1000, 4000), ("gemm", 6000, 7000)])
    {'communication': 3.0, 'exposed': 1.0, 'idle': 2.0}
    """
    sent, computed = [], []
    for name, start, end in kernels:
        (sent if "nccl" in name.lower() else computed).append((start, end))
    every = _union(sent + computed)
    busy, compute = _length(every), _length(_union(computed))
    span = every[-1][1] - every[0][0] if every else 0.0
    found = {"communication": _length(_union(sent)), "exposed": busy - compute, "idle": span - busy}
    return {key: round(value / 1e3, 3) for key, value in found.items()}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _length(spans: list[tuple[float, float]]) -> float:
    return sum((end - start for start, end in spans), 0.0)
