"""LLVM for :mod:`zfunc.kernels.panels`: dot products of bytes, a panel of 16 outputs at a time.

A line of 64 bytes holds 4 columns of 16 outputs, unsigned. It is loaded once and multiplied with 4
columns of each row, with VNNI in one instruction a row: four products of bytes, added to an int32
(Intel's manual, VPDPBUSD). What makes the weights unsigned (128, or 8 for 4 bits) is taken off the
start of the sums. So a product of a few rows waits for its weights and for nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zfunc.kernels.dots_llvm import DOTS
from zfunc.kernels.flat_llvm import written
from zfunc.kernels.llvm import Emitter

__all__ = [
    "LINE",
    "PanelProduct",
    "linear",
    "product",
    "rounding",
    "scaled",
    "split",
    "write",
]

GROUPS_AHEAD = 8  # the same in groups, for their scales
LINE = 64  # bytes of a vector, and of a cache line
TINY = 1.0000000031710769e-30  # 1e-30 in fp32: inputs below it are rounded to zero
AHEAD = 2048  # bytes from here to what is asked of memory: some 100 ns at a core's share of it
PRODUCT = (
    *("codes", "weights", "scale", "zero", "start", "sums", "row_scale", "out"),
    *("panels", "blocks", "groups", "lines", "n"),
)
LINEAR = (
    *("x", "weights", "scale", "zero", "out"),
    *("panels", "groups", "lines", "n", "m", "k", "chunks"),
    *("scratch", "scratch_bytes"),
)
ROUNDING = (
    *("x", "codes", "start", "sums", "row_scale"),
    *("m", "k", "groups", "chunks", "offset", "rows"),
)


@dataclass(frozen=True)
class PanelProduct:
    """One variant of the product.

    Attributes:
        rows: of the input that are taken together, a block.
        halves: 1, or 2 for inputs of 16 bits: the low bytes of all rows, then the high ones.
        bits: of the weights, 8 or 4.
        zeros: whether grids have zero points.
        short: whether scales are in bf16.
        chains: sums that are carried on for each row; the number of lines is a multiple of it.
    """

    rows: int
    halves: int
    bits: int
    zeros: bool
    short: bool
    chains: int

    @property
    def inputs(self) -> int:
        """Rows of bytes in a block."""
        return self.rows * self.halves


@written(*PRODUCT)
def product(w: Emitter, *form: Any) -> None:
    """``out[m, n] = row_scale[m] sum_g scale[g, n] (sum_k codes x - zero[g, n] sum_k x)``.

    Arguments (:data:`PRODUCT`): codes of the inputs as :func:`rounding` leaves them, lines of
    weights ``[panels, groups, lines]``, scales and zero points ``[groups, 16 panels]``, ``start``
    int32 and ``sums`` fp32 ``[blocks, groups, inputs]``, ``out`` fp32 ``[blocks * rows, n]``.
    """
    _multiply(w, PanelProduct(*form))


@written(*LINEAR)
def linear(w: Emitter, chunk: int, *form: Any) -> None:
    """:func:`rounding` and :func:`product` of one block at once.

    Every thread rounds all rows for itself, which for a few takes less time than to wait for
    another to have done it, in scratch of its own. Arguments: :data:`LINEAR`; a group is ``chunks``
    of ``chunk`` columns.
    """
    a, spec = w.arguments, PanelProduct(*form)
    inputs = spec.inputs
    columns = w.times(a["groups"], a["chunks"], chunk)
    a |= {"rows": w.n(spec.rows), "blocks": w.n(1), "offset": w.n(1 << (spec.bits - 1))}
    part = w.scratch()
    a["codes"] = part(w.times(columns, inputs))
    a["start"], a["sums"] = (part(w.times(a["groups"], inputs, 4)) for _ in range(2))
    a["row_scale"] = part(w.n(4 * spec.rows))
    _round(w, w.n(0), a["m"], spec.halves, chunk, tiled=False)
    _multiply(w, spec)


def _multiply(w: Emitter, spec: PanelProduct) -> None:
    """This thread's panels of :func:`product`."""
    a, inputs = w.arguments, spec.inputs
    depth = w.times(a["groups"], a["lines"])  # lines of a panel
    wide = 4 * 8 // spec.bits * inputs  # bytes of inputs that belong to a line
    none = w.constant(w.f32, 0.0)
    first, last = w.share(a["panels"])
    with w.loop(first, last) as panel, w.loop(0, a["blocks"]) as block:
        lines = w.at(a["weights"], w.times(panel.index, depth, LINE))
        x = w.at(a["codes"], w.times(block.index, depth, wide))
        with w.loop(0, a["groups"], carried=[none] * spec.rows) as group:
            line = w.times(group.index, a["lines"])
            small = w.times(w.sum(w.times(block.index, a["groups"]), group.index), 4 * inputs)
            here, beside = w.at(lines, w.times(line, LINE)), w.at(x, w.times(line, wide))
            sums = _dots(w, spec, here, beside, w.at(a["start"], small), a["lines"])
            column = w.times(w.sum(w.times(group.index, a["panels"]), panel.index), 16)
            group.then = scaled(w, spec, sums, group.values, column, w.at(a["sums"], small))
        write(w, spec, group.values, panel.index, block.index)


