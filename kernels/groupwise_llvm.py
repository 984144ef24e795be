"""LLVM for :mod:`zfunc.kernels.groupwise`: a group is searched, then rounded while it is in cache.

Memory is passed over once. The arithmetic is that of the twin, operation by operation, so results
agree bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.flat_llvm import ALONE, lanes, read, write
from zfunc.kernels.groupwise_torch import FIRST, GOLDEN, SECOND
from zfunc.kernels.llvm import Writer, host

__all__ = ["dequantize", "fake_quant", "quantize"]

PLACES = ("length", "stride", "size", "groups", "total")
QUANTIZE = ("x", "error", "out", "scale", "zero", "left", *PLACES, "seed")
DEQUANTIZE = ("q", "scale", "zero", "out", *PLACES)
F32 = torch.float32


@dataclass(frozen=True)
class Rounding:
    """One variant.

    Attributes:
        x: dtype of the values.
        bits: of a level.
        symmetric: whether there are no zeros.
        error: whether one is added to the values, and what is left is kept.
        fake: dtype of the values that levels stand for, which are stored in their place.
        stochastic: whether to round at random.
    """

    x: torch.dtype
    bits: int
    symmetric: bool
    error: bool = False
    fake: torch.dtype | None = None
    stochastic: bool = False

    @property
    def top(self) -> int:
        """The highest level."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    @property
    def reach(self) -> float:
        """Where the greatest value goes: with dither just inside the range, so none leads out."""
        return self.top * (1 - 2**-20) if self.stochastic else self.top


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
    seed: Tensor | None = None,
) -> None:
    """Over rows ``[R, K]``; ``new_error`` may be ``error``."""
    form = Rounding(x.dtype, bits, zero is None, error is not None, None, seed is not None)
    kernel, places = _quantizing(host().isa, form), _places(x.shape, size)
    _run(kernel, (x, error, q, scale, zero, new_error), (*places, _word(seed)))


def fake_quant(
    x: Tensor, out: Tensor, *, bits: int, size: int, symmetric: bool, seed: Tensor | None = None
) -> None:
    """Over rows ``[R, K]``; nothing but the values is written."""
    form = Rounding(x.dtype, bits, symmetric, fake=out.dtype, stochastic=seed is not None)
    places = (*_places(x.shape, size), _word(seed))
    _run(_quantizing(host().isa, form), (x, None, out, None, None, None), places)


