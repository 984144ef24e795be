"""Triton for :mod:`zfunc.kernels.rotation`: one launch for queries and keys.

A program turns ``HEADS`` heads of one position of one sequence, of the queries or of the keys: the
tables of the position are read once for them. Strides are given, so heads may lie before or
behind positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.rotation import Given

__all__ = ["rotary", "rotary_kernel"]


@triton.jit
def _turn(
    x, out, c, s, heads, first, stride, out_stride, half, width,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads ``first`` and on of one position; rows are ``stride`` apart."""
    head = first + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (pair < half)
    source, target = head.to(tl.int64) * stride, head.to(tl.int64) * out_stride
    if INTERLEAVED:
        feature = tl.arange(0, 2 * BLOCK)[None, :]
        both = (head < heads) & (feature < 2 * half)
        packed = tl.load(x + source + feature, mask=both, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(packed, (HEADS, BLOCK, 2)))
        new = tl.interleave(a * c - b * s, b * c + a * s).to(out.dtype.element_ty)
        tl.store(out + target + feature, new, mask=both)
    else:
        a = tl.load(x + source + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + source + half + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + target + pair, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + target + half + pair, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
    if REST:
        for begin in range(2 * half, width, BLOCK):
            behind = (head < heads) & (begin + pair < width)
            kept = tl.load(x + source + begin + pair, mask=behind)
            tl.store(out + target + begin + pair, kept, mask=behind)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_heads, k_heads, length, half, width, table_stride,
    q_batch, q_head, q_place, k_batch, k_head, k_place,
    q_out_batch, q_out_head, q_out_place, k_out_batch, k_out_head, k_out_place,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    batch = (program // length).to(tl.int64)
    place = (program % length).to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    at = batch * table_stride + place * half + pair
    c = tl.load(cos + at, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=pair < half, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    group = tl.program_id(1)
    groups = tl.cdiv(q_heads, HEADS)
    if group < groups:
        _turn(
            q + batch * q_batch + place * q_place,
            q_out + batch * q_out_batch + place * q_out_place,
            c, s, q_heads, group * HEADS, q_head, q_out_head, half, width,
            INTERLEAVED, REST, HEADS, BLOCK,
        )  # fmt: skip
    else:
        _turn(
            k + batch * k_batch + place * k_place,
            k_out + batch * k_out_batch + place * k_out_place,
            c, s, k_heads, (group - groups) * HEADS, k_head, k_out_head, half, width,
            INTERLEAVED, REST, HEADS, BLOCK,
        )  # fmt: skip


def tile(half: int, heads: int, block: int) -> dict[str, int]:
    """Heads of a program, and the power of two that holds half a head."""
    wide = triton.next_power_of_2(half)
    most = max(1, block // (2 * wide))
    return {"HEADS": min(most, triton.next_power_of_2(heads)), "BLOCK": wide}


def rotary(given: Given, out: tuple[Tensor, Tensor], *, interleaved: bool, back: bool) -> None:
    """Launch over ``[B, H, T, D]`` in any strides, tables ``[B or 1, T, R / 2]``."""
    q, k, cos, sin = given
    # Features must lie side by side; in the output they do if they do in the input.
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    rooms = [x if x.stride(3) == 1 else x.new_empty(x.shape) for x in out]
    how = dict(dispatch.config("rotary", q.device))
    batch, q_heads, length, width = q.shape
    half = cos.shape[-1]
    how |= tile(half, max(q_heads, k.shape[1]), how["BLOCK"])
    groups = triton.cdiv(q_heads, how["HEADS"]) + triton.cdiv(k.shape[1], how["HEADS"])
    rotary_kernel[(batch * length, groups)](
        *(q, k, cos, sin, *rooms, q_heads, k.shape[1], length, half, width),
        0 if cos.shape[0] == 1 else length * half,
        *(stride for x in (q, k, *rooms) for stride in x.stride()[:3]),
        INTERLEAVED=interleaved,
        BACK=back,
        REST=2 * half < width,
        **how,
    )
    for x, room in zip(out, rooms, strict=True):
        if x is not room:
            x.copy_(room)
