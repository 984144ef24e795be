"""Updates with frozen second moments: both CPU routes against float64, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, assert_near
from zfunc import kernels
from zfunc.kernels import pieces_torch

pytestmark = pytest.mark.usefixtures("cpu_route")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def squares(n: int) -> Tensor:
    """Some elements never had a gradient."""
    v = torch.randn(n).square()
    v[::5] = 0
    return v


def divided(x: Tensor, by: Tensor, more: float = 0.0) -> Tensor:
    return torch.where(by > 0, x / (by + more), 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_shares_are_the_formula(n: int, dtype: torch.dtype):
    grad, mu, nu = torch.randn(n).to(dtype), torch.randn(n), squares(n)
    old, before = mu.double(), nu.clone()
    kernels.momentum_shares_(grad, mu, nu, kernels.shares_hyper(0.9, 0.3))
    mean = 0.9 * old + (1 - 0.9) * grad.double()
    assert_near(mu, divided(mean, (nu.double() / 0.3).sqrt()))
    assert torch.equal(nu, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_shares_of_other_dtypes(dtype: torch.dtype):
    grad, mu, nu = torch.randn(1031).to(dtype), torch.randn(1031).to(dtype), squares(1031).to(dtype)
    mean = (0.5 * mu.double() + 0.5 * grad.double()).to(dtype).double()
    kernels.momentum_shares_(grad, mu, nu, kernels.shares_hyper(0.5, 0.25))
    assert_near(mu, divided(mean, (nu.double() / 0.25).sqrt()))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_the_step_is_the_formula(n: int, dtype: torch.dtype, shares: bool):
    param, mu, nu = torch.randn(n, dtype=dtype), torch.randn(n, dtype=dtype), squares(n).to(dtype)
    p, m, v = (x.double().clone() for x in (param, mu, nu))
    hyper = kernels.frozen_hyper(0.1, 1.1, 0.3, most=0.2, eps=1e-3, kept=0.9)
    kernels.adamw_frozen_(param, mu, nu, hyper, shares=shares)
    size = ((v if shares else 1.1 * v) / 0.3).sqrt()
    m = m * size if shares else m
    assert_near(mu, m)
    assert_near(nu, 1.1 * v)
    assert_near(param, 0.9 * p - divided(0.1 * m, size, 1e-3).clamp(-0.2, 0.2))


def test_cuts_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    n, cuts = 20011, (1, 15, 64, 931, 7000, 12000)
    monkeypatch.setattr(pieces_torch, "PIECE", 1000)
    grad, whole = torch.randn(n), [torch.randn(n), torch.randn(n), squares(n)]
    parts = [x.clone() for x in whole]
    hypers = kernels.shares_hyper(0.9, 0.3), kernels.frozen_hyper(0.1, 1.1, 0.3, most=0.2, kept=0.9)
    kernels.momentum_shares_(grad, whole[1], whole[2], hypers[0])
    kernels.adamw_frozen_(*whole, hypers[1], shares=True)
    columns = (x.tensor_split(cuts) for x in (grad, *parts))
    for g, p, m, v in zip(*columns, strict=True):
        kernels.momentum_shares_(g, m, v, hypers[0])
        kernels.adamw_frozen_(p, m, v, hypers[1], shares=True)
    for x, y in zip(whole, parts, strict=True):
        assert torch.equal(x, y)


def test_what_never_had_a_gradient_stays():
    param, mu, nu = torch.randn(40), torch.randn(40), torch.zeros(40)
    before = param.clone()
    kernels.momentum_shares_(torch.randn(40), mu, nu, kernels.shares_hyper(0.9, 0.5))
    assert not mu.any()
    for eps in (0.0, 1e-8):
        hyper = kernels.frozen_hyper(0.1, 1.1, 0.5, most=1.0, eps=eps)
        for shares in (True, False):
            kernels.adamw_frozen_(param, torch.randn(40), nu, hyper, shares=shares)
    assert torch.equal(param, before) and not nu.any()


def test_opcheck():
    x = [torch.randn(65), torch.randn(65), squares(65)]
    shares, hyper = kernels.shares_hyper(0.9, 0.5), kernels.frozen_hyper(0.1, 1.1, 0.5, most=1.0)
    torch.library.opcheck(torch.ops.zfunc.momentum_shares_.default, (*x, shares))
    torch.library.opcheck(torch.ops.zfunc.adamw_frozen_.default, (*x, hyper, True))


def test_hyperparameters_may_be_tensors():
    half = torch.tensor(0.5, dtype=torch.float64)
    assert torch.equal(kernels.shares_hyper(0.9, half), kernels.shares_hyper(0.9, 0.5))
    found = kernels.frozen_hyper(half, half, half, most=1.0)
    assert torch.equal(found, kernels.frozen_hyper(0.5, 0.5, 0.5, most=1.0))


def test_what_it_cannot_take():
    x = [torch.ones(3) for _ in range(3)]
    shares, hyper = kernels.shares_hyper(0.9, 0.5), kernels.frozen_hyper(0.1, 1.1, 0.5, most=1.0)
    with pytest.raises(kernels.KernelError, match=r"float64\[6\]; expected float64\[2\]: decay, c"):
        kernels.momentum_shares_(*x, hyper)
    with pytest.raises(kernels.KernelError, match=r"float64\[2\]; expected float64\[6\]: rate, g"):
        kernels.adamw_frozen_(*x, shares)
    with pytest.raises(kernels.KernelError, match="hyper is on meta, but moments is on cpu"):
        kernels.adamw_frozen_(*x, hyper.to("meta"))
    with pytest.raises(kernels.KernelError, match=r"param is torch\.bfloat16; expected float32"):
        kernels.adamw_frozen_(*(t.bfloat16() for t in x), hyper)
    with pytest.raises(kernels.KernelError, match=r"mu is torch\.float64, .* one dtype"):
        kernels.adamw_frozen_(x[0], x[1].double(), x[2], hyper)
    with pytest.raises(kernels.KernelError, match="plain torch operations"):
        kernels.momentum_shares_(torch.ones(3, requires_grad=True), *x[1:], shares)
    for most in (-1.0, float("nan")):
        with pytest.raises(kernels.KernelError, match="expected 0 or more"):
            kernels.frozen_hyper(0.1, 1.1, 0.5, most=most)
