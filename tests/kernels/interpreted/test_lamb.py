"""LAMB over a flat buffer of segments: the Triton kernels against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import assert_near, poisoned
from zfunc import kernels

# Aligned and not; of one element, none, a whole tile, several; gaps; out of order; none at all.
SEGMENTS = (
    [(0, 3000)],
    [(0, 1024), (1024, 1025), (1040, 1040), (1056, 3000)],
    [(2000, 2999), (7, 1900)],
    [],
)


def both(
    dtype: torch.dtype,
    segments: list[tuple[int, int]],
    decay: float,
    state: torch.dtype = torch.float32,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    g, p, m, v = (torch.randn(3000, generator=generator).to(state) for _ in range(4))
    v, low = v.abs(), torch.zeros(3000, dtype=torch.bfloat16)
    hyper = kernels.lamb_hyper(0.1, 3, eps=1e-6, weight_decay=decay, factor=0.5)
    squares = kernels.lamb_moments_(g.to(dtype), p, m, v, segments, hyper)
    kernels.lamb_apply_(p, m, v, segments, kernels.lamb_ratios(squares), hyper, low)
    return [p, m, v, low, squares]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_it_is_its_twin(dtype: torch.dtype, segments: list[tuple[int, int]], decay: float):
    expected = both(dtype, segments, decay)
    with kernels.use("triton"), poisoned():
        found = both(dtype, segments, decay)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_16_bits(dtype: torch.dtype):
    expected = both(dtype, [(0, 1025), (1040, 3000)], 0.1, dtype)
    with kernels.use("triton"), poisoned():
        found = both(dtype, [(0, 1025), (1040, 3000)], 0.1, dtype)
    assert found[-1].dtype == torch.float32
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y)
