"""Lion over a flat buffer: the Triton kernel is its twin, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.closeness import LENGTHS, poisoned
from zfunc import kernels

GRADS = (torch.float32, torch.bfloat16, torch.float16)
LOW = (None, torch.bfloat16, torch.float16)
CASES = [(1031, g, low) for g, low in itertools.product(GRADS, LOW)]
CASES += [(n, torch.bfloat16, torch.bfloat16) for n in LENGTHS]


@pytest.mark.parametrize(("n", "dtype", "low"), CASES)
def test_it_is_its_twin(n: int, dtype: torch.dtype, low: torch.dtype | None):
    grad, param, mu = torch.randn(n).to(dtype), torch.randn(n), torch.randn(n) * 0.1
    grad[::5] = 0
    mu[::10] = 0
    hyper = kernels.lion_hyper(0.01, weight_decay=0.1, factor=0.5)
    expected = kernels.lion_flat(grad, param, mu, hyper, low)
    with kernels.use("triton"), poisoned():
        found = kernels.lion_flat(grad, param, mu, hyper, low)
        kernels.lion_flat_(grad, param, mu, hyper, copy := torch.empty(n, dtype=low))
    for x, y, z in zip((param, mu, copy), found, expected, strict=True):
        if y is None or z is None:
            assert y is z is low is None
        else:
            assert torch.equal(x, y) and torch.equal(y, z)


def test_nan_and_infinity_spread_as_in_the_twin():
    grad = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    hyper = kernels.lion_hyper(0.01, weight_decay=0.1)
    expected = kernels.lion_flat(grad, torch.ones(5), torch.zeros(5), hyper)
    with kernels.use("triton"):
        found = kernels.lion_flat(grad, torch.ones(5), torch.zeros(5), hyper)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, equal_nan=True, rtol=0, atol=0)