def _dots(w: Emitter, spec: PanelProduct, lines: Any, x: Any, start: Any, count: Any) -> list[Any]:
    """The integer sums of one group, a vector of 16 outputs for each row of inputs."""
    dots, inputs = DOTS[w.isa], spec.inputs
    begin = [dots.begin(w, w.load(w.at(start, 4 * r), w.i32, 4)) for r in range(inputs)]
    begin += [dots.begin(w, w.ir.Constant(w.i32, 0))] * (inputs * (spec.chains - 1))
    with w.loop(0, count, spec.chains, carried=begin) as at:
        sums = list(at.values)
        for chain in range(spec.chains):
            here = w.at(lines, w.times(w.sum(at.index, chain), LINE))
            w.prefetch(w.at(here, AHEAD))
            parts = split(w, w.load(here, w.vector(w.i8, 64), LINE), spec.bits)
            beside = w.at(x, w.times(w.sum(at.index, chain), 4 * len(parts) * inputs))
            for i, weights in enumerate(parts):
                for r in range(inputs):
                    four = w.load(w.at(beside, 4 * (i * inputs + r)), w.i32, 4)
                    to = chain * inputs + r
                    sums[to] = dots.add(w, sums[to], weights, four)
        at.then = sums
    return [dots.end(w, functools.reduce(w.b.add, at.values[r::inputs])) for r in range(inputs)]


def split(w: Emitter, line: Any, bits: int) -> list[Any]:
    """The codes in a line: themselves, or the low and the high halves of its bytes."""
    if bits == 8:
        return [line]
    pairs = w.vector(w.i16, 32)
    low = w.constant(w.i8, 15, 64)
    moved = w.b.lshr(w.b.bitcast(line, pairs), w.ir.Constant(pairs, [4] * 32))
    return [w.b.and_(line, low), w.b.and_(w.b.bitcast(moved, line.type), low)]


def scaled(
    w: Emitter, spec: PanelProduct, sums: list[Any], totals: list[Any], column: Any, taken: Any
) -> list[Any]:
    """``totals`` and a group's sums in its scales; the zero points take their share off first."""
    b, a, floats = w.b, w.arguments, w.vector(w.f32)
    # A group's scales are far from the last one's: memory has to be told.
    soon, bytes_ = w.sum(column, w.times(a["panels"], 16 * GROUPS_AHEAD)), 2 if spec.short else 4
    w.prefetch(w.at(a["scale"], w.times(soon, bytes_)))
    if spec.zeros:
        w.prefetch(w.at(a["zero"], soon))
    if spec.short:
        bits = w.load(w.at(a["scale"], w.times(column, 2)), w.vector(w.i16), 2)
        wide = b.shl(b.zext(bits, w.vector(w.i32)), w.constant(w.i32, 16))
        scale = b.bitcast(wide, floats)
    else:
        scale = w.load(w.at(a["scale"], w.times(column, 4)), floats, 4)
    zero = None
    if spec.zeros:
        zero = b.sitofp(w.load(w.at(a["zero"], column), w.vector(w.i8), 1), floats)
        zero = b.fneg(zero)
    out = []
    for r in range(spec.rows):
        parts = []
        for half in range(spec.halves):
            i = half * spec.rows + r
            part = b.sitofp(sums[i], floats)
            if zero is not None:
                share = w.splat(w.load(w.at(taken, 4 * i), w.f32, 4))
                part = w.multiply_add(zero, share, part)
            parts.append(part)
        low, *high = parts
        value = w.multiply_add(high[0], w.constant(w.f32, 256.0), low) if high else low
        out.append(w.multiply_add(value, scale, totals[r]))
    return out


def write(w: Emitter, spec: PanelProduct, totals: Sequence[Any], panel: Any, block: Any) -> None:
    """A block's rows of one panel, as far as the matrix goes."""
    a, b = w.arguments, w.b
    mask = w.below(b.sub(a["n"], w.times(panel, 16)))
    for r, total in enumerate(totals):
        row = w.sum(w.times(block, spec.rows), r)
        scale = w.splat(w.load(w.at(a["row_scale"], w.times(row, 4)), w.f32, 4))
        address = w.at(a["out"], w.times(w.sum(w.times(row, a["n"]), w.times(panel, 16)), 4))
        w.store(b.fmul(total, scale), address, mask=mask)


@written(*ROUNDING)
def rounding(w: Emitter, halves: int, chunk: int, tiled: bool) -> None:
    """Rows rounded to 8 or 16 bits, put where :func:`product` reads them.

    ``scale = max(max |x| / (127 or 127 * 256), 1e-30)``, codes ``round(x / scale)``, halves
    upwards; 16 bits as ``256 high + low``, both signed bytes.

    Args:
        halves: 1 for 8 bits, 2 for 16.
        chunk: columns (a multiple of 16) after which the next chunk of a block begins.
        tiled: within a chunk rows lie one behind the other; else four columns of each row do.

    Arguments (:data:`ROUNDING`): ``x`` fp32 ``[m, k]``; ``rows`` of a block; ``groups`` of
    ``chunks`` chunks; ``offset`` is what makes the weights unsigned.
    """
    _round(w, *w.share(w.arguments["m"]), halves, chunk, tiled)