def dequantize(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """Over rows ``[R, K]`` of ``out``."""
    kernel = _dequantizing(host().isa, out.dtype, bits, zero is None)
    _run(kernel, (q, scale, zero, out), _places(out.shape, size))


def _run(kernel: llvm.Kernel, tensors: tuple[Tensor | None, ...], places: tuple[int, ...]) -> None:
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    kernel([*addresses, *places], 1 if places[2] * places[4] < ALONE else 0)


def _word(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def _places(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Length of a row, its bytes of pairs, length of a group, groups of a row, and in all."""
    rows, length = shape
    if length % size == 0:  # end to end: one row
        rows, length = 1, rows * length
    groups = -(-length // size)
    return length, -(-length // 2), size, groups, rows * groups


@dataclass(frozen=True)
class Group:
    """Where a group lies: its number, its first and last (excluded) element, its byte of pairs."""

    index: Any
    start: Any
    stop: Any
    byte: Any


def _each_group(w: Writer, write_group: Callable[[Group], None]) -> None:
    """Write a loop over this thread's groups."""
    b, a = w.b, w.arguments
    first, last = w.share(a["total"])
    with w.loop(first, last) as group:
        row = b.udiv(group.index, a["groups"])
        column = w.times(b.sub(group.index, w.times(row, a["groups"])), a["size"])
        begin = w.times(row, a["length"])
        start, end = w.sum(begin, column), w.sum(begin, a["length"])
        full = w.sum(start, a["size"])
        stop = b.select(b.icmp_signed("<", full, end), full, end)
        byte = w.sum(w.times(row, a["stride"]), b.lshr(column, w.n(1)))
        write_group(Group(group.index, start, stop, byte))


@functools.cache
@llvm.once
def _quantizing(isa: str, form: Rounding) -> llvm.Kernel:
    w = Writer("quantizing", QUANTIZE)
    b, a = w.b, w.arguments

    def values(at: Any, mask: Any) -> Any:
        x = read(w, a["x"], at, form.x, mask)
        return b.fadd(x, read(w, a["error"], at, F32, mask)) if form.error else x

    def group(where: Group) -> None:
        low, span = _extremes(w, where, values, form.symmetric)
        usable = b.and_(
            b.fcmp_ordered(">", span, w.ir.Constant(w.f32, 0.0)),
            b.fcmp_ordered("<", span, w.ir.Constant(w.f32, float("inf"))),
        )
        scale = b.fmul(span, _single(w, 1 / form.top))
        inverse = w.splat(b.fdiv(_single(w, form.reach), span))
        every = w.splat(usable)
        if form.fake is None:
            w.store(scale, w.at(a["scale"], w.times(where.index, 4)))
            if low is not None:
                w.store(low, w.at(a["zero"], w.times(where.index, 4)))
        scales, lows = w.splat(scale), None if low is None else w.splat(low)
        key = _key(w, where) if form.stochastic else None

        def rounded(at: Any, mask: Any, _: Any) -> None:
            c = values(at, mask)
            y = b.fmul(c if lows is None else b.fsub(c, lows), inverse)
            y = b.select(every, y, w.constant(w.f32, 0.0))
            if key is not None:
                y = b.fadd(y, _dither(w, key, b.sub(at, where.start)))
            y = w.intrinsic("llvm.roundeven.v16f32", y.type, y)
            if form.fake is None:
                _store_levels(w, y, at, where, mask, form)
            if form.error or form.fake is not None:
                back = b.fmul(y, scales)
                back = back if lows is None else b.fadd(back, lows)
                if form.error:
                    write(w, a["left"], at, b.fsub(c, back), F32, mask)
                if form.fake is not None:
                    write(w, a["out"], at, back, form.fake, mask)

        lanes(w, where.start, where.stop, rounded)

    _each_group(w, group)
    return llvm.compiled(w.done(), "quantizing", isa)


def _extremes(
    w: Writer, where: Group, values: Callable[[Any, Any], Any], symmetric: bool
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


def _key(w: Writer, where: Group) -> Any:
    """Where a group's dither begins: a hash of its number and the seed, int32."""
    b, seed = w.b, w.arguments["seed"]
    high = w.times(b.lshr(where.index, w.n(32)), GOLDEN)
    key = b.trunc(w.sum(where.index, high, seed), w.i32)
    key = b.mul(_folded(w, key, 16), w.ir.Constant(w.i32, FIRST))
    key = b.xor(key, b.trunc(b.lshr(seed, w.n(32)), w.i32))
    key = b.mul(_folded(w, key, 15), w.ir.Constant(w.i32, SECOND))
    return _folded(w, key, 16)


def _dither(w: Writer, key: Any, place: Any) -> Any:
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


def _folded(w: Writer, h: Any, by: int) -> Any:
    """``h ^ (h >> by)``."""
    several = isinstance(h.type, w.ir.VectorType)
    much = w.constant(w.i32, by, h.type.count) if several else w.ir.Constant(w.i32, by)
    return w.b.xor(h, w.b.lshr(h, much))


def _store_levels(w: Writer, y: Any, at: Any, where: Group, mask: Any, form: Rounding) -> None:
    """16 levels as bytes, or as 8 pairs, the first in the low half."""
    b, a = w.b, w.arguments
    level = b.fptosi(y, w.vector(w.i32))
    if form.bits == 8:
        address, value = w.at(a["out"], at), b.trunc(level, w.vector(w.i8))
    else:
        if form.symmetric:
            level = b.add(level, w.constant(w.i32, 8))
        if mask is not None:  # a row may end with half a byte
            level = b.select(mask, level, w.constant(w.i32, 0))
        pairs = b.bitcast(b.trunc(level, w.vector(w.i8)), w.vector(w.i16, 8))
        pairs = b.or_(pairs, b.lshr(pairs, w.constant(w.i16, 4, 8)))
        value = b.trunc(pairs, w.vector(w.i8, 8))
        address = w.at(a["out"], _byte(w, at, where))
    if mask is None:
        w.store(value, address)
    else:
        w.masked_store(value, address, mask if form.bits == 8 else _halves(w, mask))


@functools.cache
@llvm.once
def _dequantizing(isa: str, out: torch.dtype, bits: int, symmetric: bool) -> llvm.Kernel:
    w = Writer("dequantizing", DEQUANTIZE)
    b, a = w.b, w.arguments

    def group(where: Group) -> None:
        spot = w.times(where.index, 4)
        scale = w.splat(w.load(w.at(a["scale"], spot), w.f32))
        zero = None if symmetric else w.splat(w.load(w.at(a["zero"], spot), w.f32))

        def values(at: Any, mask: Any, _: Any) -> None:
            y = b.fmul(_levels(w, at, where, mask, bits, symmetric), scale)
            write(w, a["out"], at, y if zero is None else b.fadd(y, zero), out, mask)

        lanes(w, where.start, where.stop, values)

    _each_group(w, group)
    return llvm.compiled(w.done(), "dequantizing", isa)


def _levels(w: Writer, at: Any, where: Group, mask: Any, bits: int, symmetric: bool) -> Any:
    """16 levels as float32."""
    b, a = w.b, w.arguments
    count = 16 if bits == 8 else 8
    address = w.at(a["q"], at if bits == 8 else _byte(w, at, where))
    if mask is None:
        w.prefetch(w.at(address, 512))
        q = w.load(address, w.vector(w.i8, count))
    else:
        real = mask if bits == 8 else _halves(w, mask)
        q = w.masked_load(address, w.vector(w.i8, count), real)
    if bits == 4:
        pairs = b.zext(q, w.vector(w.i16, 8))
        pairs = b.or_(pairs, b.shl(pairs, w.constant(w.i16, 4, 8)))
        q = b.bitcast(b.and_(pairs, w.constant(w.i16, 0x0F0F, 8)), w.vector(w.i8))
    signed = bits == 8 and symmetric
    y = b.sitofp((b.sext if signed else b.zext)(q, w.vector(w.i32)), w.vector(w.f32))
    return b.fsub(y, w.constant(w.f32, 8.0)) if bits == 4 and symmetric else y


def _byte(w: Writer, at: Any, where: Group) -> Any:
    """The byte of the pair that begins with element ``at``."""
    return w.sum(where.byte, w.b.lshr(w.b.sub(at, where.start), w.n(1)))


def _halves(w: Writer, mask: Any) -> Any:
    """Which of 8 pairs exist: those whose first element does."""
    return w.b.shuffle_vector(mask, mask, w.constant(w.i32, list(range(0, 16, 2)), 8))


def _single(w: Writer, x: float) -> Any:
    return w.ir.Constant(w.f32, llvm.single(x))
