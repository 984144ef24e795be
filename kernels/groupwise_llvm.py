"""LLVM for :mod:`zfunc.kernels.groupwise`: a group is searched, then rounded while it is in cache.

Memory is passed over once. The arithmetic is that of the twin, operation by operation, so results
agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.flat_llvm import call, lanes, read, threads, write, written
from zfunc.kernels.groupwise_torch import SMALLEST, Levels, Quantizing
from zfunc.kernels.levels_llvm import (
    PLACES,
    GroupPlace,
    dither,
    each_group,
    extremes,
    load_levels,
    start_dither,
    store_levels,
)
from zfunc.kernels.llvm import Emitter, host
from zfunc.kernels.operators import contiguous

__all__ = ["dequantize_groups", "fake_quant", "mean_payloads", "quantize_groups"]

SOURCE = ("x", "error", "shares", "lows", "rest", "senders", "width", "scales")
F32 = torch.float32


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        x: dtype of the values.
        levels: which there are.
        error: whether one is added to the values, and what is left is kept.
        fake: dtype of the values that levels stand for, which are stored in their place.
        away: ``None``, or the values are a mean of what senders sent, and this is taken off levels.
        lows: whether there is something to add to each sender's values.
        rest: whether there is something to add to their sum.
    """

    x: torch.dtype
    levels: Levels
    error: bool
    fake: torch.dtype | None
    away: float | None
    lows: bool
    rest: bool

    @property
    def alone(self) -> bool:
        """Whether it is a mean whose error nobody keeps, so that it needs room of its own."""
        return self.away is not None and not self.error


def quantize_groups(given: Quantizing, *, bits: int, size: int, seed: Tensor | None = None) -> None:
    """Over rows of values, or over the payloads of several senders."""
    x, error, fake = given.x, given.error, given.fake
    levels = Levels(bits, given.symmetric, seed is not None)
    shares, lows, rest, away, sizes = None, None, None, None, (0, 0, 0)
    if given.scales is not None:
        shares, lows, rest, away = given.shares(bits)
        shares, lows = contiguous(shares, lows)
        sizes = (x.shape[0], x.stride(0), shares.shape[1])
    kind = None if fake is None else fake.dtype
    form = Variant(
        x.dtype, levels, error is not None, kind, away, lows is not None, rest is not None
    )
    places = _places(given.shape, size)
    n, word = size * places[-1], 0 if seed is None else int(seed)
    source = (x, error, shares, lows, rest, *sizes)
    into = (given.q if fake is None else fake, given.scale, given.zero, given.left)
    memory, scratch = llvm.scratch([4 * (size + 16)], threads(n)) if form.alone else (None, [0, 0])
    call(_quantizing(host().isa, form), n, *source, *into, *places, word, *scratch)
    del memory  # now that nobody works in it


# What is given tells them apart.
fake_quant = quantize_groups
mean_payloads = quantize_groups


