"""Clusters by name: what makers publish of a device and of the node that it is usually in.

One row for each device. A rate is bytes per second, each way, of one device. Memory is what the
maker calls GB, in GiB. ``product`` and ``attention`` are shares of the peak that somebody has
measured; where nobody has, they are guessed, and :data:`GUESSED` says so.

Sources:

- peaks: :mod:`zfunc.foresight.peaks`.
- memory, links: the makers' data sheets (NVIDIA V100 2020, A100 2021, H100 2023, H200 2024;
  AMD CDNA MI100 2020, MI250X 2021, MI300X 2023).
- network: NVIDIA DGX-1 (4 x 100 Gbit/s for 8), DGX A100 (8 x 200), DGX H100 and H200 (8 x 400);
  Frontier's user guide (4 x 200 Gbit/s for 8 halves of MI250X, 50 GB/s each way between packages).
- memory of the host: channels of its processors, of what one moves (JEDEC): DGX-1 2 x 4 of
  DDR4-2133, DGX A100 2 x 8 of DDR4-3200, DGX H100 2 x 8 of DDR5-4800, Frontier 8 of DDR4-3200.
- ``product``: the largest that any product reaches, Bekman, Machine Learning Engineering, 2024
  ("maximum achievable matmul FLOPS"): A100 271.2, H100 794.5, MI300X 668.4 TFLOP/s.
- ``attention``: Dao, FlashAttention-2, 2023: forward up to 73 % of an A100's peak; up to
  335 TFLOP/s on an H100 without its own instructions.

A half of an MI250X is a device of its own, as torch shows it.
"""

from __future__ import annotations

from typing import Any

from zfunc.foresight.peaks import peak_flops

__all__ = ["ALWAYS_GUESSED", "GUESSED", "PRESETS", "preset_of"]

GIB = 1 << 30
GBIT = 1e9 / 8
DDR4_2133, DDR4_3200, DDR5_4800 = 17.066e9, 25.6e9, 38.4e9  # of a channel


_A100 = {
    "multiprocessors": 108,
    "peak_flops": peak_flops("A100"),
    "nvlink": 300e9,
    "nic": 200 * GBIT,
    "pcie": 32e9,
    "host_memory_bandwidth": 2 * 8 * DDR4_3200 / 8,
    "product": 271.2 / 312,
    "attention": 0.73,
}
_H100 = {
    "multiprocessors": 132,
    "peak_flops": peak_flops("H100"),
    "nvlink": 450e9,
    "nic": 400 * GBIT,
    "pcie": 64e9,
    "host_memory_bandwidth": 2 * 8 * DDR5_4800 / 8,
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
        "peak_flops": peak_flops("V100"),  # no bf16 in its tensor cores
        "nvlink": 150e9,
        "nic": 50 * GBIT,
        "pcie": 16e9,
        "host_memory_bandwidth": 2 * 4 * DDR4_2133 / 8,
        "product": 0.8,
        "attention": 0.4,
    },
    "mi100": {
        "device": "AMD Instinct MI100",
        "memory": 32 * GIB,
        "memory_bandwidth": 1.2288e12,
        "multiprocessors": 120,
        "peak_flops": peak_flops("MI100"),
        "gpus_per_node": 4,  # joined by links; a server may have two such groups
        "nvlink": 138e9,
        "nic": 100 * GBIT,
        "pcie": 32e9,
        "host_memory_bandwidth": 2 * 8 * DDR4_3200 / 4,
        "product": 0.7,
        "attention": 0.3,
    },
    "mi250x": {
        "device": "AMD Instinct MI250X",
        "memory": 64 * GIB,
        "memory_bandwidth": 1.6384e12,
        "multiprocessors": 110,
        "peak_flops": peak_flops("MI250X"),
        "nvlink": 50e9,
        "nic": 100 * GBIT,
        "pcie": 36e9,
        "host_memory_bandwidth": 8 * DDR4_3200 / 8,
        "product": 0.7,
        "attention": 0.3,
    },
    "mi300x": {
        "device": "AMD Instinct MI300X",
        "memory": 192 * GIB,
        "memory_bandwidth": 5.3e12,
        "multiprocessors": 304,
        "peak_flops": peak_flops("MI300X"),
        "nvlink": 448e9,
        "nic": 400 * GBIT,
        "pcie": 64e9,
        "host_memory_bandwidth": 2 * 8 * DDR5_4800 / 8,
        "product": 668.4 / 1307.4,
        "attention": 0.3,
    },
}

# Fields of every cluster that nobody has published.
ALWAYS_GUESSED = ("product_ramp", "attention_ramp", "stream", "link_share", "gap", "dispatch")
# Fields above that nobody has published of one.
GUESSED: dict[str, tuple[str, ...]] = {
    "h200": ("product", "attention"),  # an H100's
    "v100": ("product", "attention"),
    "mi100": ("product", "attention", "nic", "host_memory_bandwidth"),
    "mi250x": ("product", "attention"),
    "mi300x": ("attention", "host_memory_bandwidth"),
}


def preset_of(device: str) -> str:
    """The preset of a device by the name that torch gives it; empty if there is none.

    >>> preset_of("NVIDIA H200")
    'h200'
    """
    return next((name for name, row in PRESETS.items() if row["device"] == device), "")
