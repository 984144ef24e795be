"""Triton for :mod:`zfunc.kernels.adamw8`: one launch; a program has whole groups in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.adamw8 import GROUP
from zfunc.kernels.flat_triton import betas, number
from zfunc.kernels.flat_updates import Buffers

__all__ = ["adamw8_flat", "adamw8_kernel"]

NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: added, it leaves the nearest integer as low bits
SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def _greatest(x):
    """Of each row of numbers that are not negative: as integers they are in order, NaN last."""
    return tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def _root_codes(x, scale, TOP: tl.constexpr):
    """``TOP * sqrt(x / scale)``; 0 in groups that cannot be scaled."""
    usable = (scale > SMALLEST) & (scale < float("inf"))
    inverse = tl.where(usable, (TOP * TOP) / scale, 0.0)
    return tl.where(usable[:, None], tl.sqrt(x * inverse[:, None]), 0.0)


@triton.jit
def adamw8_kernel(
    g, p, tail, m, v, scales, p_new, tail_new, m_new, v_new, scales_new, low, hyper, n,
    TAIL: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = first * GROUP
    at = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    left = tl.minimum(n - start, ROWS * GROUP).to(tl.int32)
    inside = at < left
    group = tl.arange(0, ROWS)
    here = group * GROUP < left
    eps, factor, scale2 = number(hyper, 3), number(hyper, 5), number(hyper, 8)
    b1, b2, rest1, rest2 = betas(hyper)
    keep = (1.0 - tl.load(hyper + 0) * tl.load(hyper + 4)).to(tl.float32)
    rate = (tl.load(hyper + 0) * tl.load(hyper + 7)).to(tl.float32)

    scale_m = tl.load(scales + 2 * (first + group), mask=here, other=0.0)
    scale_v = tl.load(scales + 2 * (first + group) + 1, mask=here, other=0.0)
    gs = tl.load(g + start + at, mask=inside, other=0.0).to(tl.float32) * factor
    ms = tl.load(m + start + at, mask=inside, other=0).to(tl.float32)
    vs = tl.load(v + start + at, mask=inside, other=0).to(tl.float32)
    if TAIL:
        high = tl.load(p + start + at, mask=inside, other=0).to(tl.int32) << 16
        rest = tl.load(tail + start + at, mask=inside, other=0).to(tl.int32) << 8
        ps = (high + rest).to(tl.float32, bitcast=True)
    else:
        ps = tl.load(p + start + at, mask=inside, other=0.0)

    ms = ms * tl.abs(ms) * (scale_m * (1.0 / 127**2))[:, None]
    vs = vs * vs * (scale_v * (1.0 / 255**2))[:, None]
    ms = b1 * ms + rest1 * gs
    root = tl.sqrt(b2 * (vs * vs) + rest2 * (gs * gs))
    ps = keep * ps - rate * ms / (root * scale2 + eps)

    if TAIL:
        bits = ps.to(tl.int32, bitcast=True)
        bits = tl.where(ps == ps, bits, 0x7FC00000)
        t = (bits + 0x7F + ((bits >> 8) & 1)) >> 8
        high = (t + 128) >> 8
        tl.store(p_new + start + at, high.to(tl.int16), mask=inside)
        tl.store(tail_new + start + at, (t - (high << 8)).to(tl.int8), mask=inside)
    else:
        tl.store(p_new + start + at, ps, mask=inside)
    if LOW:
        tl.store(low + start + at, ps.to(low.dtype.element_ty), mask=inside)

    size = tl.abs(ms)
    scale_m = _greatest(size)
    scale_v = _greatest(root)
    tl.store(scales_new + 2 * (first + group), scale_m, mask=here)
    tl.store(scales_new + 2 * (first + group) + 1, scale_v, mask=here)
    y = _root_codes(size, scale_m, 127)
    y = tl.where(ms < 0, -y, y) + NEAREST
    tl.store(m_new + start + at, y.to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    z = _root_codes(root, scale_v, 255)
    z = tl.where(z > 0, tl.maximum(z, 1.0), 0.0) + NEAREST
    tl.store(v_new + start + at, z.to(tl.int32, bitcast=True).to(tl.uint8), mask=inside)


def adamw8_flat(
    grad: Tensor, state: Buffers, new: Buffers, low: Tensor | None, *, hyper: Tensor
) -> None:
    """Launch over contiguous buffers of one length."""
    param, tail, mu, nu, scales = state
    new_param, new_tail, new_mu, new_nu, new_scales = new
    if not (n := param.numel()):
        return
    how = dict(dispatch.config("adamw8_flat", param.device))
    block = how.pop("BLOCK")
    if tail is not None:
        param, new_param = param.view(torch.int16), new_param.view(torch.int16)
    adamw8_kernel[(triton.cdiv(n, block),)](
        *(grad, param, mu if tail is None else tail, mu, nu, scales),
        *(new_param, new_mu if new_tail is None else new_tail, new_mu, new_nu, new_scales),
        new_param if low is None else low,
        hyper,
        n,
        TAIL=tail is not None,
        LOW=low is not None,
        ROWS=block // GROUP,
        GROUP=GROUP,
        **how,
    )
