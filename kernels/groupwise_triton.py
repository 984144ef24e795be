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

    Also the same of the byte of each two neighbours, and of the first element of each group.
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
        begun = r * SIZE < tl.minimum(K - start, ROWS * SIZE).to(tl.int32)
        return start, at, inside, half, byte, real, r * SIZE, begun
    else:
        row = (first + r) // groups
        column = (first + r - row * groups) * size
        there = first + r < total
        inside = (j < size) & (column + j < K) & there
        real = (2 * p < size) & (column + 2 * p < K) & there
        byte = row * width + column // 2 + p
        zero = first * 0
        return zero, row * K + column + j, inside, zero, byte, real, row * K + column, there


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
    """Numbers of 16 bits, ``[ROWS, GROUP]``: of the seed, the group and the place in it.

    Each group begins at a hash of its number. Four neighbours share one round of mixing: two have
    the halves of its word, two those of the word turned by a byte, so that each has 16 bits of
    its own and the high byte of one is the low byte of another.
    """
    word = tl.load(seed)
    key = (group + (group >> 32) * GOLDEN + word).to(tl.uint32)
    key = (key ^ (key >> 16)) * FIRST
    key = key ^ (word >> 32).to(tl.uint32)
    key = (key ^ (key >> 15)) * SECOND
    key = key ^ (key >> 16)
    # Written for each element; four in one thread share what is the same for them.
    j = tl.arange(0, GROUP).to(tl.uint32)[None, :]
    h = key[:, None] + (j >> 2) * GOLDEN
    h = (h ^ (h >> 15)) * SECOND
    h += h >> 16  # one instruction; of an xor the compiler would shift both terms for each turn
    turn = ((j & 1) << 4) | ((j & 2) << 2)
    h = (h >> turn) | ((h << 1) << (31 - turn))
    return h.to(tl.int16).to(tl.float32)


@triton.jit
def _neighbours(x):
    """Each two neighbours apart."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _ordered(x):
    """Floats as integers that order like them, and back; NaN is at an end, as its sign says."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _extremes(low, high, SYMMETRIC: tl.constexpr, FOLDS: tl.constexpr):
    """The least and the greatest of each row, NaN if one is; the greatest alone if symmetric.

    ``2**FOLDS`` neighbours as floats, in one thread; what remains as integers, for which threads
    of a warp have an instruction.
    """
    for _ in tl.static_range(FOLDS):
        a, b = _neighbours(high)
        high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
        if not SYMMETRIC:
            a, b = _neighbours(low)
            low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    most = high.to(tl.int32, bitcast=True)
    if SYMMETRIC:  # absolute values order like integers as they are
        most = tl.max(most, 1).to(tl.float32, bitcast=True)
        return most, most
    else:
        most = _ordered(tl.max(_ordered(most), 1)).to(tl.float32, bitcast=True)
        least = _ordered(tl.min(_ordered(low.to(tl.int32, bitcast=True)), 1))
        return least.to(tl.float32, bitcast=True), most


@triton.jit
def quantize_kernel(
    x, error, q_in, scale_in, zero_in, senders, q_stride, scale_stride,
    q, scale, zero, new_error, fake, seed, K, width, size, groups, total,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MEAN: tl.constexpr,
    ERROR: tl.constexpr, FAKE: tl.constexpr, ODD: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    start, at, inside, half, byte, real, lead, begun = _places(
        K, width, size, groups, total, SIZE, ROWS, GROUP
    )
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
        if SYMMETRIC:
            c = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        else:  # what is outside stands for the group's first, and changes neither extreme
            first = tl.load(x + start + lead, mask=begun, other=0.0)
            c = tl.load(x + start + at, mask=inside, other=first).to(tl.float32)
        if ERROR:
            c += tl.load(error + start + at, mask=inside, other=0.0)

    TOP: tl.constexpr = (1 << (BITS - 1)) - 1 if SYMMETRIC else (1 << BITS) - 1
    WHOLE: tl.constexpr = not MEAN and (SYMMETRIC or not ERROR)  # what is outside does no harm
    # Halves of a tile have another layout: values that leave in their own would be moved to it.
    FOLDS: tl.constexpr = 0 if FAKE else (2 if GROUP == 4 else 3)
    if SYMMETRIC:
        high = tl.abs(c) if WHOLE else tl.where(inside, tl.abs(c), 0.0)
        low, span = _extremes(high, high, True, FOLDS)
        y = c
    else:
        if WHOLE:
            low, span = _extremes(c, c, False, FOLDS)
        else:
            lows = tl.where(inside, c, float("inf"))
            low, span = _extremes(lows, tl.where(inside, c, float("-inf")), False, FOLDS)
        span = span - low
        y = c - low[:, None]
    # Neither 0 nor infinite nor NaN, in one comparison.
    usable = span.to(tl.uint32, bitcast=True) - 1 < 0x7F7FFFFF
    s = span * (1.0 / TOP)
    # Just inside the range, so that no dither leads out of it and nothing need be clamped.
    REACH: tl.constexpr = TOP * (1 - 2**-20) if STOCHASTIC else TOP
    y = y * tl.where(usable, REACH / span, 0.0)[:, None]
    if STOCHASTIC:
        y = tl.fma(_dither(seed, group, GROUP), 2**-16, y)  # the product is exact
    # Symmetric pairs are stored plus 8: so are the low bits.
    ORIGIN: tl.constexpr = NEAREST + 8.0 if SYMMETRIC and BITS == 4 and not FAKE else NEAREST
    t = y + ORIGIN

    if not FAKE:
        tl.store(scale + group, s, mask=here)
        if not SYMMETRIC:
            tl.store(zero + group, low, mask=here)
        level = t.to(tl.int32, bitcast=True)
        if BITS == 8:
            level = level.to(tl.int8) if SYMMETRIC else level.to(tl.uint8)
            tl.store(q + start + at, level, mask=inside)
        else:
            if ODD:  # a row ends with half a byte
                level = tl.where(inside, level & 15, 0)
            if not MEAN and GROUP >= 8:  # where the elements are: a warp fills a line of 128 bytes
                room = tl.max_contiguous(q + half + byte, [1, 4])
            else:
                room = q + half + byte
            even, odd = _neighbours(level)
            tl.store(room, (even + (odd << 4)).to(tl.uint8), mask=real)
    if FAKE or ERROR:
        back = (t - ORIGIN) * s[:, None]
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
    start, at, inside, half, byte, real, _, _ = _places(
        K, width, size, groups, total, SIZE, ROWS, GROUP
    )
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
    # An error doubles what a thread holds: half as many elements then.
    parts = 2 if x is not None and error is not None else 1
    how, places = _tile(name, shape, size, q.device, parts)
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
        ODD=places[0] % 2 == 1,
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
    name: str, shape: tuple[int, ...], size: int, device: torch.device, parts: int = 1
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Groups that make a block of about the configured size over ``parts``, and where they lie."""
    how = dict(dispatch.config(name, device))
    block, group = how.pop("BLOCK") // parts, max(4, triton.next_power_of_2(size))
    how["num_warps"] = min(16, max(how["num_warps"], group // 1024))
    how |= {"ROWS": max(1, block // group), "GROUP": group, "SIZE": 0}
    rows, length = shape
    if rows == 1 or length % size == 0:  # end to end: one row
        rows, length, how["SIZE"] = 1, rows * length, size
    groups = -(-length // size)
    return how, (length, -(-length // 2), size, groups, rows * groups)
