"""What the programs of :mod:`zfunc.kernels.groupwise_triton` do with a tile of groups.

A tile is ``[RUNS, ROWS, RUN]``: ``ROWS`` groups, each cut into ``RUNS = 2**CUTS`` runs of
neighbours. A thread has some elements of each run, so what there is to do for a group (its
extremes, its scale, the start of its dither) is shared by several times as many elements, while
the threads side by side still load whole lines of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bfloat16_pairs", "dither", "expanded", "extremes", "neighbours", "places", "summed"]

FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B)
GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def places(
    K, width, size, groups, total, SIZE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    CUTS: tl.constexpr,
):  # fmt: skip
    """Where the tile begins, each element's offset from there, and whether it exists.

    Also the same of the byte of each two neighbours, and of the first element of each group.
    ``width`` is the bytes in a row of pairs: an argument, so that its divisibility is known.
    """
    RUN: tl.constexpr = GROUP >> CUTS
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)[None, :, None]
    run = tl.arange(0, 1 << CUTS)[:, None, None]
    j = run * RUN + tl.arange(0, RUN)[None, None, :]
    p = run * (RUN // 2) + tl.arange(0, RUN // 2)[None, None, :]
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
def bfloat16_pairs(x, start, byte, K, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The tile of bfloat16, as floats: in words of two, of which each is a shift or a mask away.

    ``K`` is a multiple of 8. Eight neighbours beyond the end are the last eight before it, so
    that neither extreme of a group changes and nothing need be masked.
    """
    last = tl.minimum(K - start, ROWS * GROUP).to(tl.int32) // 8 - 1
    at = tl.minimum(byte // 4, last) * 4 + byte % 4
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, 4]), [1, 1, 4])
    two = tl.load((x + start).to(tl.pointer_type(tl.int32), bitcast=True) + at)
    return tl.interleave(two << 16, two & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def expanded(
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
    y = y * tl.load(scale + group, mask=here, other=0.0)[None, :, None]
    if not SYMMETRIC:
        y = y + tl.load(zero + group, mask=here, other=0.0)[None, :, None]
    return y


@triton.jit
def summed(
    q, scale, zero, senders, q_stride, scale_stride, K, total, half, byte, real,
    SYMMETRIC: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sum over senders of what their levels of 4 bits stand for: one FMA for each.

    A level is 128 more here, which as a float is one instruction away; what is too much is taken
    off in the end. Scales are rounded to 16 bits: with the 8 of a level the product is exact, and
    the sum the same with and without an FMA. ``WORDS``: eight levels are read at once.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    # What is beyond the end is read from before it, so that nothing need be masked.
    r = tl.minimum(tl.arange(0, ROWS), total - 1 - first)[None, :, None]
    if WORDS:  # by four, to which the levels of a payload are padded
        last = ((K - first * SIZE + 31) // 32 - 1).to(tl.int32)
        word = tl.arange(0, GROUP // 8)[None, None, :]
        four = tl.minimum(word // 4, SIZE // 32 - 1) + tl.arange(0, ROWS)[None, :, None] * (
            SIZE // 32
        )
        word = tl.minimum(four, last) * 4 + word % 4
        word = tl.max_contiguous(tl.multiple_of(word, [1, 1, 4]), [1, 1, 4])
        words = (q + half).to(tl.pointer_type(tl.int32), bitcast=True) + word
    c = tl.zeros((1, ROWS, GROUP), tl.float32)
    low = tl.zeros((1, ROWS, 1), tl.float32)
    scale += first + r
    zero += first + r
    q += half
    for _ in range(senders):
        if WORDS:
            level = _nibbles(tl.load(words), ASM)
            words += q_stride // 4
        else:
            pairs = tl.load(q + byte, mask=real, other=0).to(tl.int32)
            level = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32) + 128.0
            q += q_stride
        s = tl.load(scale)
        short = ((s.to(tl.int32, bitcast=True) + 0x80) & -0x100).to(tl.float32, bitcast=True)
        s = tl.where(s == s, short, s)
        c = tl.fma(level, s, c)
        if SYMMETRIC:
            low = tl.fma(s, -136.0, low)
        else:
            low += tl.fma(s, -128.0, tl.load(zero))
            zero += scale_stride
        scale += scale_stride
    return c + low


@triton.jit
def _nibbles(words, ASM: tl.constexpr):
    """Eight levels of 4 bits of each word, plus 128, as floats."""
    even = words & 0x0F0F0F0F
    odd = (words >> 4) & 0x0F0F0F0F
    a = tl.join(tl.join(_byte(even, 0, ASM), _byte(even, 2, ASM)),
                tl.join(_byte(even, 1, ASM), _byte(even, 3, ASM)))  # fmt: skip
    b = tl.join(tl.join(_byte(odd, 0, ASM), _byte(odd, 2, ASM)),
                tl.join(_byte(odd, 1, ASM), _byte(odd, 3, ASM)))  # fmt: skip
    return tl.reshape(tl.join(a, b), (1, words.shape[1], words.shape[2] * 8))


@triton.jit
def _byte(words, I: tl.constexpr, ASM: tl.constexpr):
    """A byte below 16 as the float that has it after the point of 2**7."""
    if ASM:  # of shifts and masks the compiler makes two instructions
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x43000000, $2;",
            "=r,r,n", [words, 0x7044 + 0x100 * I], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = (((words >> (8 * I)) & 0xFF) << 16) | 0x43000000
    return found.to(tl.float32, bitcast=True)


@triton.jit
def dither(seed, group, GROUP: tl.constexpr, CUTS: tl.constexpr):
    """Numbers of 16 bits for the tile: of the seed, the group and the place in it.

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
    RUN: tl.constexpr = GROUP >> CUTS
    run = tl.arange(0, 1 << CUTS)[:, None, None]
    j = (run * RUN + tl.arange(0, RUN)[None, None, :]).to(tl.uint32)
    h = key[None, :, None] + (j >> 2) * GOLDEN
    h = (h ^ (h >> 15)) * SECOND
    h += h >> 16  # one instruction; of an xor the compiler would shift both terms for each turn
    turn = ((j & 1) << 4) | ((j & 2) << 2)
    h = (h >> turn) | ((h << 1) << (31 - turn))
    return h.to(tl.int16).to(tl.float32)


@triton.jit
def neighbours(x):
    """Each two neighbours in the last dimension apart."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def _halved(low, high, SYMMETRIC: tl.constexpr):
    """The lesser and the greater of each two neighbours, NaN if one is."""
    a, b = neighbours(high)
    high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if SYMMETRIC:
        return high, high
    else:
        a, b = neighbours(low)
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), high


@triton.jit
def _ordered(x):
    """Floats as integers that order like them, and back; NaN is at an end, as its sign says."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def extremes(low, high, SYMMETRIC: tl.constexpr, FOLDS: tl.constexpr, CUTS: tl.constexpr):
    """The least and the greatest of each group, NaN if one is; the greatest alone if symmetric.

    With ``FOLDS``, runs and ``2**FOLDS`` neighbours as floats, in one thread; what remains as
    integers, for which threads of a warp have an instruction.
    """
    if FOLDS:
        low, high = tl.permute(low, (1, 2, 0)), tl.permute(high, (1, 2, 0))
        for _ in tl.static_range(CUTS):
            low, high = _halved(low, high, SYMMETRIC)
        low, high = tl.permute(low, (2, 0, 1)), tl.permute(high, (2, 0, 1))
        for _ in tl.static_range(FOLDS):
            low, high = _halved(low, high, SYMMETRIC)
    most = high.to(tl.int32, bitcast=True)
    if SYMMETRIC:  # absolute values order like integers as they are
        most = tl.max(tl.max(most, 0), 1).to(tl.float32, bitcast=True)
        return most, most
    else:
        most = _ordered(tl.max(tl.max(_ordered(most), 0), 1)).to(tl.float32, bitcast=True)
        least = _ordered(tl.min(tl.min(_ordered(low.to(tl.int32, bitcast=True)), 0), 1))
        return least.to(tl.float32, bitcast=True), most