def dequantize_groups(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """Over rows ``[R, K]`` of ``out``."""
    kernel = _dequantizing(host().isa, out.dtype, bits, zero is None)
    call(kernel, out.numel(), q, scale, zero, out, *_places(out.shape, size))


def _places(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Length of a row, its bytes of pairs, length of a group, groups of a row, and in all."""
    rows, length = shape
    if length % size == 0:  # end to end: one row
        rows, length = 1, rows * length
    groups = -(-length // size)
    return length, -(-length // 2), size, groups, rows * groups


@written(*SOURCE, "out", "scale", "zero", "left", *PLACES, "seed", "scratch", "scratch_bytes")
def _quantizing(w: Emitter, form: Variant) -> None:
    b, a, levels = w.b, w.arguments, form.levels
    room = w.scratch()(w.times(w.sum(a["size"], 16), 4)) if form.alone else None

    def group(where: GroupPlace) -> None:
        first, again = _values(w, form, where, room)
        low, span = extremes(w, where, first, levels.symmetric)
        usable = b.and_(
            b.fcmp_ordered(">", span, _single(w, SMALLEST)),
            b.fcmp_ordered("<", span, w.ir.Constant(w.f32, float("inf"))),
        )
        scale = b.fmul(span, _single(w, 1 / levels.top))
        inverse = w.splat(b.fdiv(_single(w, levels.reach), span))
        every = w.splat(usable)
        if form.fake is None:
            w.store(scale, w.at(a["scale"], w.times(where.index, 4)))
            if low is not None:
                w.store(low, w.at(a["zero"], w.times(where.index, 4)))
        scales, lows = w.splat(scale), None if low is None else w.splat(low)
        key = start_dither(w, where) if levels.stochastic else None

        def rounded(at: Any, mask: Any, _: Any) -> None:
            c = again(at, mask)
            y = b.fmul(c if lows is None else b.fsub(c, lows), inverse)
            y = b.select(every, y, w.constant(w.f32, 0.0))
            if key is not None:
                y = b.fadd(y, dither(w, key, b.sub(at, where.start)))
            y = w.intrinsic("llvm.roundeven.v16f32", y.type, y)
            if form.fake is None:
                store_levels(w, y, at, where, mask, levels)
            if form.error or form.fake is not None:
                back = b.fmul(y, scales)
                back = back if lows is None else b.fadd(back, lows)
                if form.error:
                    write(w, a["left"], at, b.fsub(c, back), F32, mask)
                if form.fake is not None:
                    write(w, a["out"], at, back, form.fake, mask)

        lanes(w, where.start, where.stop, rounded)

    each_group(w, group)


Values = Callable[[Any, Any], Any]


def _values(w: Emitter, form: Variant, where: GroupPlace, room: Any) -> tuple[Values, Values]:
    """Write 16 values of a group, for the first time and again.

    A mean is kept in between: where the error will be, or in ``room``.
    """
    b, a = w.b, w.arguments

    def one(at: Any, mask: Any) -> Any:
        x = read(w, a["x"], at, form.x, mask)
        return b.fadd(x, read(w, a["error"], at, F32, mask)) if form.error else x

    if form.away is None:
        return one, one
    rest = w.splat(w.load(w.at(a["rest"], w.times(where.index, 4)), w.f32)) if form.rest else None
    kept, origin = (a["left"], w.n(0)) if form.error else (room, where.start)

    def all_(at: Any, mask: Any) -> Any:
        begin = read(w, a["error"], at, F32, mask) if form.error else w.constant(w.f32, 0.0)
        with w.loop(0, a["senders"], carried=[begin]) as sender:
            q = w.at(a["x"], w.times(sender.index, a["width"]))
            spot = w.times(w.sum(w.times(sender.index, a["scales"]), where.index), 4)
            share = w.splat(w.load(w.at(a["shares"], spot), w.f32))
            y = load_levels(w, q, at, where, mask, form.levels)
            y = b.fsub(y, w.constant(w.f32, form.away)) if form.away else y
            y = b.fmul(y, share)
            if form.lows:
                y = b.fadd(y, w.splat(w.load(w.at(a["lows"], spot), w.f32)))
            sender.then = [b.fadd(sender.values[0], y)]
        c = sender.values[0] if rest is None else b.fadd(sender.values[0], rest)
        if mask is not None:
            c = b.select(mask, c, w.constant(w.f32, 0.0))
        write(w, kept, b.sub(at, origin), c, F32, mask)
        return c

    return all_, lambda at, mask: read(w, kept, b.sub(at, origin), F32, mask)


@written("q", "scale", "zero", "out", *PLACES)
def _dequantizing(w: Emitter, out: torch.dtype, bits: int, symmetric: bool) -> None:
    b, a = w.b, w.arguments

    def group(where: GroupPlace) -> None:
        spot = w.times(where.index, 4)
        scale = w.splat(w.load(w.at(a["scale"], spot), w.f32))
        zero = None if symmetric else w.splat(w.load(w.at(a["zero"], spot), w.f32))

        def values(at: Any, mask: Any, _: Any) -> None:
            y = load_levels(w, a["q"], at, where, mask, Levels(bits, symmetric))
            if bits == 4 and symmetric:
                y = b.fsub(y, w.constant(w.f32, 8.0))
            y = b.fmul(y, scale)
            write(w, a["out"], at, y if zero is None else b.fadd(y, zero), out, mask)

        lanes(w, where.start, where.stop, values)

    each_group(w, group)


def _single(w: Emitter, x: float) -> Any:
    return w.ir.Constant(w.f32, llvm.single(x))
