"""LLVM for :mod:`zfunc.kernels.onebit`: sixteen signs are one instruction, a mask, two bytes.

With groups memory is passed over once: a group is summed and sent while it is in the first cache.
With one scale it is passed over twice. Sums are taken in float64, a part of fixed size at a time
and in a fixed order, that of the twin: the bits are the same, however many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels.flat_llvm import call, lanes, least, read, runs, shared_out, write, written
from zfunc.kernels.llvm import Emitter, host
from zfunc.kernels.onebit_torch import LANES, PART, ROWS, Packing, scale_of

__all__ = [
    "mean_pieces",
    "onebit_mean",
    "onebit_pack",
    "onebit_unpack",
    "pack_pieces",
    "unpack_pieces",
]

F32 = torch.float32
PACKING = ("x", "error", "shares", "workers", "width", "groups", "new", "bits", "scale")

Values = Callable[[Any, Any], Any]


def onebit_pack(packing: Packing, *, group: int, scaling: str) -> None:
    """For a worker, or for a server; ``group`` is 0 for one scale."""
    x, scales, error, new, bits, scale = packing
    n, isa, shares = new.numel(), host().isa, packing.shares
    kind = x.dtype if scales is None else torch.uint8
    sizes = (0, 0, 0) if scales is None else (*x.shape, scales.shape[1])
    into = (x, error, shares, *sizes, new, bits, scale)
    if group:
        call(_grouping(isa, kind, group, scaling), n, *into, n)
        return
    sums = new.new_zeros(1 + -(-n // PART), dtype=torch.float64)
    call(_summing(isa, kind, scaling), n, *into, sums[1:], n)
    scale.copy_(scale_of(sums, n, scaling))
    call(_sending(isa), n, *into, n)


onebit_mean = onebit_pack  # whether there are scales tells them apart


def onebit_unpack(bits: Tensor, scale: Tensor, out: Tensor, *, group: int) -> None:
    """Bits to values, of one sender or of one in each row."""
    n = out.shape[-1]
    columns = (x.view(-1, x.shape[-1]) for x in (bits, scale, out))
    for row in zip(*columns, strict=True) if out.numel() else ():
        call(_unpacking(host().isa, out.dtype, group), n, *row, n)


# Groups of any length, each where a table says: rows of where a group begins and ends among the
# elements, and where its scale and its first byte of signs are among the bytes; int64 [4, groups].


def pack_pieces(x: Tensor, error: Tensor, data: Tensor, table: Tensor, scaling: str) -> None:
    """As :func:`onebit_pack` with groups, into the bytes ``data``; float32, the new error in
    ``error``."""
    kernel, count = _tabled(host().isa, x.dtype, scaling), table.shape[1]
    call(kernel, error.numel(), x, 1, 0, error, data, table, count)


def mean_pieces(rows: Tensor, error: Tensor, data: Tensor, table: Tensor, scaling: str) -> None:
    """As :func:`onebit_mean`, of a row of bytes from each worker."""
    kernel, count = _tabled(host().isa, torch.uint8, scaling), table.shape[1]
    call(kernel, error.numel(), rows, *rows.shape, error, data, table, count)


def unpack_pieces(data: Tensor, out: Tensor, table: Tensor) -> None:
    """As :func:`onebit_unpack`, of one sender."""
    call(_untabled(host().isa, out.dtype), out.numel(), data, out, table, table.shape[1])


@written(*PACKING, "sums", "n")
def _summing(w: Emitter, kind: torch.dtype, scaling: str) -> None:
    """Values into ``new``, and what they sum to for each part of them."""
    a = w.arguments
    with runs(w, a["n"], PART) as (index, start, stop):
        total = _sum(w, start, stop, _source(w, kind, _share(w, w.n(0))), scaling)
        w.store(total, w.at(a["sums"], w.times(index, 8)))


@written(*PACKING, "n")
def _sending(w: Emitter) -> None:
    """Signs and what is left of the values in ``new``, with one scale."""
    a = w.arguments
    scale = w.splat(w.load(w.at(a["scale"], 0), w.f32))
    shared_out(w, a["n"], lambda at, mask: _send(w, at, mask, scale, a["bits"]))


@written(*PACKING, "n")
def _grouping(w: Emitter, kind: torch.dtype, group: int, scaling: str) -> None:
    """All of it group by group, each with its scale."""
    a = w.arguments
    with runs(w, a["n"], group) as (index, start, stop):
        values = _source(w, kind, _share(w, index))
        place = w.at(a["scale"], w.times(index, 4))
        _one_group(w, start, stop, values, scaling, place, a["bits"])


@written("x", "workers", "width", "new", "data", "table", "count")
def _tabled(w: Emitter, kind: torch.dtype, scaling: str) -> None:
    """All of it group by group, each where the table says."""
    a = w.arguments
    a["error"] = a["new"]
    workers = w.b.sitofp(a["workers"], w.f32)
    with w.loop(*w.share(a["count"])) as each:
        start, stop, scale, bits = _row(w, each.index)

        def share(row: Any, worker: Any, scale: Any = scale) -> Any:
            return w.b.fdiv(w.load(w.at(row, scale), w.f32), workers)

        values = _source(w, kind, share, bits)
        place = w.at(a["data"], scale)
        _one_group(w, start, stop, values, scaling, place, w.at(a["data"], bits))


@written("data", "out", "table", "count")
def _untabled(w: Emitter, dtype: torch.dtype) -> None:
    a = w.arguments
    with w.loop(*w.share(a["count"])) as each:
        start, stop, scale, bits = _row(w, each.index)
        one = w.splat(w.load(w.at(a["data"], scale), w.f32))
        expand = _expanding(w, dtype, one, w.at(a["data"], bits))
        lanes(w, start, stop, lambda at, mask, _: expand(at, mask))


@written("bits", "scale", "out", "n")
def _unpacking(w: Emitter, dtype: torch.dtype, group: int) -> None:
    a = w.arguments
    if not group:
        one = w.splat(w.load(w.at(a["scale"], 0), w.f32))
        shared_out(w, a["n"], _expanding(w, dtype, one, a["bits"]))
        return
    with runs(w, a["n"], group) as (index, start, stop):
        one = w.splat(w.load(w.at(a["scale"], w.times(index, 4)), w.f32))
        expand = _expanding(w, dtype, one, a["bits"])
        lanes(w, start, stop, lambda at, mask, _: expand(at, mask))


def _expanding(w: Emitter, dtype: torch.dtype, scale: Any, bits: Any) -> Callable[[Any, Any], None]:
    """Writes 16 values to ``out``: plus or minus the scale, as the bits say."""

    def expand(at: Any, mask: Any) -> None:
        write(w, w.arguments["out"], at, _signed(w, _mask(w, bits, at, mask), scale), dtype, mask)

    return expand


def _row(w: Emitter, index: Any) -> list[Any]:
    """Of one group: its first and last (excluded) element, and where in the bytes its scale is, and
    where its signs would begin if they were those of element 0."""
    a = w.arguments
    start, stop, scale, bits = (
        w.load(w.at(a["table"], w.times(w.sum(w.times(a["count"], k), index), 8)), w.i64)
        for k in range(4)
    )
    return [start, stop, scale, w.b.sub(bits, w.b.lshr(start, w.n(3)))]


def _one_group(
    w: Emitter, start: Any, stop: Any, values: Values, scaling: str, place: Any, bits: Any
) -> None:
    """Sum the values of a group, store its scale, send them; ``bits`` as :func:`_send` has it."""
    b = w.b
    total = _sum(w, start, stop, values, scaling)
    average = b.fdiv(total, b.sitofp(b.sub(stop, start), w.f64))
    if scaling == "rms":
        average = w.intrinsic("llvm.sqrt.f64", w.f64, average)
    one = b.fptrunc(average, w.f32)
    w.store(one, place)
    scale = w.splat(one)
    lanes(w, start, stop, lambda at, mask, _: _send(w, at, mask, scale, bits))


def _share(w: Emitter, group: Any) -> Callable[[Any, Any], Any]:
    """What one worker adds to or takes from an element of a group."""
    a = w.arguments

    def share(row: Any, worker: Any) -> Any:
        spot = w.times(w.sum(w.times(worker, a["groups"]), group), 4)
        return w.load(w.at(a["shares"], spot), w.f32)

    return share


def _source(
    w: Emitter, kind: torch.dtype, share: Callable[[Any, Any], Any], bits: Any = 0
) -> Values:
    """Writes 16 values: ``x`` plus the error, or the error plus what all workers sent.

    Args:
        share: of a worker's bytes, and its number.
        bits: where in a worker's bytes the signs are.
    """
    a = w.arguments

    def both(at: Any, mask: Any) -> Any:
        return w.b.fadd(read(w, a["x"], at, kind, mask), read(w, a["error"], at, F32, mask))

    def all_(at: Any, mask: Any) -> Any:
        error = read(w, a["error"], at, F32, mask)
        with w.loop(0, a["workers"], carried=[error]) as worker:
            row = w.at(a["x"], w.times(worker.index, a["width"]))
            own = w.splat(share(row, worker.index))
            theirs = _signed(w, _mask(w, w.at(row, bits), at, mask), own)
            worker.then = [w.b.fadd(worker.values[0], theirs)]
        return worker.values[0]

    made = all_ if kind == torch.uint8 else both

    def into(at: Any, mask: Any) -> Any:
        values = made(at, mask)
        write(w, a["new"], at, values, F32, mask)
        return values

    return into


def _sum(w: Emitter, start: Any, stop: Any, values: Values, scaling: str) -> Any:
    """The sum of squares or of absolute values, a float64: of each block, of those, of lanes."""
    b, wide = w.b, w.vector(w.f64)

    def more(at: Any, mask: Any, sums: Any) -> list[Any]:
        x = values(at, mask)
        if mask is not None:  # beyond the end a worker's bits would count
            x = b.select(mask, x, w.constant(w.f32, 0.0))
        if scaling == "mean":
            return [b.fadd(sums[0], b.fpext(w.intrinsic("llvm.fabs.v16f32", x.type, x), wide))]
        x = b.fpext(x, wide)
        return [w.intrinsic("llvm.fma.v16f64", wide, x, x, sums[0])]

    none = w.constant(w.f64, 0.0)
    with w.loop(start, stop, LANES * ROWS, [none]) as block:
        end = least(w, w.sum(block.index, LANES * ROWS), stop)
        block.then = [b.fadd(block.values[0], lanes(w, block.index, end, more, [none])[0])]
    zero = w.ir.Constant(w.f64, 0.0)
    return w.intrinsic("llvm.vector.reduce.fadd.v16f64", w.f64, zero, block.values[0])


def _send(w: Emitter, at: Any, mask: Any, scale: Any, bits: Any) -> None:
    """The signs of 16 values of ``new`` to ``bits``, what they do not say to ``new``."""
    b, a = w.b, w.arguments
    x = read(w, a["new"], at, F32, mask)
    positive = b.icmp_signed(">=", b.bitcast(x, w.vector(w.i32)), w.constant(w.i32, 0))
    left = b.fsub(x, _signed(w, positive, scale))
    write(w, a["new"], at, left, F32, mask)
    address = w.at(bits, b.lshr(at, w.n(3)))
    if mask is None:
        w.store(b.bitcast(positive, w.i16), address)
    else:
        pair = b.bitcast(b.bitcast(b.and_(positive, mask), w.i16), w.vector(w.i8, 2))
        w.store(pair, address, mask=_bytes(w, mask))


def _mask(w: Emitter, bits: Any, at: Any, mask: Any) -> Any:
    """Which of 16 elements are positive."""
    address = w.at(bits, w.b.lshr(at, w.n(3)))
    if mask is None:
        word = w.load(address, w.i16)
    else:
        word = w.b.bitcast(w.load(address, w.vector(w.i8, 2), mask=_bytes(w, mask)), w.i16)
    return w.b.bitcast(word, w.vector(w.i1))


def _bytes(w: Emitter, mask: Any) -> Any:
    """Which of the two bytes of signs exist: those whose first element does."""
    firsts = w.constant(w.i32, [0, 8], 2)
    return w.b.shuffle_vector(mask, mask, firsts)


def _signed(w: Emitter, positive: Any, scale: Any) -> Any:
    return w.b.select(positive, scale, w.b.fneg(scale))
