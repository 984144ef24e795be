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
from zfunc.kernels.groupwise_torch import SMALLEST, shares_of
from zfunc.kernels.levels_llvm import (
    PLACES,
    Group,
    dither,
    each_group,
    extremes,
    load_levels,
    start_dither,
    store_levels,
)
from zfunc.kernels.llvm import Writer, host

__all__ = ["dequantize", "fake_quant", "mean", "quantize"]

SOURCE = ("x", "error", "shares", "lows", "rest", "senders", "width", "scales")
QUANTIZE = (*SOURCE, "out", "scale", "zero", "left", *PLACES, "seed", "scratch", "scratch_bytes")
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
        away: ``None``, or the values are a mean of what senders sent, and this is taken off levels.
        lows: whether there is something to add to each sender's values.
        rest: whether there is something to add to their sum.
    """

    x: torch.dtype
    bits: int
    symmetric: bool
    error: bool = False
    fake: torch.dtype | None = None
    stochastic: bool = False
    away: float | None = None
    lows: bool = False
    rest: bool = False

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
    form = Rounding(
        x.dtype, bits, zero is None, error=error is not None, stochastic=seed is not None
    )
    source = (x, error, None, None, None, 0, 0, 0)
    _quantize(form, source, (q, scale, zero, new_error), (*_places(x.shape, size), _word(seed)))


def fake_quant(
    x: Tensor, out: Tensor, *, bits: int, size: int, symmetric: bool, seed: Tensor | None = None
) -> None:
    """Over rows ``[R, K]``; nothing but the values is written."""
    form = Rounding(x.dtype, bits, symmetric, fake=out.dtype, stochastic=seed is not None)
    source = (x, None, None, None, None, 0, 0, 0)
    _quantize(form, source, (out, None, None, None), (*_places(x.shape, size), _word(seed)))


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
    seed: Tensor | None = None,
) -> None:
    """Over the payloads of several senders, a row each; ``new_error`` may be ``error``."""
    shares, lows, rest, away = shares_of(scales, zeros, bits, error is not None)
    form = Rounding(
        received.dtype,
        bits,
        zero is None,
        error=error is not None,
        stochastic=seed is not None,
        away=away,
        lows=lows is not None,
        rest=rest is not None,
    )
    shares = shares.contiguous()
    lows = None if lows is None else lows.contiguous()
    rows = (received.shape[0], received.stride(0), shares.shape[1])
    source = (received, error, shares, lows, rest, *rows)
    _quantize(form, source, (q, scale, zero, new_error), (*_places((1, n), size), _word(seed)))


def dequantize(
    q: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, *, bits: int, size: int
) -> None:
    """Over rows ``[R, K]`` of ``out``."""
    kernel = _dequantizing(host().isa, out.dtype, bits, zero is None)
    _run(kernel, (q, scale, zero, out, *_places(out.shape, size)), out.numel())


def _quantize(
    form: Rounding,
    source: tuple[Tensor | int | None, ...],
    into: tuple[Tensor | None, ...],
    places: tuple[int, ...],
) -> None:
    kernel, (_, _, size, _, total, _) = _quantizing(host().isa, form), places
    n = size * total
    if form.away is None or form.error:
        _run(kernel, (*source, *into, *places, 0, 0), n)
        return
    memory, scratch = llvm.scratch([4 * (size + 16)], _threads(n))
    _run(kernel, (*source, *into, *places, *scratch), n)
    del memory  # now that nobody works in it


def _run(kernel: llvm.Kernel, arguments: tuple[Tensor | int | None, ...], n: int) -> None:
    found = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    kernel(found, _threads(n))


def _threads(n: int) -> int:
    return 1 if n < ALONE else 0


def _word(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def _places(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Length of a row, its bytes of pairs, length of a group, groups of a row, and in all."""
    rows, length = shape
    if length % size == 0:  # end to end: one row
        rows, length = 1, rows * length
    groups = -(-length // size)
    return length, -(-length // 2), size, groups, rows * groups


@functools.cache
@llvm.once
def _quantizing(isa: str, form: Rounding) -> llvm.Kernel:
    w = Writer("quantizing", QUANTIZE)
    b, a = w.b, w.arguments

    alone = form.away is not None and not form.error  # a mean whose error nobody keeps
    room = w.scratch()(w.times(w.sum(a["size"], 16), 4)) if alone else None

    def group(where: Group) -> None:
        first, again = _values(w, form, where, room)
        low, span = extremes(w, where, first, form.symmetric)
        usable = b.and_(
            b.fcmp_ordered(">", span, _single(w, SMALLEST)),
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
        key = start_dither(w, where) if form.stochastic else None

        def rounded(at: Any, mask: Any, _: Any) -> None:
            c = again(at, mask)
            y = b.fmul(c if lows is None else b.fsub(c, lows), inverse)
            y = b.select(every, y, w.constant(w.f32, 0.0))
            if key is not None:
                y = b.fadd(y, dither(w, key, b.sub(at, where.start)))
            y = w.intrinsic("llvm.roundeven.v16f32", y.type, y)
            if form.fake is None:
                store_levels(w, y, at, where, mask, form.bits, form.symmetric)
            if form.error or form.fake is not None:
                back = b.fmul(y, scales)
                back = back if lows is None else b.fadd(back, lows)
                if form.error:
                    write(w, a["left"], at, b.fsub(c, back), F32, mask)
                if form.fake is not None:
                    write(w, a["out"], at, back, form.fake, mask)

        lanes(w, where.start, where.stop, rounded)

    each_group(w, group)
    return llvm.compiled(w.done(), "quantizing", isa)


Values = Callable[[Any, Any], Any]


def _values(w: Writer, form: Rounding, where: Group, room: Any) -> tuple[Values, Values]:
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
            y = load_levels(w, q, at, where, mask, form.bits, form.symmetric)
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
            y = load_levels(w, a["q"], at, where, mask, bits, symmetric)
            if bits == 4 and symmetric:
                y = b.fsub(y, w.constant(w.f32, 8.0))
            y = b.fmul(y, scale)
            write(w, a["out"], at, y if zero is None else b.fadd(y, zero), out, mask)

        lanes(w, where.start, where.stop, values)

    each_group(w, group)
    return llvm.compiled(w.done(), "dequantizing", isa)


def _single(w: Writer, x: float) -> Any:
    return w.ir.Constant(w.f32, llvm.single(x))
