"""Triton for :mod:`zfunc.kernels.skinny`: a few rows times a matrix that is read once.

A program has ``BN`` rows of the weights and a share of their length; weights go to the tensor
cores as they come from memory, widened in registers. With several shares (``SPLIT``) partial sums
in float32 are added up, in a fixed order, by a second launch, which also does what follows the
product; with one share the first does it all.

Codes of 4 bits come in words of eight: nibbles ``j`` and ``j + 4`` are neighbours, so that a shift
and one logical operation make two 16-bit floats ``OFFSET + code`` that lie as the tensor cores
read them. The offset, and zero points, are taken off again with the sum of the inputs, which is
one more product, with ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish_kernel", "int8_product_kernel", "product_kernel"]


@triton.jit
def _pairs(
    words, shift, J: tl.constexpr, kind: tl.constexpr, ASM: tl.constexpr, ZERO: tl.constexpr
):
    """Nibbles ``J`` and ``J + 4`` of words ``[n, r]`` as floats ``[n, 2 r]``, with an offset.

    With ``ZERO`` the offset and a zero point are taken off: ``shift`` ``[n, r]`` has both
    negative, twice in a word.
    """
    BF16: tl.constexpr = kind == tl.bfloat16
    shifted = words >> (4 * J)
    if ASM and BF16 and ZERO:
        two = tl.inline_asm_elementwise(
            "{ .reg .b32 t, one; mov.b32 one, 0x3F803F80;"
            " lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, $2; }",
            "=r,r,r", [shifted, shift], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM and BF16:
        two = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;",
            "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM and ZERO:
        two = tl.inline_asm_elementwise(
            "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA;"
            " add.rn.f16x2 $0, t, $2; }",
            "=r,r,r", [shifted, shift], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif ASM:
        two = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;",
            "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        two = (shifted & 0x000F000F) | (0x43004300 if BF16 else 0x64006400)
    low = _half(two, kind)
    high = _half(two >> 16, kind)
    if ZERO and not ASM:
        away = _half(shift, kind)
        low, high = low + away, high + away
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _half(words, kind: tl.constexpr):
    """The lower 16 bits of words as floats."""
    return (words & 0xFFFF).to(tl.uint16).to(kind, bitcast=True)


@triton.jit
def _widened(codes, kind: tl.constexpr, ASM: tl.constexpr):
    """Int8 codes as 16-bit floats.

    A code has 8 bits at most, so the lower half of its float32 is zero: without an instruction
    that rounds to bfloat16 (gfx942 takes five) that half is cut off.
    """
    CUT: tl.constexpr = kind == tl.bfloat16 and not ASM
    if CUT:
        bits = codes.to(tl.float32).to(tl.int32, bitcast=True)
        wide = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        wide = codes.to(kind)
    return wide


@triton.jit
def _constant(value, BN: tl.constexpr, WIDTH: tl.constexpr, kind: tl.constexpr):
    """A matrix of one number, joined of two as those of codes are made of shorter elements: the
    compiler then lays out the inputs for both products alike, and loads them ahead, once."""
    half = tl.full((BN, WIDTH // 2), value, tl.float32).to(kind)
    return tl.reshape(tl.join(half, half), (BN, WIDTH))


@triton.jit
def _inputs(x, norm, rm, at, M, K, NORM: tl.constexpr, EVEN: tl.constexpr, TURN: tl.constexpr):
    """Inputs ``[BM, width]``, weighted for the norm, and what they were before that; or turned."""
    rows = rm[None, :] if TURN else rm[:, None]
    columns = at[:, None] if TURN else at[None, :]
    inside = rows < M
    if not EVEN:
        inside = inside & (columns < K)
    plain = tl.load(x + rows * K + columns, mask=inside, other=0.0)
    xs = plain
    if NORM:
        if EVEN:
            weight = tl.load(norm + at)
        else:
            weight = tl.load(norm + at, mask=at < K, other=0.0)
        weight = weight.to(plain.dtype)
        xs = plain * (weight[:, None] if TURN else weight[None, :])
    return xs, plain


@triton.jit
def _times(xs, ws, acc, TURN: tl.constexpr):
    """``acc`` and inputs times weights: ``[BM, BN]``, or turned ``[BN, BM]``."""
    return tl.dot(ws, xs, acc) if TURN else tl.dot(xs, ws.T, acc)


@triton.jit
def _each(column, TURN: tl.constexpr):
    """A number for each row of the weights, for what :func:`_times` gives."""
    return column[:, None] if TURN else column[None, :]


@triton.jit
def _finished(
    acc, bias, row, residual, y, place, inside, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):
    """What follows a product whose sum is whole."""
    if BIAS:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    x, w, scale, zero, norm, eps, bias, residual, y, parts, squares,
    M, N, K, width, stride, scale_n, scale_g, blocks, share,
    BITS: tl.constexpr, G: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr, EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``x W^T``; ``width`` is the length of a row of ``w`` in its own elements, ``stride`` that of
    a row of ``parts``, where others' columns may follow."""
    kind: tl.constexpr = x.dtype.element_ty
    TAKEN: tl.constexpr = (0xC308C308 if kind == tl.bfloat16 else 0xE408E408) - (1 << 32)
    OFFSET: tl.constexpr = 136.0 if kind == tl.bfloat16 else 1032.0
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(rn, N - 1)  # beyond the end the last row is read again, and nothing written
    rm = tl.arange(0, BM)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    W: tl.constexpr = BK // 8 if BITS == 4 else BK
    base = w + row.to(tl.int64)[:, None] * width + tl.arange(0, W)[None, :]
    TURN: tl.constexpr = BITS == 4
    acc = tl.zeros((BN, BM) if TURN else (BM, BN), tl.float32)
    GROUPS: tl.constexpr = G > 0
    PIECE: tl.constexpr = BK // 4 if BITS == 4 else BK  # inputs of one dot
    square = tl.zeros((PIECE, BM) if TURN else (BM, PIECE), tl.float32)
    sums = tl.zeros_like(acc)
    ones = _constant(1.0, BN, PIECE, kind)
    away = _constant(-OFFSET, BN, PIECE, kind)
    RUN: tl.constexpr = (G if G < BK else BK) if GROUPS else BK  # inputs that share a scale
    # A group of one piece begins with the offset taken off: the same for all rows of weights.
    SHORT: tl.constexpr = BITS == 4 and GROUPS and RUN == PIECE and not ZERO
    SUMS: tl.constexpr = (ZERO or BITS == 4) and not SHORT and not EXACT
    shift = tl.zeros((BN,), tl.float32)
    if BITS == 4:
        shift += OFFSET
    if ZERO and not GROUPS:
        shift += tl.load(zero + row * scale_n).to(tl.float32)

    for block in range(first, last):
        k = block * BK
        if EVEN or BITS == 4:
            ws = tl.load(base + block * W, eviction_policy="evict_first")
        else:
            ws = tl.load(base + block * W, mask=(k + tl.arange(0, W) < K)[None, :], other=0)
        for j in tl.static_range(BK // PIECE):
            at = k + j * PIECE + tl.arange(0, PIECE)
            xs, plain = _inputs(x, norm, rm, at, M, K, NORM, EVEN, TURN)
            if NORM:
                square += plain.to(tl.float32) * plain.to(tl.float32)
            if GROUPS and (j * PIECE) % RUN == 0:
                if G < BK:
                    group = block * (BK // G) + j * PIECE // G
                else:
                    group = k // G
                if not EVEN:
                    group = tl.minimum(group, (K - 1) // G)  # words go on beyond the end
                where = row * scale_n + group * scale_g
                dots = tl.zeros_like(acc)
                ins = tl.zeros_like(acc)
            if EXACT:
                # Twice the bits of -OFFSET, whose last place counts ones, and the zero point.
                both = tl.load(zero + where).to(tl.int32) * 0x10001 + TAKEN
                piece = _pairs(ws, tl.broadcast_to(both[:, None], (BN, W)), j, kind, ASM, True)
            elif BITS == 4:
                piece = _pairs(ws, ws, j, kind, ASM, False)
            else:
                piece = _widened(ws, kind, ASM) if BITS == 8 else ws
            if GROUPS:
                if SHORT:
                    dots = _times(xs, away, dots, TURN)
                dots = _times(xs, piece, dots, TURN)
                if SUMS:
                    ins = _times(xs, ones, ins, TURN)
                if ((j + 1) * PIECE) % RUN == 0:
                    if ZERO and SUMS:
                        shift = tl.load(zero + where).to(tl.float32)
                        if BITS == 4:
                            shift += OFFSET
                    if SUMS:
                        dots = dots - ins * _each(shift, TURN)
                    acc += dots * _each(tl.load(scale + where).to(tl.float32), TURN)
            else:
                acc = _times(xs, piece, acc, TURN)
                if SUMS:
                    sums = _times(xs, ones, sums, TURN)

    if not GROUPS:
        if SUMS:
            acc = acc - sums * _each(shift, TURN)
        if BITS < 16:
            acc = acc * _each(tl.load(scale + row * scale_n).to(tl.float32), TURN)
    if TURN:
        acc = acc.T
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    wide = rm[:, None].to(tl.int64)
    if SPLIT:
        part = tl.program_id(1).to(tl.int64)
        tl.store(parts + (part * M + wide) * stride + rn[None, :], acc, mask=inside)
        if NORM:
            mine = (rm < M) & (tl.program_id(0) == 0)
            tl.store(squares + part * M + rm, tl.sum(square, 0 if TURN else 1), mask=mine)
    else:
        if NORM:
            acc = acc * tl.rsqrt(tl.sum(square, 0 if TURN else 1) / K + eps)[:, None]
        place = wide * N + rn[None, :]
        _finished(acc, bias, row, residual, y, place, inside, BIAS, RESIDUAL)


@triton.jit
def int8_product_kernel(
    x, x_scale, w, scale, zero, bias, residual, y, parts,
    M, N, K, scale_n, scale_g, blocks, share,
    G: tl.constexpr, ZERO: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The same for inputs of 8 bits, a scale for each row: sums in int32, exact within a group."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(rn, N - 1)
    rm = tl.arange(0, BM)
    rk = tl.arange(0, BK)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    base = w + row.to(tl.int64)[:, None] * K + rk[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BM, BN), tl.int32)
    sums = tl.zeros((BM, BN), tl.int32)
    ones = tl.full((BK, BN), 1, tl.int8)
    for block in range(first, last):
        k = block * BK
        if EVEN:
            ws = tl.load(base + k, eviction_policy="evict_first")
            xs = tl.load(x + rm[:, None] * K + (k + rk)[None, :], mask=(rm < M)[:, None], other=0)
        else:
            real = (k + rk < K)[None, :]
            ws = tl.load(base + k, mask=real, other=0)
            xs = tl.load(
                x + rm[:, None] * K + (k + rk)[None, :], mask=(rm < M)[:, None] & real, other=0
            )
        if G > 0:
            where = row * scale_n + (k // G) * scale_g
            dots = tl.dot(xs, ws.T, out_dtype=tl.int32)
            if ZERO:
                ins = tl.dot(xs, ones, out_dtype=tl.int32)
                dots = dots - ins * tl.load(zero + where).to(tl.int32)[None, :]
            acc += dots.to(tl.float32) * tl.load(scale + where).to(tl.float32)[None, :]
        else:
            total += tl.dot(xs, ws.T, out_dtype=tl.int32)
            if ZERO:
                sums += tl.dot(xs, ones, out_dtype=tl.int32)
    if G == 0:
        if ZERO:
            total = total - sums * tl.load(zero + row * scale_n).to(tl.int32)[None, :]
        acc = total.to(tl.float32) * tl.load(scale + row * scale_n).to(tl.float32)[None, :]
    acc = acc * tl.load(x_scale + rm, mask=rm < M, other=0.0)[:, None]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    place = rm[:, None].to(tl.int64) * N + rn[None, :]
    if SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * M * N + place, acc, mask=inside)
    else:
        _finished(acc, bias, row, residual, y, place, inside, BIAS, RESIDUAL)


@triton.jit
def _scale_of_norm(squares, splits, M, m, K, eps):
    """What the norm divides row ``m`` by, from the squares of all shares."""
    total = 0.0
    for part in range(splits):
        total += tl.load(squares + part * M + m)
    return tl.rsqrt(total / K + eps)


@triton.jit
def _summed(parts, at, inside, splits, stride):
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in range(1, splits):
        total += tl.load(parts + part * stride + at, mask=inside, other=0.0)
    return total


@triton.jit
def finish_kernel(
    parts, squares, bias, residual, y, M, N, K, eps, splits,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums partial products of one row, and does what follows."""
    m = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = _summed(parts, m * N + n, n < N, splits, tl.cast(M, tl.int64) * N)
    if NORM:
        acc = acc * _scale_of_norm(squares, splits, M, m, K, eps)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + m * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + m * N + n, acc.to(y.dtype.element_ty), mask=n < N)
