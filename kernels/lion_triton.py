"""Triton for :mod:`zfunc.kernels.lion`: one launch, each buffer read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from zfunc.kernels.flat_triton import betas, number, updating

__all__ = ["lion_flat", "lion_kernel"]


@triton.jit
def lion_kernel(g, p, m, p_new, m_new, low, hyper, n, LOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    lr, factor = number(hyper, 0), number(hyper, 4)
    b1, b2, rest1, rest2 = betas(hyper)
    keep = (1.0 - tl.load(hyper + 0) * tl.load(hyper + 3)).to(tl.float32)

    gs = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * factor
    ps = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    ms = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    mean = ms * b1 + gs * rest1
    sign = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))  # of NaN: 0, as in torch
    ps = ps * keep - sign * lr
    ms = ms * b2 + gs * rest2
    tl.store(p_new + at, ps, mask=inside)
    tl.store(m_new + at, ms, mask=inside)
    if LOW:
        tl.store(low + at, ps.to(low.dtype.element_ty), mask=inside)


lion_flat = updating("lion_flat", lion_kernel)
