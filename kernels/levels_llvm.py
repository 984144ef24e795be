"""What :mod:`zfunc.kernels.groupwise_llvm` does with a group: sixteen elements at a time.

Levels in and out of memory, extremes, dither. The arithmetic is that of the twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zfunc.kernels.flat_llvm import lanes, least
from zfunc.kernels.groupwise_torch import FIRST, GOLDEN, SECOND, Levels
from zfunc.kernels.llvm import Emitter

__all__ = [
    "PLACES",
    "GroupPlace",
    "dither",
    "each_group",
    "extremes",
    "load_levels",
    "start_dither",
    "store_levels",
]

AHEAD = 512  # bytes from here to what is asked of memory
PLACES = ("length", "stride", "size", "groups", "total")


@dataclass(frozen=True)
class GroupPlace:
    """Where a group lies: its number, its first and last (excluded) element, its byte of pairs."""

    index: Any
    start: Any
    stop: Any
    byte: Any


def each_group(w: Emitter, write_group: Callable[[GroupPlace], None]) -> None:
    """Write a loop over this thread's groups."""
    b, a = w.b, w.arguments
    with w.loop(*w.share(a["total"])) as group:
        row = b.udiv(group.index, a["groups"])
        column = w.times(b.sub(group.index, w.times(row, a["groups"])), a["size"])
        begin = w.times(row, a["length"])
        start, end = w.sum(begin, column), w.sum(begin, a["length"])
        stop = least(w, w.sum(start, a["size"]), end)
        byte = w.sum(w.times(row, a["stride"]), b.lshr(column, w.n(1)))
        write_group(GroupPlace(group.index, start, stop, byte))


def extremes(
    w: Emitter, where: GroupPlace, values: Callable[[Any, Any], Any], symmetric: bool
) -> tuple[Any, Any]:
    """The least value and what lies between it and the greatest; NaN if a value is.

    With symmetry there is no least, and it is the greatest absolute value.
    """
    b, whole = w.b, w.vector(w.i32)
    if symmetric:
        size = w.constant(w.i32, 0x7FFFFFFF)  # without the sign; as integers, NaN is above all

        def larger(at: Any, mask: Any, most: Any) -> list[Any]:
            bits = b.and_(b.bitcast(values(at, mask), whole), size)
            return [w.intrinsic("llvm.umax.v16i32", whole, most[0], bits)]

        (most,) = lanes(w, where.start, where.stop, larger, [w.constant(w.i32, 0)])
        most = w.intrinsic("llvm.vector.reduce.umax.v16i32", w.i32, most)
        return None, b.bitcast(most, w.f32)
    ends = [w.constant(w.f32, x) for x in (float("inf"), float("-inf"))]
    names = ("minimum", "maximum")

    def wider(at: Any, mask: Any, known: Any) -> list[Any]:
        c = values(at, mask)
        mine = [c if mask is None else b.select(mask, c, end) for end in ends]
        return [
            w.intrinsic(f"llvm.{name}.v16f32", c.type, old, new)
            for name, old, new in zip(names, known, mine, strict=True)
        ]

    found = lanes(w, where.start, where.stop, wider, ends)
    low, high = (
        w.intrinsic(f"llvm.vector.reduce.f{name}.v16f32", w.f32, x)
        for name, x in zip(names, found, strict=True)
    )
    return low, b.fsub(high, low)


def start_dither(w: Emitter, where: GroupPlace) -> Any:
    """Where a group's dither begins: a hash of its number and the seed, int32."""
    b, seed = w.b, w.arguments["seed"]
    high = w.times(b.lshr(where.index, w.n(32)), GOLDEN)
    key = b.trunc(w.sum(where.index, high, seed), w.i32)
    key = b.mul(_folded(w, key, 16), w.ir.Constant(w.i32, FIRST))
    key = b.xor(key, b.trunc(b.lshr(seed, w.n(32)), w.i32))
    key = b.mul(_folded(w, key, 15), w.ir.Constant(w.i32, SECOND))
    return _folded(w, key, 16)


