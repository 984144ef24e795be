"""AdamW over a flat buffer: the Triton kernel against its twin."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.closeness import LENGTHS, assert_near, poisoned
from zfunc import kernels

LOW = (None, torch.bfloat16, torch.float16)
GRADS = (torch.float32, torch.bfloat16, torch.float16)
# Every pair of dtypes at one awkward length, every length at one pair.
CASES = [(1031, g, low) for g, low in itertools.product(GRADS, LOW)]
CASES += [(n, torch.bfloat16, torch.bfloat16) for n in LENGTHS]


def buffers(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    grad, param, mu = (torch.randn(n) for _ in range(3))
    return [grad.to(dtype), param, mu * 0.1, torch.rand(n) * 0.01]


@pytest.mark.parametrize(("n", "dtype", "low"), CASES)
def test_it_is_its_twin(n: int, dtype: torch.dtype, low: torch.dtype | None):
    inputs = buffers(n, dtype)
    hyper = kernels.adamw_hyper(0.1, 3, weight_decay=0.1, factor=0.5)
    expected = kernels.adamw_flat(*inputs, hyper, low)
    with kernels.use("triton"), poisoned():
        found = kernels.adamw_flat(*inputs, hyper, low)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert_near(x, y)


def test_in_place_is_the_same():
    grad, param, mu, nu = buffers(1500, torch.bfloat16)
    hyper = kernels.adamw_hyper(0.1, 1)
    with kernels.use("triton"):
        expected = kernels.adamw_flat(grad, param, mu, nu, hyper, torch.bfloat16)
        low = torch.empty(1500, dtype=torch.bfloat16)
        kernels.adamw_flat_(grad, param, mu, nu, hyper, low)
    for x, y in zip((param, mu, nu, low), expected, strict=True):
        assert y is not None
        assert torch.equal(x, y)


def test_nothing_beyond_the_end_is_touched():
    n, room = 1030, 2048
    grad, *state = (torch.randn(room).abs() for _ in range(4))
    before = [x.clone() for x in state]
    with kernels.use("triton"):
        kernels.adamw_flat_(grad[:n], *(x[:n] for x in state), kernels.adamw_hyper(0.1, 1))
    for x, y in zip(state, before, strict=True):
        assert torch.equal(x[n:], y[n:])
        assert not torch.equal(x[:n], y[:n])


def test_nan_and_infinity_spread_as_in_the_twin():
    grad, param, mu, nu = buffers(70, torch.float32)
    grad[3], grad[5], param[9] = torch.nan, torch.inf, torch.nan
    hyper = kernels.adamw_hyper(0.1, 1)
    expected = kernels.adamw_flat(grad, param, mu, nu, hyper)
    with kernels.use("triton"):
        found = kernels.adamw_flat(grad, param, mu, nu, hyper)
    for x, y in zip(found[:3], expected[:3], strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-5, atol=1e-6)
