"""Clusters by name: what makers publish of a device and of the node that it is usually in.

One row for each device. A rate is bytes per second, each way, of one device. Memory is what the
maker calls GB, in GiB. ``product`` and ``attention`` are shares of the peak that somebody has
measured; where nobody has, they are guessed, and :data:`GUESSED` says so.

Sources:

- peaks, memory, links: the makers' data sheets (NVIDIA V100 2020, A100 2021, H100 2023, H200 2024;
  AMD CDNA MI100 2020, MI250X 2021, MI300X 2023). Dense, without sparsity; bf16 and fp16 on tensor
  or matrix cores, fp32 without TF32.
- network: NVIDIA DGX-1 (4 x 100 Gbit/s for 8), DGX A100 (8 x 200), DGX H100 and H200 (8 x 400);
  Frontier's user guide (4 x 200 Gbit/s for 8 halves of MI250X, 50 GB/s each way between packages).
- ``product``: the largest that any product reaches, Bekman, Machine Learning Engineering, 2024
  ("maximum achievable matmul FLOPS"): A100 271.2, H100 794.5, MI300X 668.4 TFLOP/s.
- ``attention``: Dao, FlashAttention-2, 2023: forward up to 73 % of an A100's peak; up to
  335 TFLOP/s on an H100 without its own instructions.

A half of an MI250X is a device of its own, as torch shows it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["GUESSED", "PRESETS"]

GIB = 1 << 30
GBIT = 1e9 / 8


def _peaks(
    half: float, single: float, brain: float | None = None, **more: float
) -> dict[str, float]:
    """FLOP/s by dtype, of numbers in TFLOP/s."""
    by_dtype = {"float16": half, "bfloat16": half if brain is None else brain, "float32": single}
    return {name: 1e12 * x for name, x in {**by_dtype, **more}.items()}


_A100 = {
    "multiprocessors": 108,
    "peak_flops": _peaks(312, 19.5, float64=19.5, int8=624),
    "nvlink": 300e9,
    "nic": 200 * GBIT,
    "pcie": 32e9,
    "product": 271.2 / 312,
    "attention": 0.73,
}
_H100 = {
    "multiprocessors": 132,
    "peak_flops": _peaks(989.4, 66.9, float64=66.9, int8=1979, float8_e4m3fn=1979),
    "nvlink": 450e9,
    "nic": 400 * GBIT,
    "pcie": 64e9,
    "product": 794.5 / 989.4,
    "attention": 335 / 989.4,
}

PRESETS: dict[str, dict[str, Any]] = {
    "a100-40": {
        "device": "NVIDIA A100-SXM4-40GB",
        "memory": 40 * GIB,
        "memory_bandwidth": 1.555e12,
        **_A100,
    },
    "a100-80": {
        "device": "NVIDIA A100-SXM4-80GB",
        "memory": 80 * GIB,
        "memory_bandwidth": 2.039e12,
        **_A100,
    },
    "h100": {
        "device": "NVIDIA H100 80GB HBM3",
        "memory": 80 * GIB,
        "memory_bandwidth": 3.35e12,
        **_H100,
    },
    "h200": {
        "device": "NVIDIA H200",
        "memory": 141 * GIB,
        "memory_bandwidth": 4.8e12,
        **_H100,
    },
    "v100": {
        "device": "Tesla V100-SXM2-32GB",
        "memory": 32 * GIB,
        "memory_bandwidth": 0.9e12,
        "multiprocessors": 80,
        "peak_flops": _peaks(125, 15.7, brain=15.7, float64=7.8),  # no bf16 in its tensor cores
        "nvlink": 150e9,
        "nic": 50 * GBIT,
        "pcie": 16e9,
        "product": 0.8,
        "attention": 0.4,
    },
    "mi100": {
        "device": "AMD Instinct MI100",
        "memory": 32 * GIB,
        "memory_bandwidth": 1.2288e12,
        "multiprocessors": 120,
        "peak_flops": _peaks(184.6, 46.1, brain=92.3, float64=11.5),
        "gpus_per_node": 4,  # joined by links; a server may have two such groups
        "nvlink": 138e9,
        "nic": 100 * GBIT,
        "pcie": 32e9,
        "product": 0.7,
        "attention": 0.3,
    },
    "mi250x": {
        "device": "AMD Instinct MI250X",
        "memory": 64 * GIB,
        "memory_bandwidth": 1.6384e12,
        "multiprocessors": 110,
        "peak_flops": _peaks(191.5, 47.9, float64=47.9, int8=191.5),
        "nvlink": 50e9,
        "nic": 100 * GBIT,
        "pcie": 36e9,
        "product": 0.7,
        "attention": 0.3,
    },
    "mi300x": {
        "device": "AMD Instinct MI300X",
        "memory": 192 * GIB,
        "memory_bandwidth": 5.3e12,
        "multiprocessors": 304,
        "peak_flops": _peaks(1307.4, 163.4, float64=163.4, int8=2614.9),
        "nvlink": 448e9,
        "nic": 400 * GBIT,
        "pcie": 64e9,
        "product": 668.4 / 1307.4,
        "attention": 0.3,
    },
}

# Of fields above; those that clusters have by default are guesses, too.
GUESSED: dict[str, tuple[str, ...]] = {
    "h200": ("product", "attention"),  # an H100's
    "v100": ("product", "attention"),
    "mi100": ("product", "attention", "nic"),
    "mi250x": ("product", "attention"),
    "mi300x": ("attention",),
}