def dither(w: Emitter, key: Any, place: Any) -> Any:
    """From -1/2 to below 1/2, for 16 elements of a group: see the twin's."""
    b = w.b
    steps = b.add(
        w.splat(b.trunc(b.lshr(place, w.n(2)), w.i32), 4), w.constant(w.i32, [0, 1, 2, 3], 4)
    )
    h = b.add(w.splat(key, 4), b.mul(steps, w.constant(w.i32, GOLDEN, 4)))
    h = b.mul(_folded(w, h, 15), w.constant(w.i32, SECOND, 4))
    h = b.add(h, b.lshr(h, w.constant(w.i32, 16, 4)))
    turned = b.or_(b.lshr(h, w.constant(w.i32, 8, 4)), b.shl(h, w.constant(w.i32, 24, 4)))
    words = b.shuffle_vector(h, turned, w.constant(w.i32, [0, 4, 1, 5, 2, 6, 3, 7], 8))
    halves = b.sext(b.bitcast(words, w.vector(w.i16)), w.vector(w.i32))
    return b.fmul(b.sitofp(halves, w.vector(w.f32)), w.constant(w.f32, 2.0**-16))


def _folded(w: Emitter, h: Any, by: int) -> Any:
    """``h ^ (h >> by)``."""
    several = isinstance(h.type, w.ir.VectorType)
    much = w.constant(w.i32, by, h.type.count) if several else w.ir.Constant(w.i32, by)
    return w.b.xor(h, w.b.lshr(h, much))


def store_levels(w: Emitter, y: Any, at: Any, where: GroupPlace, mask: Any, levels: Levels) -> None:
    """16 levels as bytes, or as 8 pairs, the first in the low half."""
    b, a, bits = w.b, w.arguments, levels.bits
    level = b.fptosi(y, w.vector(w.i32))
    if bits == 8:
        address, value = w.at(a["out"], at), b.trunc(level, w.vector(w.i8))
    else:
        if levels.symmetric:
            level = b.add(level, w.constant(w.i32, 8))
        if mask is not None:  # a row may end with half a byte
            level = b.select(mask, level, w.constant(w.i32, 0))
        pairs = b.bitcast(b.trunc(level, w.vector(w.i8)), w.vector(w.i16, 8))
        pairs = b.or_(pairs, b.lshr(pairs, w.constant(w.i16, 4, 8)))
        value = b.trunc(pairs, w.vector(w.i8, 8))
        address = w.at(a["out"], _byte(w, at, where))
    w.store(value, address, mask=mask if bits == 8 else _halves(w, mask))


def load_levels(w: Emitter, q: Any, at: Any, where: GroupPlace, mask: Any, levels: Levels) -> Any:
    """16 levels as float32; those of 4 bits as they are stored, from 0 to 15."""
    b, bits = w.b, levels.bits
    count = 16 if bits == 8 else 8
    address = w.at(q, at if bits == 8 else _byte(w, at, where))
    if mask is None:
        w.prefetch(w.at(address, AHEAD))
    x = w.load(address, w.vector(w.i8, count), mask=mask if bits == 8 else _halves(w, mask))
    if bits == 4:
        pairs = b.zext(x, w.vector(w.i16, 8))
        pairs = b.or_(pairs, b.shl(pairs, w.constant(w.i16, 4, 8)))
        x = b.bitcast(b.and_(pairs, w.constant(w.i16, 0x0F0F, 8)), w.vector(w.i8))
    wide = b.sext if levels.symmetric and bits == 8 else b.zext
    return b.sitofp(wide(x, w.vector(w.i32)), w.vector(w.f32))


def _byte(w: Emitter, at: Any, where: GroupPlace) -> Any:
    """The byte of the pair that begins with element ``at``."""
    return w.sum(where.byte, w.b.lshr(w.b.sub(at, where.start), w.n(1)))


def _halves(w: Emitter, mask: Any) -> Any:
    """Which of 8 pairs exist: those whose first element does."""
    if mask is None:
        return None
    return w.b.shuffle_vector(mask, mask, w.constant(w.i32, list(range(0, 16, 2)), 8))
