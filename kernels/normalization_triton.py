"""Triton for :mod:`zfunc.kernels.normalization`: rows in tiles, and rows too long for one.

A row of up to ``LONGEST`` elements is held by one program, short rows several at a time
(``ROWS``): read once, written once. Longer rows are passed over twice, the second time from the
L2 cache. Backward, a fixed number of programs walk over the rows in stripes and keep the sums for
weight and bias in registers; one more sum over programs makes them whole. Rows beyond
``LONGEST_BACKWARD`` leave no room for that: their sums are taken by a kernel of its own.

A mean is two numbers: itself, and what was lost when it was rounded, which is as much as the row
spreads where the mean is great.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu
from zfunc.kernels.normalization_torch import Form, Normed, NormGradients, Rows, Saved

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "norm_backward_kernel",
    "norm_kernel",
    "rms_norm",
    "rms_norm_backward",
    "wide_norm_backward_kernel",
    "wide_norm_kernel",
    "wide_sums_kernel",
]

LONGEST, LONGEST_BACKWARD = 16384, 8192
SUMS = {"ROWS": 16, "BLOCK": 128, "num_warps": 4}


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def norm_kernel(
    x, residual, weight, bias, y, s, mean, rstd, M, N, eps, offset,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    start = first * N
    at = tl.arange(0, ROWS)[:, None] * N + column
    real = column < N
    inside = (row < M)[:, None] & real

    v = _load(x + start, at, inside)
    if RESIDUAL:
        low = (v + _load(residual + start, at, inside)).to(s.dtype.element_ty)
        tl.store(s + start + at, low, mask=inside)
        v = low.to(tl.float32)
    if CENTER:
        mu = tl.sum(v, 1) / N
        v = tl.where(real, v - mu[:, None], 0.0)
        rest = tl.sum(v, 1) / N
        tl.store(mean + 2 * row, mu, mask=row < M)
        tl.store(mean + 2 * row + 1, rest, mask=row < M)
        scale = tl.rsqrt(tl.maximum(tl.sum(v * v, 1) / N - rest * rest, 0.0) + eps)
        v = v * scale[:, None] - (rest * scale)[:, None]
    else:
        scale = tl.rsqrt(tl.sum(v * v, 1) / N + eps)
        v = v * scale[:, None]
    tl.store(rstd + row, scale, mask=row < M)
    if WEIGHT:
        v = v * (_load(weight, column, real) + offset)
    if BIAS:
        v = v + _load(bias, column, real)
    tl.store(y + start + at, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def wide_norm_kernel(
    x, residual, weight, bias, y, s, mean, rstd, M, N, eps, offset,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * N
    lanes = tl.arange(0, BLOCK)
    mu = 0.0
    rest = 0.0
    squares = 0.0
    for c in range(0, N, BLOCK):
        real = c + lanes < N
        v = _load(x + start + c, lanes, real)
        if RESIDUAL:
            low = (v + _load(residual + start + c, lanes, real)).to(s.dtype.element_ty)
            tl.store(s + start + c + lanes, low, mask=real)
            v = low.to(tl.float32)
        if CENTER:
            # Mean and squares about it of this block, joined to those of the blocks before it.
            n = tl.minimum(N - c, BLOCK).to(tl.float32)
            here = tl.sum(v, 0) / n
            d = tl.where(real, v - here, 0.0)
            left = tl.sum(d, 0) / n
            share = n / (c + n)
            apart = here - mu + (left - rest)
            squares += tl.sum(d * d, 0) - left * left * n + apart * apart * share * c
            step = (here - mu) * share
            joined = mu + step
            rest += (left - rest) * share + (mu - joined + step)  # and what rounding took
            mu = joined
        else:
            squares += tl.sum(v * v, 0)
    scale = tl.rsqrt(tl.maximum(squares, 0.0) / N + eps)
    tl.store(rstd + row, scale)
    if CENTER:
        tl.store(mean + 2 * row, mu)
        tl.store(mean + 2 * row + 1, rest)
    if RESIDUAL:
        tl.debug_barrier()  # another thread may have written what is read here
    for c in range(0, N, BLOCK):
        real = c + lanes < N
        v = _load((s if RESIDUAL else x) + start + c, lanes, real)
        v = (v - mu - rest) * scale
        if WEIGHT:
            v = v * (_load(weight + c, lanes, real) + offset)
        if BIAS:
            v = v + _load(bias + c, lanes, real)
        tl.store(y + start + c + lanes, v.to(y.dtype.element_ty), mask=real)


@triton.jit
def norm_backward_kernel(
    grad, grad_s, s, weight, mean, rstd, dx, sums_w, sums_b, M, N, offset,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, DW: tl.constexpr,
    DB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    zero = program.to(tl.int64) * 0  # makes addresses of 64 bits
    lanes = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    offsets = lanes[:, None] * N + column
    real = column < N
    total_w = tl.zeros((ROWS, BLOCK), tl.float32)
    total_b = tl.zeros((ROWS, BLOCK), tl.float32)
    if WEIGHT:
        w = _load(weight, column, real) + offset
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = tile * ROWS + lanes
        here = row < M
        start = (tile + zero) * ROWS * N
        inside = here[:, None] & real
        g = _load(grad + start, offsets, inside)
        v = _load(s + start, offsets, inside)
        scale = tl.load(rstd + row, mask=here, other=0.0)[:, None]
        if CENTER:
            mu = tl.load(mean + 2 * row, mask=here, other=0.0)[:, None]
            rest = tl.load(mean + 2 * row + 1, mask=here, other=0.0)[:, None]
            v = v - mu - rest
        v = v * scale
        if DB:
            total_b += g
        if DW:
            total_w += g * v
        if WEIGHT:
            g = g * w
        new = g - v * (tl.sum(g * v, 1) / N)[:, None]
        if CENTER:
            new = new - (tl.sum(g, 1) / N)[:, None]
        new = new * scale
        if RESIDUAL:
            new += _load(grad_s + start, offsets, inside)
        tl.store(dx + start + offsets, new.to(dx.dtype.element_ty), mask=inside)
    lane = tl.arange(0, BLOCK)
    if DW:
        tl.store(sums_w + program * N + lane, tl.sum(total_w, 0), mask=lane < N)
    if DB:
        tl.store(sums_b + program * N + lane, tl.sum(total_b, 0), mask=lane < N)


@triton.jit
def _pulled(grad, s, weight, start, c, lanes, real, mu, rest, scale, offset, WEIGHT: tl.constexpr):
    """A block of a row: gradients behind the weights, and the row before them."""
    g = _load(grad + start + c, lanes, real)
    if WEIGHT:
        g = g * (_load(weight + c, lanes, real) + offset)
    return g, (_load(s + start + c, lanes, real) - mu - rest) * scale


@triton.jit
def wide_norm_backward_kernel(
    grad, grad_s, s, weight, mean, rstd, dx, N, offset,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * N
    lanes = tl.arange(0, BLOCK)
    scale = tl.load(rstd + row)
    mu = 0.0
    rest = 0.0
    if CENTER:
        mu = tl.load(mean + 2 * row)
        rest = tl.load(mean + 2 * row + 1)
    along = tl.zeros((BLOCK,), tl.float32)
    level = tl.zeros((BLOCK,), tl.float32)
    for c in range(0, N, BLOCK):
        real = c + lanes < N
        g, v = _pulled(grad, s, weight, start, c, lanes, real, mu, rest, scale, offset, WEIGHT)
        along += g * v
        level += g
    shared = tl.sum(along, 0) / N
    even = tl.sum(level, 0) / N
    for c in range(0, N, BLOCK):
        real = c + lanes < N
        g, v = _pulled(grad, s, weight, start, c, lanes, real, mu, rest, scale, offset, WEIGHT)
        new = g - v * shared
        if CENTER:
            new = new - even
        new = new * scale
        if RESIDUAL:
            new += _load(grad_s + start + c, lanes, real)
        tl.store(dx + start + c + lanes, new.to(dx.dtype.element_ty), mask=real)


@triton.jit
def wide_sums_kernel(
    grad, s, mean, rstd, sums_w, sums_b, M, N,
    CENTER: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    zero = program.to(tl.int64) * 0
    lanes = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offsets = lanes[:, None] * N + column[None, :]
    total_w = tl.zeros((ROWS, BLOCK), tl.float32)
    total_b = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):
        row = tile * ROWS + lanes
        here = row < M
        start = (tile + zero) * ROWS * N
        inside = here[:, None] & (column < N)[None, :]
        g = _load(grad + start, offsets, inside)
        if DW:
            v = _load(s + start, offsets, inside)
            if CENTER:
                mu = tl.load(mean + 2 * row, mask=here, other=0.0)[:, None]
                v = v - mu - tl.load(mean + 2 * row + 1, mask=here, other=0.0)[:, None]
            total_w += g * v * tl.load(rstd + row, mask=here, other=0.0)[:, None]
        if DB:
            total_b += g
    if DW:
        tl.store(sums_w + program * N + column, tl.sum(total_w, 0), mask=column < N)
    if DB:
        tl.store(sums_b + program * N + column, tl.sum(total_b, 0), mask=column < N)


def tile(length: int, block: int, warp: int) -> dict[str, int]:
    """How many rows a program takes, in what power of two, with how many warps.

    Args:
        length: of a row.
        block: elements of a tile, if a row leaves room for more than one.
        warp: elements that a warp holds.
    """
    wide = triton.next_power_of_2(length)
    warps = max(4, min(16, wide // warp))
    return {"ROWS": max(1, block // wide), "BLOCK": wide, "num_warps": warps}


def rms_norm(given: Rows, out: Normed, *, form: Form) -> None:
    """Launch over rows ``[M, N]``."""
    x, residual, weight, bias = given
    mean = out.mean
    rows, length = x.shape
    how = dispatch.config("rms_norm" if mean is None else "layer_norm", x.device)
    kernel = norm_kernel if length <= LONGEST else wide_norm_kernel
    how = how | (tile(length, how["BLOCK"], 1024) if length <= LONGEST else {"ROWS": 1})
    kernel[(triton.cdiv(rows, how["ROWS"]),)](
        *(out.y if some is None else some for some in (*given, *out)),
        *(rows, length, form.eps, form.offset),
        CENTER=mean is not None,
        RESIDUAL=residual is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        **how,
    )


layer_norm = rms_norm  # whether there is a mean tells them apart


def rms_norm_backward(
    grad: Tensor, grad_s: Tensor | None, saved: Saved, out: NormGradients, *, form: Form
) -> None:
    """Launch over rows ``[M, N]``; each program leaves its share of the sums."""
    s, weight, _, mean, rstd = saved
    dx, dw, db = out
    rows, length = s.shape
    name = "rms_norm_backward" if mean is None else "layer_norm_backward"
    how = dict(dispatch.config(name, s.device))
    most = how.pop("PROGRAMS") * gpu(s.device).processors
    narrow = length <= LONGEST_BACKWARD
    tiles = tile(length, how["BLOCK"], 512) if narrow else SUMS
    columns = triton.cdiv(length, SUMS["BLOCK"])
    most = most if narrow else max(2, 2 * most // columns)
    programs = min(triton.cdiv(rows, tiles["ROWS"]), most)
    shares = [
        None if p is None else p.new_empty((programs, length), dtype=torch.float32)
        for p in (dw, db)
    ]
    flags = {"CENTER": mean is not None}
    sums = {"DW": dw is not None, "DB": db is not None}
    extras = {"RESIDUAL": grad_s is not None, "WEIGHT": weight is not None}
    *inputs, mean = (dx if p is None else p for p in (grad, grad_s, s, weight, mean))
    rooms = [dx if p is None else p for p in shares]
    if narrow:
        norm_backward_kernel[(programs,)](
            *(*inputs, mean, rstd, dx, *rooms, rows, length, form.offset),
            **(flags | extras | sums | tiles),
        )
    else:
        wide_norm_backward_kernel[(rows,)](
            *(*inputs, mean, rstd, dx, length, form.offset), **(flags | extras | how)
        )
        if any(sums.values()):
            wide_sums_kernel[(columns, programs)](
                *(grad, s, mean, rstd, *rooms, rows, length), **(flags | sums | SUMS)
            )
    for p, share in zip((dw, db), shares, strict=True):
        if p is not None and share is not None:
            p.copy_(share.sum(0))


layer_norm_backward = rms_norm_backward
