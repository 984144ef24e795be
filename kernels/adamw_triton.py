"""Triton for :mod:`zfunc.kernels.adamw`: one launch, each buffer read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from zfunc.kernels.flat_launch import over_flat

__all__ = ["adamw_kernel", "launch"]


@triton.jit
def adamw_kernel(
    g, p, m, v, p_new, m_new, v_new, low, hyper, n, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    # Pointers move by 64-bit steps, offsets stay 32-bit: any length, and cheap addresses.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    lr = tl.load(hyper + 0).to(tl.float32)
    b1 = tl.load(hyper + 1).to(tl.float32)
    b2 = tl.load(hyper + 2).to(tl.float32)
    rest1 = (1.0 - tl.load(hyper + 1)).to(tl.float32)
    rest2 = (1.0 - tl.load(hyper + 2)).to(tl.float32)
    eps = tl.load(hyper + 3).to(tl.float32)
    keep = (1.0 - tl.load(hyper + 0) * tl.load(hyper + 4)).to(tl.float32)
    factor = tl.load(hyper + 5).to(tl.float32)
    scale1 = tl.load(hyper + 7).to(tl.float32)
    scale2 = tl.load(hyper + 8).to(tl.float32)

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


launch = over_flat("adamw_flat", adamw_kernel)
