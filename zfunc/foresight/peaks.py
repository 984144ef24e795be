"""How many floating point operations a device can do in a second, at best.

Of GPUs: what their makers publish, for dense products. Of a CPU: measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["Peak", "peak_of"]

# Name as torch gives it, TFLOP/s in 16 bits, in TF32 (0: none), in float32. Sources: NVIDIA's data
# sheets of V100, A100, H100 and H200 (figures with sparsity halved), AMD's of Instinct MI100,
# MI250X (half of it: torch sees each of its two dies as a GPU) and MI300X. Matrix cores count.
PUBLISHED = (
    ("V100-PCIE", 112.0, 0.0, 14.0),
    ("V100", 125.0, 0.0, 15.7),
    ("A100", 312.0, 156.0, 19.5),
    ("H100 PCIe", 756.0, 378.0, 51.0),
    ("H100 NVL", 835.0, 417.5, 60.0),
    ("H100", 989.4, 494.7, 66.9),
    ("H200 NVL", 835.0, 417.5, 60.0),
    ("H200", 989.4, 494.7, 66.9),
    ("MI100", 184.6, 0.0, 46.1),
    ("MI250X", 191.5, 0.0, 47.9),
    ("MI300X", 1307.4, 653.7, 163.4),
)
HALVES = (torch.float16, torch.bfloat16)
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
        return Peak(_measured(dtype), f"measured: a product of {SIZE} x {SIZE} in {short}")
    return published(torch.cuda.get_device_name(device), dtype)


def published(name: str, dtype: torch.dtype) -> Peak:
    """The peak of a GPU by its name.

    >>> published("NVIDIA H100 80GB HBM3", torch.bfloat16)
    Peak(flops_per_second=989400000000000.0, source='published, dense bfloat16')
    """
    short = str(dtype).removeprefix("torch.")
    found = next((row for row in PUBLISHED if row[0] in name), None)
    if found is None or dtype not in (*HALVES, torch.float32):
        return Peak(None, f"unknown for {short} on {name}")
    _, halves, tf32, single = found
    if dtype in HALVES:
        # The bfloat16 units of MI100 are half as fast; a V100 has none.
        slower = {"MI100": 0.5, "V100-PCIE": 0.0, "V100": 0.0}.get(found[0], 1.0)
        halves *= slower if dtype == torch.bfloat16 else 1.0
        return Peak(halves * 1e12 or None, f"published, dense {short}")
    fast = tf32 and torch.backends.cuda.matmul.allow_tf32
    return Peak((tf32 if fast else single) * 1e12, f"published, {'TF32' if fast else short}")


@cache
def _measured(dtype: torch.dtype) -> float:
    """The best of a few products, the first of which does not count."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    best = float("inf")
    for run in range(4):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin) if run else best
    return 2 * SIZE**3 / best
