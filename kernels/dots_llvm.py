"""Dot products of bytes, four by four, in the instructions of three generations of x86-64.

All of them add ``sum_j unsigned[4 i + j] * signed[j]`` to output ``i`` of 16, as int32 modulo
2^32: what is unsigned are 64 bytes of weights, what is signed four bytes of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zfunc.kernels.llvm import Emitter

__all__ = ["DOTS", "Dots"]

ALL = list(range(16))


@dataclass(frozen=True)
class Dots:
    """How one instruction set does it; sums are in a form of its own meanwhile.

    Attributes:
        begin: ``(w, start)``: sums that all begin with an int32.
        add: ``(w, sums, unsigned, signed)``, ``signed`` an int32 of four bytes.
        end: ``(w, sums)``: a vector of 16 int32.
    """

    begin: Callable[[Emitter, Any], Any]
    add: Callable[[Emitter, Any, Any, Any], Any]
    end: Callable[[Emitter, Any], Any]


def _vpdpbusd(w: Emitter, total: Any, *factors: Any) -> Any:
    """The instruction, on vectors of as many int32 as ``total`` has."""
    count = total.type.count
    if w.version >= 22:  # before, LLVM called four bytes an integer
        factors = tuple(w.b.bitcast(v, w.vector(w.i8, 4 * count)) for v in factors)
    return w.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * count}", total.type, total, *factors)


def _whole(w: Emitter, sums: Any, unsigned: Any, signed: Any) -> Any:
    return _vpdpbusd(w, sums, w.b.bitcast(unsigned, sums.type), w.splat(signed))


def _halves(w: Emitter, sums: Any, unsigned: Any, signed: Any) -> Any:
    vectors = sums, w.b.bitcast(unsigned, sums.type), w.splat(signed)
    halves = []
    for lanes in (ALL[:8], ALL[8:]):
        pick = w.constant(w.i32, lanes, 8)
        halves.append(_vpdpbusd(w, *(w.b.shuffle_vector(v, v, pick) for v in vectors)))
    return w.b.shuffle_vector(*halves, w.constant(w.i32, ALL))


def _pairs(w: Emitter, sums: Any, unsigned: Any, signed: Any) -> Any:
    """With 16-bit factors: an output has two sums, of the columns that VPMADDWD takes together."""
    i16, b = w.ir.IntType(16), w.b
    weights = b.zext(unsigned, w.vector(i16, 64))
    four = b.bitcast(b.sext(b.bitcast(signed, w.vector(w.i8, 4)), w.vector(i16, 4)), w.i64)
    inputs, parts = b.bitcast(w.splat(four, 4), w.vector(i16)), []
    for i in range(4):
        pick = w.constant(w.i32, [16 * i + j for j in ALL])
        some, kind = b.shuffle_vector(weights, weights, pick), w.vector(w.i32, 8)
        parts.append(w.intrinsic("llvm.x86.avx2.pmadd.wd", kind, some, inputs))
    while len(parts) > 1:
        both = w.constant(w.i32, list(range(2 * parts[0].type.count)), 2 * parts[0].type.count)
        parts = [b.shuffle_vector(x, y, both) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return b.add(sums, parts[0])


def _begun_pairs(w: Emitter, start: Any) -> Any:
    """The first of an output's two sums begins with ``start``, the second with 0."""
    places = w.constant(w.i32, [x for i in ALL for x in (i, 16 + i)], 32)
    return w.b.shuffle_vector(w.splat(start), w.constant(w.i32, 0), places)


def _ended_pairs(w: Emitter, sums: Any) -> Any:
    halves = (w.constant(w.i32, [2 * i + j for i in ALL]) for j in (0, 1))
    first, second = (w.b.shuffle_vector(sums, sums, half) for half in halves)
    return w.b.add(first, second)


DOTS = {
    "avx512vnni": Dots(Emitter.splat, _whole, lambda w, sums: sums),
    "avxvnni": Dots(Emitter.splat, _halves, lambda w, sums: sums),
    "avx2": Dots(_begun_pairs, _pairs, _ended_pairs),
}
