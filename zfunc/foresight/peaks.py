"""How many floating point operations a device can do in a second, at best.

Of GPUs: what their makers publish, for dense products. Of a CPU: measured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["Peak", "as_torch_takes", "peak_flops", "peak_of"]

TF32 = "tf32"


def _halves(half: float, brain: float | None = None) -> dict[str, float]:
    return {"float16": half, "bfloat16": half if brain is None else brain}


_HOPPER = {
    **_halves(989.4),
    TF32: 494.7,
    "float32": 66.9,
    "float64": 66.9,
    "int8": 1979,
    "float8_e4m3fn": 1979,
}
# TFLOP/s by a part of the name that torch gives, the more special names first. Sources: NVIDIA's
# data sheets of V100, A100, H100 and H200 (figures with sparsity halved), AMD's of Instinct MI100,
# MI250X (half of it: torch sees each of its two dies as a GPU) and MI300X. Matrix cores count.
PUBLISHED: dict[str, dict[str, float]] = {
    "V100-PCIE": {"float16": 112, "float32": 14.0, "float64": 7.0},
    "V100": {"float16": 125, "float32": 15.7, "float64": 7.8},
    "A100": {**_halves(312), TF32: 156, "float32": 19.5, "float64": 19.5, "int8": 624},
    "H100 PCIe": {**_halves(756), TF32: 378, "float32": 51.0},
    "H100 NVL": {**_halves(835), TF32: 417.5, "float32": 60.0},
    "H100": _HOPPER,
    "H200 NVL": {**_halves(835), TF32: 417.5, "float32": 60.0},
    "H200": _HOPPER,
    "MI100": {**_halves(184.6, 92.3), "float32": 46.1, "float64": 11.5},
    "MI250X": {**_halves(191.5), "float32": 47.9, "float64": 47.9, "int8": 191.5},
    "MI300X": {
        **_halves(1307.4),
        TF32: 653.7,
        "float32": 163.4,
        "float64": 163.4,
        "int8": 2614.9,
    },
}
SIZE = 512  # of the product that a CPU is measured with


@dataclass(frozen=True)
class Peak:
    """What a device can do at best.

    Attributes:
        flops_per_second: ``None`` if nobody knows.
        source: where that comes from.
    """

    flops_per_second: float | None
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak of a device for products in a dtype.

    >>> peak_of(torch.device("cpu"), torch.float32).source
    'measured: a product of 512 x 512 in float32'
    """
    short = str(dtype).removeprefix("torch.")
    if device.type != "cuda":
        seconds = _measured(dtype, torch.get_num_threads())
        return Peak(2 * SIZE**3 / seconds, f"measured: a product of {SIZE} x {SIZE} in {short}")
    return published(torch.cuda.get_device_name(device), dtype)


def published(name: str, dtype: torch.dtype) -> Peak:
    """The peak of a GPU by its name.

    >>> published("NVIDIA H100 80GB HBM3", torch.bfloat16)
    Peak(flops_per_second=989400000000000.0, source='published, dense bfloat16')
    """
    rates, short = peak_flops(name), str(dtype).removeprefix("torch.")
    taken = as_torch_takes(short, rates)
    if (rate := rates.get(taken)) is None:
        return Peak(None, f"unknown for {short} on {name}")
    how = {TF32: "TF32", "float32": "float32"}.get(taken, f"dense {short}")
    return Peak(rate, f"published, {how}")


def as_torch_takes(dtype: str, rates: Mapping[str, float]) -> str:
    """The rate of products in a dtype: ``"tf32"`` for float32 where a GPU has it and torch is told
    to take it (``torch.set_float32_matmul_precision``).

    >>> as_torch_takes("float32", {"float32": 1.0, "tf32": 8.0})
    'float32'
    """
    told = str(torch.backends.cuda.matmul.fp32_precision) == TF32
    return TF32 if dtype == "float32" and TF32 in rates and told else dtype


def peak_flops(name: str) -> dict[str, float]:
    """FLOP/s of a GPU by dtype, and of ``"tf32"``; of those that its units of products know.

    >>> peak_flops("A100")["bfloat16"], "bfloat16" in peak_flops("V100")
    (312000000000000.0, False)
    """
    return {dtype: 1e12 * x for dtype, x in _rates(name).items()}


def _rates(name: str) -> dict[str, float]:
    if " MIG " in name:  # a slice, of which only the whole is published
        return {}
    # An A1000 is no A100.
    return next((row for part, row in PUBLISHED.items() if re.search(rf"{part}(?!\d)", name)), {})


@cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """The least seconds of a few products, the first of which does not count."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    best = float("inf")
    for run in range(4):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin) if run else best
    return best
