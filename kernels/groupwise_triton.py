"""Triton for :mod:`zfunc.kernels.groupwise` and :mod:`~zfunc.kernels.payloads`.

A program works on ``ROWS`` groups, a tile of :mod:`~zfunc.kernels.levels_triton`; ``GROUP`` is the
power of two that holds a group. Where groups lie end to end (``SIZE`` is their constant size)
addresses are those of one flat buffer and loads are wide; where rows end within a group (``SIZE``
is 0) each element's place is computed. Sums and products are rounded one by one (launched without
fused multiply-add, but for exact products), as in the twin. Only ``1 / scale`` may differ in its
last bit on a GPU, and so a level at a tie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.groupwise_torch import Quantizing
from zfunc.kernels.levels_triton import (
    bfloat16_pairs,
    dither,
    expanded,
    extremes,
    neighbours,
    places,
    summed,
)

__all__ = [
    "dequantize_groups",
    "dequantize_kernel",
    "fake_quant",
    "mean_payloads",
    "quantize_groups",
    "quantize_kernel",
]
ASSEMBLER = not dispatch.AMD and not dispatch.interpreting()
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: added, it leaves the nearest integer as low bits


@triton.jit
def quantize_kernel(
    x, error, q_in, scale_in, zero_in, senders, q_stride, scale_stride,
    q, scale, zero, new_error, fake, seed, K, width, size, groups, total,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, STOCHASTIC: tl.constexpr, MEAN: tl.constexpr,
    ERROR: tl.constexpr, FAKE: tl.constexpr, ODD: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, ASM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    start, at, inside, half, byte, real, lead, begun = places(
        K, width, size, groups, total, SIZE, ROWS, GROUP, CUTS
    )
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = group < total
    if MEAN and BITS == 4 and not ERROR:
        c = summed(
            q_in, scale_in, zero_in, senders, q_stride, scale_stride, K, total, half, byte, real,
            SYMMETRIC, SIZE, ROWS, GROUP, WORDS, ASM,
        )  # fmt: skip
    elif MEAN:
        c = tl.zeros((1 << CUTS, ROWS, GROUP >> CUTS), tl.float32)
        if ERROR:
            c = tl.load(error + start + at, mask=inside, other=0.0)
        for _ in range(senders):
            c += expanded(
                q_in, scale_in, zero_in, group, here, start, at, inside, half, byte, real,
                BITS, SYMMETRIC,
            )  # fmt: skip
            q_in += q_stride
            scale_in += scale_stride
            zero_in += scale_stride
    elif WORDS:
        c = bfloat16_pairs(x, start, byte, K, ROWS, GROUP)
    else:
        if SYMMETRIC:
            c = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        else:  # what is outside stands for the group's first, and changes neither extreme
            first = tl.load(x + start + lead, mask=begun, other=0.0)
            c = tl.load(x + start + at, mask=inside, other=first).to(tl.float32)
        if ERROR:
            c += tl.load(error + start + at, mask=inside, other=0.0)

    TOP: tl.constexpr = (1 << (BITS - 1)) - 1 if SYMMETRIC else (1 << BITS) - 1
    # Halves of a tile have another layout: values that leave in their own would be moved to it.
    FOLDS: tl.constexpr = 0 if FAKE else (2 if GROUP == 4 else 3)
    if SYMMETRIC:
        high = tl.abs(c) if WHOLE else tl.where(inside, tl.abs(c), 0.0)
        low, span = extremes(high, high, True, FOLDS, CUTS)
        y = c
    else:
        if WHOLE:
            low, span = extremes(c, c, False, FOLDS, CUTS)
        else:
            lows = tl.where(inside, c, float("inf"))
            highs = tl.where(inside, c, float("-inf"))
            low, span = extremes(lows, highs, False, FOLDS, CUTS)
        span = span - low
        y = c - low[None, :, None]
    # Above 2**-100, neither infinite nor NaN, in one comparison of bits.
    usable = span.to(tl.uint32, bitcast=True) - 0x0D800001 < 0x71FFFFFF
    s = span * (1.0 / TOP)
    # Just inside the range, so that no dither leads out of it and nothing need be clamped.
    REACH: tl.constexpr = TOP * (1 - 2**-20) if STOCHASTIC else TOP
    y = y * tl.where(usable, REACH / span, 0.0)[None, :, None]
    if STOCHASTIC:
        y = tl.fma(dither(seed, group, GROUP, CUTS), 2**-16, y)  # the product is exact
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
            room = q + half + byte
            if CUTS:  # where the elements are: not 16 bytes of a thread, but whole sectors
                room = tl.max_contiguous(room, [1, 1, 4])
            even, odd = neighbours(level)
            tl.store(room, (even + (odd << 4)).to(tl.uint8), mask=real)
    if FAKE or ERROR:
        back = (t - ORIGIN) * s[None, :, None]
        if not SYMMETRIC:
            back = back + low[None, :, None]
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
    start, at, inside, half, byte, real, _, _ = places(
        K, width, size, groups, total, SIZE, ROWS, GROUP, 0
    )
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    y = expanded(
        q, scale, zero, group, group < total, start, at, inside, half, byte, real, BITS, SYMMETRIC
    )
    tl.store(out + start + at, y.to(out.dtype.element_ty), mask=inside)


def quantize_groups(given: Quantizing, *, bits: int, size: int, seed: Tensor | None) -> None:
    """Launch over rows of values, or over the payloads of several senders."""
    x, shape, symmetric, scales, zeros, error, q, scale, zero, left, fake = given
    mean, some = scales is not None, x if q is None else q  # stands for pointers that are not read
    name = "mean_payloads" if mean else "quantize_groups" if fake is None else "fake_quant"
    # An error doubles what a thread holds, and masks for holes in a tile of means are more than
    # there is room for: half as many elements then.
    halved = size & (size - 1) if mean else error is not None
    how, where = _tile(name, shape, size, x.device, 2 if halved else 1)
    # Words of 32 bits: eight levels of a sender, or two elements of bfloat16.
    words = bits == 4 and error is None and fake is None and size % 32 == 0
    words = words and x.data_ptr() % 16 == 0
    # Whether what is outside a group does its extremes no harm: that of words is of the group, too.
    if scales is not None:
        shares = scales / x.shape[0]
        lows = shares if zeros is None else zeros / x.shape[0]
        senders = (x, shares, lows, x.shape[0], x.stride(0), shares.stride(0))
        whole, how["CUTS"] = words and where[0] % 32 == 0, 0
    else:
        words = words and x.dtype == torch.bfloat16 and where[0] % 8 == 0 and size == how["GROUP"]
        senders = (some, some, some, 0, 0, 0)
        whole, how["CUTS"] = symmetric or error is None, cuts(how, amd=dispatch.AMD)
    if seed is not None:
        seed = seed.to(x.device, non_blocking=True)
    quantize_kernel[(triton.cdiv(where[-1], how["ROWS"]),)](
        *(some if t is None else t for t in (None if mean else x, error)),
        *senders,
        *(some if t is None else t for t in (q, scale, zero, left, fake, seed)),
        *where,
        BITS=bits,
        SYMMETRIC=symmetric,
        STOCHASTIC=seed is not None,
        MEAN=mean,
        ERROR=error is not None,
        FAKE=fake is not None,
        ODD=where[0] % 2 == 1,
        WHOLE=whole,
        WORDS=words,
        ASM=ASSEMBLER,
        **how,
    )


# What is given tells them apart.
fake_quant = quantize_groups
mean_payloads = quantize_groups


def dequantize_groups(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """Launch over rows ``[R, K]``."""
    how, where = _tile("dequantize_groups", out.shape, size, out.device)
    dequantize_kernel[(triton.cdiv(where[-1], how["ROWS"]),)](
        *(q, scale, scale if zero is None else zero, out),
        *where,
        BITS=bits,
        SYMMETRIC=zero is None,
        **how,
    )


def cuts(how: dict[str, int], *, amd: bool) -> int:
    """How often a group of 256 or more is halved into runs.

    A run is 64 elements or more, which as bfloat16 are a line of 128 bytes; together the runs that
    lie side by side in a tile have 16 elements for each thread. Smaller groups are left whole, and
    so are those that leave holes in a tile, whose masks take the registers.
    """
    if how["GROUP"] < 256 or how["SIZE"] != how["GROUP"]:
        return 0
    threads = how["num_warps"] * (64 if amd else 32)
    run = max(64, 16 * threads // how["ROWS"])
    return max(0, (how["GROUP"] // run).bit_length() - 1)


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
