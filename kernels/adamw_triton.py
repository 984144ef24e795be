"""Triton for :mod:`zfunc.kernels.adamw`: one launch, each buffer read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from zfunc.kernels.flat_triton import betas, number, updating

__all__ = ["adamw_flat", "adamw_kernel"]


@triton.jit
def adamw_kernel(
    g, p, m, v, p_new, m_new, v_new, low, hyper, n, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    # Pointers move by 64-bit steps, offsets stay 32-bit: any length, and cheap addresses.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    lr, eps, factor = number(hyper, 0), number(hyper, 3), number(hyper, 5)
    scale1, scale2 = number(hyper, 7), number(hyper, 8)
    b1, b2, rest1, rest2 = betas(hyper)
    keep = (1.0 - tl.load(hyper + 0) * tl.load(hyper + 4)).to(tl.float32)

    gs = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * factor
    ps = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    ms = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    vs = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    ms = b1 * ms + rest1 * gs
    vs = b2 * vs + rest2 * gs * gs
    ps = keep * ps - (lr * scale1) * ms / (tl.sqrt(vs) * scale2 + eps)
    tl.store(p_new + at, ps, mask=inside)
    tl.store(m_new + at, ms, mask=inside)
    tl.store(v_new + at, vs, mask=inside)
    if LOW:
        tl.store(low + at, ps.to(low.dtype.element_ty), mask=inside)


adamw_flat = updating("adamw_flat", adamw_kernel)
