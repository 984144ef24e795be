"""Triton for :mod:`zfunc.kernels.decode`: what follows the products of a decoder layer."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.activations_triton import _activated
from zfunc.kernels.decode import KeyValues, Places
from zfunc.kernels.packed import NormedProduct
from zfunc.kernels.skinny_launch import normed_products
from zfunc.kernels.skinny_triton import _scale_of_norm, _summed

__all__ = ["gate_up_kernel", "norm_gate_up", "norm_qkv_rope", "rope_kernel"]


@triton.jit
def rope_kernel(
    parts, squares, bias, cos, sin, positions, slots, q, keys, values,
    M, N, K, eps, splits, heads, groups, angles, length, row_stride, head_stride, token_stride,
    BIAS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one row: sums shares, scales, rotates, and stores where it belongs."""
    head = tl.program_id(0).to(tl.int64)  # times the length of a cache it may leave 32 bits
    m = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, HALF)
    every = i < HALF
    at = m * N + head * 2 * HALF + i
    stride = tl.cast(M, tl.int64) * N  # one row is a constant
    scale = _scale_of_norm(squares, splits, M, m, K, eps)
    a = _summed(parts, at, every, splits, stride) * scale
    b = _summed(parts, at + HALF, every, splits, stride) * scale
    if BIAS:
        a += tl.load(bias + head * 2 * HALF + i).to(tl.float32)
        b += tl.load(bias + head * 2 * HALF + HALF + i).to(tl.float32)
    position = tl.load(positions + m)
    turn = tl.where((position >= 0) & (position < angles), position, 0)
    c = tl.load(cos + turn * HALF + i)
    s = tl.load(sin + turn * HALF + i)
    slot = tl.load(slots + m)
    inside = (slot >= 0) & (slot < length)
    turned = head < heads + groups
    low = tl.where(turned, a * c - b * s, a)
    high = tl.where(turned, b * c + a * s, b)
    kind = q.dtype.element_ty
    if head < heads:
        to = q + (m * heads + head) * 2 * HALF + i
        tl.store(to, low.to(kind))
        tl.store(to + HALF, high.to(kind))
    elif turned:
        to = keys + m * row_stride + (head - heads) * head_stride + slot * token_stride + i
        tl.store(to, low.to(kind), mask=inside & every)
        tl.store(to + HALF, high.to(kind), mask=inside & every)
    else:
        mine = head - heads - groups
        to = values + m * row_stride + mine * head_stride + slot * token_stride + i
        tl.store(to, low.to(kind), mask=inside & every)
        tl.store(to + HALF, high.to(kind), mask=inside & every)


@triton.jit
def gate_up_kernel(
    parts, squares, y, M, F, K, eps, splits, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Some columns of one row: sums shares, scales, activates, multiplies."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stride = tl.cast(M, tl.int64) * 2 * F
    scale = _scale_of_norm(squares, splits, M, m, K, eps)
    gate = _summed(parts, m * 2 * F + n, n < F, splits, stride) * scale
    up = _summed(parts, m * 2 * F + F + n, n < F, splits, stride) * scale
    tl.store(y + m * F + n, (_activated(gate, ACTIVATION) * up).to(y.dtype.element_ty), mask=n < F)


def norm_qkv_rope(
    product: NormedProduct, bias: Tensor | None, at: Places, cache: KeyValues, q: Tensor, **how: Any
) -> None:
    """Launch the products, then heads."""
    parts, squares = normed_products(product)
    (m, heads, _), (splits, _, n) = q.shape, parts.shape
    groups, length = cache.keys.shape[1:3]
    sizes = (m, n, product.x.shape[1], product.eps, splits, heads, groups, len(at.cos), length)
    rope_kernel[(heads + 2 * groups, m)](
        *(parts, squares, parts if bias is None else bias, *at, q, *cache, *sizes),
        *cache.keys.stride()[:3],
        BIAS=bias is not None,
        HALF=how["half"],
        num_warps=dispatch.config("norm_qkv_rope", q.device)["num_warps"],
    )


def norm_gate_up(product: NormedProduct, y: Tensor, *, activation: str, **how: Any) -> None:
    """Launch the products, then columns."""
    parts, squares = normed_products(product)
    m, f = y.shape
    table = dispatch.config("norm_gate_up", y.device)
    gate_up_kernel[(triton.cdiv(f, table["BLOCK"]), m)](
        *(parts, squares, y, m, f, product.x.shape[1], product.eps, parts.shape[0]),
        ACTIVATION=activation,
        **table,
    )