def _round(w: Emitter, first: Any, last: Any, halves: int, chunk: int, tiled: bool) -> None:
    """Rows ``first`` to ``last`` of ``x`` (see :func:`rounding`)."""
    a, b = w.arguments, w.b
    inputs = w.times(a["rows"], halves)
    with w.loop(first, last) as row:
        x = w.at(a["x"], w.times(row.index, a["k"], 4))
        scale = _row_scale(w, x, a["k"], 127.0 if halves == 1 else 127.0 * 256)
        w.store(scale, w.at(a["row_scale"], w.times(row.index, 4)), 4)
        block, mine = b.udiv(row.index, a["rows"]), b.urem(row.index, a["rows"])
        # The row's first byte in a chunk, and how far it is to its next four columns.
        inner, step = (
            (w.times(mine, chunk), w.n(4)) if tiled else (w.times(mine, 4), w.times(inputs, 4))
        )
        half = w.times(a["rows"], chunk if tiled else 4)
        size = w.times(inputs, chunk)
        with w.loop(0, a["groups"]) as group:
            index = w.sum(w.times(block, a["groups"]), group.index)
            with w.loop(0, a["chunks"], carried=[w.constant(w.i32, 0)] * halves) as at:
                number = w.sum(w.times(group.index, a["chunks"]), at.index)
                to = w.at(
                    a["codes"],
                    w.sum(
                        w.times(w.sum(w.times(block, a["groups"], a["chunks"]), number), size),
                        inner,
                    ),
                )
                totals = list(at.values)
                for part in range(0, chunk, 16):
                    column = w.sum(w.times(number, chunk), part)
                    codes = _codes(w, _columns(w, x, column, a["k"]), scale, halves)
                    for i, code in enumerate(codes):
                        totals[i] = b.add(totals[i], code)
                        fours = b.bitcast(b.trunc(code, w.vector(w.i8)), w.vector(w.i32, 4))
                        for j in range(4):
                            four = b.extract_element(fours, w.ir.Constant(w.i32, j))
                            place = w.sum(w.times(step, part // 4 + j), w.times(half, i))
                            w.store(four, w.at(to, place), 4)
                at.then = totals
            for i, total in enumerate(at.values):
                sum_ = w.intrinsic("llvm.vector.reduce.add.v16i32", w.i32, total)
                spot = w.times(w.sum(w.times(index, inputs), w.times(a["rows"], i), mine), 4)
                taken = b.sub(w.ir.Constant(w.i32, 0), b.mul(b.trunc(a["offset"], w.i32), sum_))
                w.store(taken, w.at(a["start"], spot), 4)
                w.store(b.sitofp(sum_, w.f32), w.at(a["sums"], spot), 4)


def _columns(w: Emitter, x: Any, column: Any, k: Any) -> Any:
    """16 columns of a row; zeros beyond its end."""
    mask = w.below(w.b.sub(k, column))
    return w.load(w.at(x, w.times(column, 4)), w.vector(w.f32), mask=mask)


def _row_scale(w: Emitter, x: Any, k: Any, top: float) -> Any:
    """``max(max |x| / top, 1e-30)``; NaN if a value is."""
    b, whole = w.b, w.vector(w.i32)
    size = w.constant(w.i32, 0x7FFFFFFF)  # without the sign; as integers, NaN is above all others
    with w.loop(0, k, 16, carried=[w.constant(w.i32, 0)]) as at:
        bits = b.and_(b.bitcast(_columns(w, x, at.index, k), whole), size)
        at.then = [w.intrinsic("llvm.umax.v16i32", whole, at.values[0], bits)]
    most = w.intrinsic("llvm.vector.reduce.umax.v16i32", w.i32, at.values[0])
    scale = b.fdiv(b.bitcast(most, w.f32), w.ir.Constant(w.f32, top))
    tiny = w.ir.Constant(w.f32, TINY)
    return b.select(b.fcmp_ordered("<", scale, tiny), tiny, scale)


def _codes(w: Emitter, x: Any, scale: Any, halves: int) -> list[Any]:
    """16 values as signed integers of 8 bits, or as the low and high bytes of 16."""
    b, whole = w.b, w.vector(w.i32)
    zero = 128 if halves == 1 else 128 * 257
    value = b.fadd(b.fdiv(x, w.splat(scale)), w.constant(w.f32, zero + 0.5))
    # What is no number gives 0 and not whatever the machine has for it.
    code = w.intrinsic("llvm.fptosi.sat.v16i32.v16f32", whole, value)
    if halves == 1:
        return [b.sub(code, w.constant(w.i32, 128))]
    low, high = b.and_(code, w.constant(w.i32, 255)), b.ashr(code, w.constant(w.i32, 8))
    return [b.sub(part, w.constant(w.i32, 128)) for part in (low, high)]
