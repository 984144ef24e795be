"""Flat kernels say which input has a dtype that they have no arithmetic for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zfunc import kernels

NARROW = (torch.float8_e4m3fn, torch.int32, torch.complex64, torch.bool)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "adamw_flat": lambda x: kernels.adamw_flat(x, x, x, x, kernels.adamw_hyper(0.1, 1)),
    "adamw_flat of a narrow gradient": lambda x: kernels.adamw_flat(
        x, *[torch.ones(4)] * 3, kernels.adamw_hyper(0.1, 1)
    ),
    "lion_flat": lambda x: kernels.lion_flat(x, x, x, kernels.lion_hyper(0.1)),
    "momentum_shares_": lambda x: kernels.momentum_shares_(
        x, x.clone(), x, kernels.shares_hyper(0.9, 1.0)
    ),
    "sum_squares": kernels.sum_squares,
    "norm_clip": lambda x: kernels.norm_clip([torch.ones(4), x], 1.0),
    "onebit_pack": lambda x: kernels.onebit_pack(x, torch.zeros(4)),
    "onebit_unpack": lambda x: kernels.onebit_unpack(torch.zeros(1, dtype=torch.uint8), x[:1], 4),
    "quantize_groups": kernels.quantize_groups,
    "fake_quant": kernels.fake_quant,
    "quantize_payload": lambda x: kernels.quantize_payload(x, kernels.Payload(4)),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_without_arithmetic_are_refused(name: str, dtype: torch.dtype):
    x = torch.ones(4).to(dtype)
    with pytest.raises(kernels.KernelError, match=str(dtype).replace(".", r"\.") + ".*16 bits"):
        CALLS[name](x)


def test_gradients_on_several_devices_are_named():
    with pytest.raises(kernels.KernelError, match=r"grads\[1\] is on meta, but grads"):
        kernels.norm_clip([torch.ones(4), torch.ones(4, device="meta")], 1.0)
