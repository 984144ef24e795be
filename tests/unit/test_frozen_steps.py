"""AdamW's step with frozen second moments, on plain trees: the formula, and rates at the edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import assert_near
from zfunc.optim import frozen
from zfunc.optim.frozen import reach

COUNT = torch.tensor(5)


def trees(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Parameters, momentum and second moments, some of them 0."""
    shapes = {"a": (3, 5), "b": (7,), "c": (41, 2)}
    rows = [{k: torch.randn(s, dtype=dtype) for k, s in shapes.items()} for _ in range(3)]
    rows[2] = {k: x.square().clamp_min(0.1) - 0.1 for k, x in rows[2].items()}
    return rows


def expected(p: Tensor, m: Tensor, v: Tensor, lr: float, rate: float, b2: float) -> Tensor:
    """The formula, in float64, with momentum that is not in units."""
    p, m, v = (x.double() for x in (p, m, v))
    v = v * (1 - b2**5) / (1 - b2**4)
    most = reach(0.9, b2)
    move = (m / (1 - 0.9**5) / ((v / (1 - b2**5)).sqrt() + 1e-8)).clamp(-most, most)
    return (1 - lr * rate) * p - lr * torch.where(v > 0, move, 0.0)


@pytest.mark.parametrize("in_units", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("lr", "b2"), [(0.1, 0.99), (0.1, 0.8), (0.0, 0.8), (-0.1, 0.99)])
def test_it_is_the_formula(lr: float, b2: float, dtype: torch.dtype, in_units: bool):
    params, mu, nu = trees(dtype)
    given = mu
    units = 1 - b2**4 if in_units else None
    if units is not None:
        given = {k: m / (nu[k] / units).sqrt() for k, m in mu.items()}
        given = {k: torch.where(nu[k] > 0, x, 1.0) for k, x in given.items()}
        mu = {k: torch.where(nu[k] > 0, x, 0.0) for k, x in mu.items()}
    how = {"lr": lr, "b1": 0.9, "b2": b2}
    rates = {"a": 0.5, "b": 0.0, "c": 0.5}
    given = {k: x.clone() for k, x in given.items()}
    done = frozen.step(
        params, given, nu, units=units, decay=rates.get, count=COUNT, eps=1e-8, **how
    )
    assert done is not None
    for k, p in params.items():
        assert_near(done[0][k], expected(p, mu[k], nu[k], lr, rates[k], b2).to(dtype))
        assert_near(done[1][k], mu[k])
        assert_near(done[2][k], nu[k] * ((1 - b2**5) / (1 - b2**4)))


def test_an_infinite_bound_and_a_rate_of_0_leave_parameters_as_they_are():
    params, mu, nu = trees(torch.float32)
    how = {"lr": 0.0, "b1": 0.9, "b2": 0.8, "eps": 1e-8}
    assert reach(0.9, 0.8) == float("inf")
    done = frozen.step(params, mu, nu, units=None, decay=0.1, count=COUNT, **how)
    assert done is not None
    assert all(torch.equal(done[0][k], p) for k, p in params.items())
