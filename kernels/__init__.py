"""Triton kernels, each beside a twin in plain torch that runs anywhere.

Importing this room imports no Triton; a kernel does, when it is first launched. What runs
where is decided in :mod:`zfunc.kernels.dispatch`.
"""

from __future__ import annotations

from zfunc.kernels.adamw import adamw_flat, adamw_flat_, adamw_hyper
from zfunc.kernels.dispatch import Choice, choose, use
from zfunc.kernels.lion import lion_flat, lion_flat_, lion_hyper
from zfunc.kernels.onebit import (
    onebit_bytes,
    onebit_mean,
    onebit_mean_,
    onebit_pack,
    onebit_pack_,
    onebit_unpack,
)
from zfunc.kernels.operators import KernelError

__all__ = [
    "Choice",
    "KernelError",
    "adamw_flat",
    "adamw_flat_",
    "adamw_hyper",
    "choose",
    "lion_flat",
    "lion_flat_",
    "lion_hyper",
    "onebit_bytes",
    "onebit_mean",
    "onebit_mean_",
    "onebit_pack",
    "onebit_pack_",
    "onebit_unpack",
    "use",
]
