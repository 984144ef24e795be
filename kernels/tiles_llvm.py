"""LLVM for :mod:`zfunc.kernels.panels` where there are matrix registers for integers (AMX).

A tile of inputs is 16 rows of up to 64 columns, a tile of weights the same columns of a panel, as
its lines lie in memory; one instruction adds their product to 16 x 16 sums (Intel's manual,
TDPBSUD). It does in 16 cycles what dot products do in 128, so the same panels serve many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zfunc.kernels.flat_llvm import written
from zfunc.kernels.llvm import Emitter
from zfunc.kernels.panels_llvm import AHEAD, LINE, PRODUCT, PanelProduct, scaled, split, write

__all__ = ["TILED", "Tiled", "tiled"]

TILED = (*PRODUCT, "scratch", "scratch_bytes")
EDGE = 16  # rows of a tile
SUMS, INPUTS, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # which registers hold what


@dataclass(frozen=True)
class Tiled:
    """One variant of the product with tiles.

    Attributes:
        form: what the rows and the weights are; a block has 16 rows of bytes.
        chunk: columns of a tile, 64 or 32.
        tall: blocks taken together, 1 or 2.
        wide: panels taken together, 1 or 2.
    """

    form: PanelProduct
    chunk: int
    tall: int
    wide: int


@written(*TILED)
def tiled(
    w: Emitter, rows: int, halves: int, bits: int, zeros: bool, short: bool, *shape: int
) -> None:
    """:func:`zfunc.kernels.panels_llvm.product` with tiles.

    ``blocks`` and ``panels`` are multiples of ``tall`` and ``wide``. 4-bit weights need
    ``scratch``: ``scratch_bytes`` for each thread, as many as ``wide`` panels have in 8 bits.
    """
    spec = Tiled(PanelProduct(rows, halves, bits, zeros, short, chains=1), *shape)
    a, form, tall, wide = w.arguments, spec.form, spec.tall, spec.wide
    lines = w.times(a["lines"], 8 // form.bits)
    depth = w.times(a["groups"], lines)
    _configure(w, spec)
    totals = w.room(w.vector(w.f32), tall * wide * form.rows)
    sums = w.room(w.vector(w.i32), tall * wide * EDGE)
    mine = w.times(w.thread(), a["scratch_bytes"])
    first, last = w.share(w.b.udiv(a["panels"], w.n(wide)))
    with w.loop(first, last) as pair:
        panel = w.times(pair.index, wide)
        weights = w.at(a["weights"], w.times(panel, a["groups"], a["lines"], LINE))
        if form.bits == 4:
            room = w.at(w.sum(a["scratch"], mine), 0)
            _expand(w, weights, room, w.times(a["groups"], a["lines"], wide))
            weights = room
        with w.loop(0, a["blocks"], tall) as block:
            for i in range(tall * wide * form.rows):
                w.store(w.constant(w.f32, 0.0), w.at(totals, LINE * i), LINE)
            with w.loop(0, a["groups"]) as group:
                line = w.times(group.index, lines)
                _sums(w, spec, weights, block.index, line, lines, depth, sums)
                _add(w, spec, panel, block.index, group.index, sums, totals)
            for i in range(tall):
                for j in range(wide):
                    at = (i * wide + j) * form.rows
                    all_ = [
                        w.load(w.at(totals, LINE * (at + r)), w.vector(w.f32), LINE)
                        for r in range(form.rows)
                    ]
                    write(w, form, all_, w.sum(panel, j), w.sum(block.index, i))
    w.intrinsic("llvm.x86.tilerelease", w.ir.VoidType())


def _configure(w: Emitter, spec: Tiled) -> None:
    """Say what shape each register has (Intel's manual, LDTILECFG, palette 1)."""
    config = w.room(w.vector(w.i8, LINE), 1)
    shapes = dict.fromkeys(SUMS, (EDGE, 64))
    shapes |= dict.fromkeys(INPUTS, (EDGE, spec.chunk))
    shapes |= dict.fromkeys(WEIGHTS, (spec.chunk // 4, 64))
    values = [1] + [0] * 63
    for register, (rows, columns) in shapes.items():
        values[16 + 2 * register] = columns
        values[48 + register] = rows
    w.store(w.constant(w.i8, values, LINE), config, LINE)
    w.intrinsic("llvm.x86.ldtilecfg", w.ir.VoidType(), config)


def _expand(w: Emitter, weights: Any, room: Any, lines: Any) -> None:
    """4-bit weights as bytes, which stay in a core's cache until they have been used."""
    with w.loop(0, lines) as at:
        here = w.at(weights, w.times(at.index, LINE))
        w.prefetch(w.at(here, AHEAD))
        for i, part in enumerate(split(w, w.load(here, w.vector(w.i8, LINE), LINE), 4)):
            w.store(part, w.at(room, w.sum(w.times(at.index, 2 * LINE), LINE * i)), LINE)


def _sums(
    w: Emitter, spec: Tiled, weights: Any, block: Any, line: Any, lines: Any, depth: Any, sums: Any
) -> None:
    """The integer sums of one group, in memory."""
    step = spec.chunk // 4  # lines of 8-bit weights in a tile
    nothing = w.ir.VoidType()
    for register in SUMS[: spec.tall * spec.wide]:
        w.intrinsic("llvm.x86.tilezero", nothing, w.ir.Constant(w.i8, register))
    x = w.at(w.arguments["codes"], w.times(block, depth, 4 * EDGE))
    with w.loop(0, lines, step) as at:
        here = w.sum(line, at.index)
        for i, register in enumerate(INPUTS[: spec.tall]):
            beside = w.sum(w.times(here, 4 * EDGE), w.times(depth, 4 * EDGE * i))
            _load(w, register, w.at(x, beside), spec.chunk)
        for j, register in enumerate(WEIGHTS[: spec.wide]):
            address = w.at(weights, w.times(w.sum(here, w.times(depth, j)), LINE))
            if spec.tall == 1 and spec.form.bits == 8:
                for ahead in range(step):
                    w.prefetch(w.at(address, AHEAD + LINE * ahead))
            _load(w, register, address, LINE)
        for i, inputs in enumerate(INPUTS[: spec.tall]):
            for j, columns in enumerate(WEIGHTS[: spec.wide]):
                registers = (SUMS[i * spec.wide + j], inputs, columns)
                w.intrinsic(
                    "llvm.x86.tdpbsud", nothing, *(w.ir.Constant(w.i8, r) for r in registers)
                )
    for i, register in enumerate(SUMS[: spec.tall * spec.wide]):
        to = w.at(sums, LINE * EDGE * i)
        w.intrinsic("llvm.x86.tilestored64", nothing, w.ir.Constant(w.i8, register), to, w.n(LINE))


def _load(w: Emitter, register: int, address: Any, stride: int) -> None:
    number = w.ir.Constant(w.i8, register)
    w.intrinsic("llvm.x86.tileloadd64", w.ir.VoidType(), number, address, w.n(stride))


def _add(
    w: Emitter, spec: Tiled, panel: Any, block: Any, group: Any, sums: Any, totals: Any
) -> None:
    """A group's sums in its scales, onto the totals."""
    a, form = w.arguments, spec.form
    for i in range(spec.tall):
        mine = w.sum(block, i)
        small = w.times(w.sum(w.times(mine, a["groups"]), group), 4 * EDGE)
        start = w.at(a["start"], small)
        for j in range(spec.wide):
            at = i * spec.wide + j
            found = [
                w.b.add(
                    w.load(w.at(sums, LINE * (at * EDGE + r)), w.vector(w.i32), LINE),
                    w.splat(w.load(w.at(start, 4 * r), w.i32, 4)),
                )
                for r in range(form.inputs)
            ]
            places = [w.at(totals, LINE * (at * form.rows + r)) for r in range(form.rows)]
            old = [w.load(place, w.vector(w.f32), LINE) for place in places]
            column = w.times(w.sum(w.times(group, a["panels"]), panel, j), 16)
            new = scaled(w, form, found, old, column, w.at(a["sums"], small))
            for value, place in zip(new, places, strict=True):
                w.store(value, place, LINE)
