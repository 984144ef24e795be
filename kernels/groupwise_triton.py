"""Triton for :mod:`zfunc.kernels.groupwise` and :mod:`~zfunc.kernels.payloads`.

A program works on ``ROWS`` groups, a tile ``[ROWS, GROUP]``; ``GROUP`` is the power of two that
holds a group. Where groups lie end to end (``SIZE`` is their constant size) addresses are those
of one flat buffer and loads are wide; where rows end within a group (``SIZE`` is 0) each
element's place is computed. Sums and products are rounded one by one (launched without fused
multiply-add), as in the twin. Only ``1 / scale`` may differ in its last bit on a GPU, and so a
level at a tie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch

__all__ = ["dequantize", "dequantize_kernel", "fake_quant", "mean", "quantize", "quantize_kernel"]

NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: added, it leaves the nearest integer as low bits
FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B)
GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def _places(
    K, width, size, groups, total, SIZE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr
):
    """Where the tile begins, each element's offset from there, and whether it exists.

    Also the same of the byte of each two neighbours.
    ``width`` is the bytes in a row of pairs: an argument, so that its divisibility is known.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, GROUP)[None, :]
    p = tl.arange(0, GROUP // 2)[None, :]
    if SIZE:
        start = first * SIZE
        half = first * (SIZE // 2)
        at = r * SIZE + j
        byte = r * (SIZE // 2) + p
        inside = at < tl.minimum(K - start, ROWS * SIZE).to(tl.int32)
        real = byte < tl.minimum(width - half, ROWS * (SIZE // 2)).to(tl.int32)
        if SIZE < GROUP:
            inside = inside & (j < SIZE)
            real = real & (p < SIZE // 2)
        return start, at, inside, half, byte, real
    else:
        row = (first + r) // groups
        column = (first + r - row * groups) * size
        there = first + r < total
        inside = (j < size) & (column + j < K) & there
        real = (2 * p < size) & (column + 2 * p < K) & there
        byte = row * width + column // 2 + p
        zero = first * 0
        return zero, row * K + column + j, inside, zero, byte, real


@triton.jit
def _expanded(
    q, scale, zero, group, here, start, at, inside, half, byte, real,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """The values that levels stand for."""
    if BITS == 8:
        y = tl.load(q + start + at, mask=inside, other=0).to(tl.float32)
    else:
        pairs = tl.load(q + half + byte, mask=real, other=0).to(tl.int32)
        y = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
        if SYMMETRIC:
            y = y - 8.0
    y = y * tl.load(scale + group, mask=here, other=0.0)[:, None]
    if not SYMMETRIC:
        y = y + tl.load(zero + group, mask=here, other=0.0)[:, None]
    return y


@triton.jit
def _dither(seed, group, GROUP: tl.constexpr):
    """Odd numbers of 16 bits, ``[ROWS, GROUP]``: of the seed, the group and the place in it.

    Each group begins at a hash of its number, and two neighbours share one round of mixing.
    """
    word = tl.load(seed)
    key = (group + (group >> 32) * GOLDEN + word).to(tl.uint32)
    key = (key ^ (key >> 16)) * FIRST
    key = key ^ (word >> 32).to(tl.uint32)
    key = (key ^ (key >> 15)) * SECOND
    key = key ^ (key >> 16)
    h = key[:, None] + (tl.arange(0, GROUP // 2).to(tl.uint32) * GOLDEN)[None, :]
    h = (h ^ (h >> 15)) * SECOND
    h = (h ^ (h >> 16)) | 0x00010001  # odd: as often above zero as below, and never a half
    return tl.interleave(h.to(tl.int16), (h >> 16).to(tl.int16)).to(tl.float32)


@triton.jit
def quantize_kernel(
    x, error, q_in, scale_in, zero_in, senders, q_stride, scale_stride,
    q, scale, zero, new_error, fake, seed, K, width, size, groups, total,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MEAN: tl.constexpr,
    ERROR: tl.constexpr, FAKE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    start, at, inside, half, byte, real = _places(K, width, size, groups, total, SIZE, ROWS, GROUP)
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = group < total
    if MEAN:
        c = tl.zeros((ROWS, GROUP), tl.float32)
        if ERROR:
            c = tl.load(error + start + at, mask=inside, other=0.0)
        for w in range(senders):
            c += _expanded(
                q_in + w * q_stride, scale_in + w * scale_stride, zero_in + w * scale_stride,
                group, here, start, at, inside, half, byte, real, BITS, SYMMETRIC,
            )  # fmt: skip
    else:
        c = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if ERROR:
            c += tl.load(error + start + at, mask=inside, other=0.0)

    TOP: tl.constexpr = (1 << (BITS - 1)) - 1 if SYMMETRIC else (1 << BITS) - 1
    # As integers, absolute values order like floats, infinity last and NaN behind it.
    most = tl.max(tl.where(inside, c.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)
    if SYMMETRIC:
        span = most.to(tl.float32, bitcast=True)
        y = c
    else:
        low = tl.min(tl.where(inside, c, float("inf")), 1)
        span = tl.max(tl.where(inside, c, float("-inf")), 1) - low
        span = tl.where(most > 0x7F800000, float("nan"), span)
        low = tl.where(most > 0x7F800000, float("nan"), low)
        y = c - low[:, None]
    usable = (span > 0) & (span < float("inf"))
    s = span * (1.0 / TOP)
    # Just inside the range, so that no dither leads out of it and nothing need be clamped.
    REACH: tl.constexpr = TOP * (1 - 2**-20) if STOCHASTIC else TOP
    y = tl.where(usable[:, None], y * tl.where(usable, REACH / span, 0.0)[:, None], 0.0)
    if STOCHASTIC:
        y = tl.fma(_dither(seed, group, GROUP), 2**-16, y)  # the product is exact
    t = y + NEAREST

    if not FAKE:
        tl.store(scale + group, s, mask=here)
        if not SYMMETRIC:
            tl.store(zero + group, low, mask=here)
        level = t.to(tl.int32, bitcast=True)
        if BITS == 8:
            level = level.to(tl.int8) if SYMMETRIC else level.to(tl.uint8)
            tl.store(q + start + at, level, mask=inside)
        else:
            level = tl.where(inside, level + 8 if SYMMETRIC else level, 0) & 15
            two = tl.reshape(level, (ROWS, GROUP // 2, 2)) << (4 * tl.arange(0, 2)[None, None, :])
            tl.store(q + half + byte, tl.sum(two, 2).to(tl.uint8), mask=real)
    if FAKE or ERROR:
        back = (t - NEAREST) * s[:, None]
        if not SYMMETRIC:
            back = back + low[:, None]
        if FAKE:
            tl.store(fake + start + at, back.to(fake.dtype.element_ty), mask=inside)
        if ERROR:
            tl.store(new_error + start + at, c - back, mask=inside)


@triton.jit
def dequantize_kernel(
    q, scale, zero, out, K, width, size, groups, total,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    start, at, inside, half, byte, real = _places(K, width, size, groups, total, SIZE, ROWS, GROUP)
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    y = _expanded(
        q, scale, zero, group, group < total, start, at, inside, half, byte, real, BITS, SYMMETRIC
    )
    tl.store(out + start + at, y.to(out.dtype.element_ty), mask=inside)


def quantize(
    x: Tensor,
    error: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    new_error: Tensor | None,
    *,
    bits: int,
    size: int,
    seed: Tensor | None,
) -> None:
    """Launch over rows ``[R, K]``."""
    _launch("quantize_groups", x.shape, q, scale, zero, error, new_error, bits, size, seed, x=x)


def fake_quant(
    x: Tensor, out: Tensor, *, bits: int, size: int, symmetric: bool, seed: Tensor | None
) -> None:
    """Launch over rows ``[R, K]``; nothing but the values is written."""
    zero = None if symmetric else x
    _launch("fake_quant", x.shape, x, x, zero, None, None, bits, size, seed, x=x, fake=out)


def mean(
    received: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    error: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    new_error: Tensor | None,
    *,
    n: int,
    bits: int,
    size: int,
    seed: Tensor | None,
) -> None:
    """Launch over the payloads of several senders."""
    shares = scales / received.shape[0]
    lows = shares if zeros is None else zeros / received.shape[0]
    source = (received, shares, lows, received.shape[0], received.stride(0), shares.stride(0))
    _launch(
        "mean_payloads", (1, n), q, scale, zero, error, new_error, bits, size, seed, source=source
    )


def _launch(
    name: str,
    shape: tuple[int, ...],
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    error: Tensor | None,
    new_error: Tensor | None,
    bits: int,
    size: int,
    seed: Tensor | None,
    *,
    x: Tensor | None = None,
    fake: Tensor | None = None,
    source: tuple[Tensor, Tensor, Tensor, int, int, int] | None = None,
) -> None:
    how, places = _tile(name, shape, size, q.device)
    some = q  # stands for the pointers that this variant does not read
    if seed is not None:
        seed = seed.to(q.device, non_blocking=True)
    quantize_kernel[(triton.cdiv(places[-1], how["ROWS"]),)](
        some if x is None else x,
        some if error is None else error,
        *(source or (some, some, some, 0, 0, 0)),
        *(q, scale, some if zero is None else zero),
        some if new_error is None else new_error,
        some if fake is None else fake,
        some if seed is None else seed,
        *places,
        BITS=bits,
        SYMMETRIC=zero is None,
        STOCHASTIC=seed is not None,
        MEAN=source is not None,
        ERROR=error is not None,
        FAKE=fake is not None,
        **how,
    )


def dequantize(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """Launch over rows ``[R, K]``."""
    how, places = _tile("dequantize_groups", out.shape, size, out.device)
    dequantize_kernel[(triton.cdiv(places[-1], how["ROWS"]),)](
        *(q, scale, scale if zero is None else zero, out),
        *places,
        BITS=bits,
        SYMMETRIC=zero is None,
        **how,
    )


def _tile(
    name: str, shape: tuple[int, ...], size: int, device: torch.device
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Groups that make a block of about the configured size, and where they lie."""
    how = dict(dispatch.config(name, device))
    block, group = how.pop("BLOCK"), triton.next_power_of_2(size)
    how["num_warps"] = min(16, max(how["num_warps"], group // 1024))
    how |= {"ROWS": max(1, block // group), "GROUP": group, "SIZE": 0}
    rows, length = shape
    if rows == 1 or length % size == 0:  # end to end: one row
        rows, length, how["SIZE"] = 1, rows * length, size
    groups = -(-length // size)
    return how, (length, -(-length // 2), size, groups, rows * groups)
