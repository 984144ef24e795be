"""Triton for :mod:`zfunc.kernels.frozen`: one launch, each buffer read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels.flat_triton import number, over_flat

__all__ = [
    "adamw_frozen",
    "adamw_frozen_kernel",
    "momentum_shares",
    "momentum_shares_kernel",
]


@triton.jit
def inverse(x):
    """``1 / sqrt(x)``, the root rounded first."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def threshold(x):
    """What is not positive, infinite."""
    return tl.where(x <= 0, float("inf"), x)


@triton.jit
def momentum_shares_kernel(g, m, v, hyper, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    decay, correction = number(hyper, 0), number(hyper, 1)
    rest = (1.0 - tl.load(hyper + 0)).to(tl.float32)

    gs = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    ms = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    vs = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    mean = (ms * decay + gs * rest).to(m.dtype.element_ty).to(tl.float32)
    share = mean * inverse(threshold(tl.div_rn(vs, correction)))
    tl.store(m + at, share.to(m.dtype.element_ty), mask=inside)


@triton.jit
def adamw_frozen_kernel(p, m, v, hyper, n, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    rate, grown, correction = number(hyper, 0), number(hyper, 1), number(hyper, 2)
    most, eps, kept = number(hyper, 3), number(hyper, 4), number(hyper, 5)

    ps = tl.load(p + at, mask=inside, other=0.0)
    ms = tl.load(m + at, mask=inside, other=0.0)
    vs = tl.load(v + at, mask=inside, other=0.0)
    new = vs * grown
    size = tl.div_rn(1.0, inverse(tl.div_rn(vs if SHARES else new, correction)))
    if SHARES:
        ms = ms * size
        tl.store(m + at, ms, mask=inside)
    move = tl.div_rn(ms * rate, threshold(size) + eps)
    move = tl.where(move < -most, -most, tl.where(move > most, most, move))  # NaN stays
    tl.store(v + at, new, mask=inside)
    tl.store(p + at, ps * kept - move, mask=inside)


def momentum_shares(grad: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor) -> None:
    """Launch over contiguous tensors."""
    over_flat("momentum_shares", momentum_shares_kernel, grad, mu, nu, hyper)


def adamw_frozen(param: Tensor, mu: Tensor, nu: Tensor, *, hyper: Tensor, shares: bool) -> None:
    """Launch over contiguous tensors."""
    over_flat("adamw_frozen", adamw_frozen_kernel, param, mu, nu, hyper, SHARES=shares)
