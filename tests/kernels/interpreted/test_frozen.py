"""Updates with frozen second moments: the Triton kernels are their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS
from zfunc import kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ODD = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1.0, 2.0])


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def rows(n: int) -> list[Tensor]:
    v = torch.randn(n).square()
    v[::5] = 0
    return [torch.randn(n), torch.randn(n), v]


def odd() -> list[Tensor]:
    return list(torch.cartesian_prod(ODD, ODD, ODD).T.contiguous())


@pytest.mark.parametrize("state", FLOATS)
@pytest.mark.parametrize("grad", FLOATS)
def test_shares_are_their_twin(grad: torch.dtype, state: torch.dtype):
    hyper = kernels.shares_hyper(0.9, 0.3)
    for g, m, v in [*map(rows, LENGTHS), *[odd()] * (state == grad == torch.float32)]:
        g, m, v = g.to(grad), m.to(state), v.to(state)
        expected, found = m.clone(), m.clone()
        with kernels.use("torch"):
            kernels.momentum_shares_(g, expected, v, hyper)
        with kernels.use("triton"):
            kernels.momentum_shares_(g, found, v, hyper)
        assert same(found, expected), len(g)


@pytest.mark.parametrize("shares", [True, False])
def test_steps_are_their_twin(shares: bool):
    hyper = kernels.frozen_hyper(0.01, 1.01, 0.3, most=0.02, kept=0.99)
    for row in [*map(rows, LENGTHS), odd()]:
        expected, found = ([x.clone() for x in row] for _ in range(2))
        with kernels.use("torch"):
            kernels.adamw_frozen_(*expected, hyper, shares=shares)
        with kernels.use("triton"):
            kernels.adamw_frozen_(*found, hyper, shares=shares)
        assert all(map(same, found, expected)), len(row[0])
