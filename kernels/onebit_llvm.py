"""LLVM for :mod:`zfunc.kernels.onebit`: sixteen signs are one instruction, a mask, two bytes.

With groups memory is passed over once: a group is summed and sent while it is in the first cache.
With one scale it is passed over twice. Sums are taken in float64, a part of fixed size at a time
and in a fixed order, that of the twin: the bits are the same, however many threads there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import llvm
from zfunc.kernels.flat_llvm import ALONE, lanes, read, shared_out, write
from zfunc.kernels.llvm import Writer, host
from zfunc.kernels.onebit_torch import LANES, PART, ROWS, scale_of

__all__ = ["mean", "mean_pieces", "pack", "pack_pieces", "unpack", "unpack_pieces"]

F32 = torch.float32
SOURCE = ("x", "error", "shares", "workers", "width", "groups")
INTO = ("new", "bits", "scale", "sums", "n")

Values = Callable[[Any, Any], Any]


def pack(
    x: Tensor, error: Tensor, new: Tensor, bits: Tensor, scale: Tensor, group: int, scaling: str
) -> None:
    """``new`` may be ``error``. All contiguous; ``group`` is 0 for one scale."""
    source = (x.data_ptr(), error.data_ptr(), 0, 0, 0, 0)
    _compress(x.dtype, source, new, bits, scale, group, scaling)


def mean(
    received: Tensor,
    scales: Tensor,
    error: Tensor,
    new: Tensor,
    bits: Tensor,
    scale: Tensor,
    group: int,
    scaling: str,
) -> None:
    """``new`` may be ``error``. ``received`` and ``scales`` have a row for each worker."""
    shares = scales / received.shape[0]
    addresses = (received.data_ptr(), error.data_ptr(), shares.data_ptr())
    source = (*addresses, *received.shape, shares.shape[1])
    _compress(torch.uint8, source, new, bits, scale, group, scaling)


def unpack(bits: Tensor, scale: Tensor, out: Tensor, group: int) -> None:
    """Bits to values, of one sender or of one in each row."""
    n = out.shape[-1]
    columns = (x.view(-1, x.shape[-1]) for x in (bits, scale, out))
    for row in zip(*columns, strict=True) if out.numel() else ():
        _unpacking(host().isa, out.dtype, group)(
            [*(x.data_ptr() for x in row), n], 1 if n < ALONE else 0
        )


# Groups of any length, each where a table says: rows of where a group begins and ends among the
# elements, and where its scale and its first byte of signs are among the bytes; int64 [4, groups].


def pack_pieces(x: Tensor, error: Tensor, data: Tensor, table: Tensor, scaling: str) -> None:
    """As :func:`pack` with groups, into the bytes ``data``; float32, the new error in ``error``."""
    _tabled(host().isa, x.dtype, scaling)(
        *_among(table, error, x.data_ptr(), 1, 0, error.data_ptr(), data.data_ptr())
    )


def mean_pieces(rows: Tensor, error: Tensor, data: Tensor, table: Tensor, scaling: str) -> None:
    """As :func:`mean`, of a row of bytes from each worker."""
    _tabled(host().isa, torch.uint8, scaling)(
        *_among(table, error, rows.data_ptr(), *rows.shape, error.data_ptr(), data.data_ptr())
    )


def unpack_pieces(data: Tensor, out: Tensor, table: Tensor) -> None:
    """As :func:`unpack`, of one sender."""
    _untabled(host().isa, out.dtype)(*_among(table, out, data.data_ptr(), out.data_ptr()))


def _among(table: Tensor, like: Tensor, *arguments: int) -> tuple[list[int], int]:
    """What a kernel over a table is called with: its arguments, and how many threads."""
    return [*arguments, table.data_ptr(), table.shape[1]], 1 if like.numel() < ALONE else 0


def _compress(
    kind: torch.dtype,
    source: tuple[int, ...],
    new: Tensor,
    bits: Tensor,
    scale: Tensor,
    group: int,
    scaling: str,
) -> None:
    n, isa = new.numel(), host().isa
    sums = new.new_zeros(1 if group else 1 + -(-n // PART), dtype=torch.float64)
    into = [x.data_ptr() for x in (new, bits, scale, sums[1:])]
    threads = 1 if n < ALONE else 0
    arguments = [*source, *into, n]
    if group:
        _grouping(isa, kind, group, scaling)(arguments, threads)
        return
    _summing(isa, kind, scaling)(arguments, threads)
    scale.copy_(scale_of(sums, n, scaling))
    _sending(isa)(arguments, threads)


@functools.cache
@llvm.once
def _summing(isa: str, kind: torch.dtype, scaling: str) -> llvm.Kernel:
    """Values into ``new``, and what they sum to for each part of them."""
    w = Writer("summing", SOURCE + INTO)
    b, a = w.b, w.arguments
    first, last = w.share(b.udiv(w.sum(a["n"], PART - 1), w.n(PART)))
    with w.loop(first, last) as part:
        start, stop = _span(w, part.index, PART)
        total = _sum(w, start, stop, _source(w, kind, _share(w, w.n(0))), scaling)
        w.store(total, w.at(a["sums"], w.times(part.index, 8)))
    return llvm.compiled(w.done(), "summing", isa)


@functools.cache
@llvm.once
def _sending(isa: str) -> llvm.Kernel:
    """Signs and what is left of the values in ``new``, with one scale."""
    w = Writer("sending", SOURCE + INTO)
    a = w.arguments
    scale = w.splat(w.load(w.at(a["scale"], 0), w.f32))
    shared_out(w, a["n"], lambda at, mask: _send(w, at, mask, scale, a["bits"]))
    return llvm.compiled(w.done(), "sending", isa)


@functools.cache
@llvm.once
def _grouping(isa: str, kind: torch.dtype, group: int, scaling: str) -> llvm.Kernel:
    """All of it group by group, each with its scale."""
    w = Writer("grouping", SOURCE + INTO)
    b, a = w.b, w.arguments
    first, last = w.share(b.udiv(w.sum(a["n"], group - 1), w.n(group)))
    with w.loop(first, last) as each:
        start, stop = _span(w, each.index, group)
        values = _source(w, kind, _share(w, each.index))
        place = w.at(a["scale"], w.times(each.index, 4))
        _one_group(w, start, stop, values, scaling, place, a["bits"])
    return llvm.compiled(w.done(), "grouping", isa)


@functools.cache
@llvm.once
def _tabled(isa: str, kind: torch.dtype, scaling: str) -> llvm.Kernel:
    """All of it group by group, each where the table says."""
    w = Writer("tabled", ("x", "workers", "width", "new", "data", "table", "count"))
    a = w.arguments
    a["error"] = a["new"]
    workers = w.b.sitofp(a["workers"], w.f32)
    first, last = w.share(a["count"])
    with w.loop(first, last) as each:
        start, stop, scale, bits = _row(w, each.index)

        def share(row: Any, worker: Any, scale: Any = scale) -> Any:
            return w.b.fdiv(w.load(w.at(row, scale), w.f32), workers)

        values = _source(w, kind, share, bits)
        place = w.at(a["data"], scale)
        _one_group(w, start, stop, values, scaling, place, w.at(a["data"], bits))
    return llvm.compiled(w.done(), "tabled", isa)


@functools.cache
@llvm.once
def _untabled(isa: str, dtype: torch.dtype) -> llvm.Kernel:
    w = Writer("untabled", ("data", "out", "table", "count"))
    a = w.arguments
    first, last = w.share(a["count"])
    with w.loop(first, last) as each:
        start, stop, scale, bits = _row(w, each.index)
        one, signs = w.splat(w.load(w.at(a["data"], scale), w.f32)), w.at(a["data"], bits)

        def values(at: Any, mask: Any, _: Any, one: Any = one, signs: Any = signs) -> None:
            write(w, a["out"], at, _signed(w, _mask(w, signs, at, mask), one), dtype, mask)

        lanes(w, start, stop, values)
    return llvm.compiled(w.done(), "untabled", isa)


def _row(w: Writer, index: Any) -> list[Any]:
    """Of one group: its first and last (excluded) element, and where in the bytes its scale is, and
    where its signs would begin if they were those of element 0."""
    a = w.arguments
    start, stop, scale, bits = (
        w.load(w.at(a["table"], w.times(w.sum(w.times(a["count"], k), index), 8)), w.i64)
        for k in range(4)
    )
    return [start, stop, scale, w.b.sub(bits, w.b.lshr(start, w.n(3)))]


def _one_group(
    w: Writer, start: Any, stop: Any, values: Values, scaling: str, place: Any, bits: Any
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


@functools.cache
@llvm.once
def _unpacking(isa: str, dtype: torch.dtype, group: int) -> llvm.Kernel:
    w = Writer("unpacking", ("bits", "scale", "out", "n"))
    a = w.arguments

    def values(at: Any, mask: Any, scale: Any) -> None:
        write(w, a["out"], at, _signed(w, _mask(w, a["bits"], at, mask), scale), dtype, mask)

    if not group:
        scale = w.splat(w.load(w.at(a["scale"], 0), w.f32))
        shared_out(w, a["n"], lambda at, mask: values(at, mask, scale))
        return llvm.compiled(w.done(), "unpacking", isa)
    first, last = w.share(w.b.udiv(w.sum(a["n"], group - 1), w.n(group)))
    with w.loop(first, last) as each:
        one = w.splat(w.load(w.at(a["scale"], w.times(each.index, 4)), w.f32))
        start, stop = _span(w, each.index, group)
        lanes(w, start, stop, lambda at, mask, _: values(at, mask, one))
    return llvm.compiled(w.done(), "unpacking", isa)


def _span(w: Writer, index: Any, size: int) -> tuple[Any, Any]:
    """First and last (excluded) element of a part."""
    start, n = w.times(index, size), w.arguments["n"]
    end = w.sum(start, size)
    return start, w.b.select(w.b.icmp_signed("<", end, n), end, n)


def _share(w: Writer, group: Any) -> Callable[[Any, Any], Any]:
    """What one worker adds to or takes from an element of a group."""
    a = w.arguments

    def share(row: Any, worker: Any) -> Any:
        spot = w.times(w.sum(w.times(worker, a["groups"]), group), 4)
        return w.load(w.at(a["shares"], spot), w.f32)

    return share


def _source(
    w: Writer, kind: torch.dtype, share: Callable[[Any, Any], Any], bits: Any = 0
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


def _sum(w: Writer, start: Any, stop: Any, values: Values, scaling: str) -> Any:
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
        end = w.sum(block.index, LANES * ROWS)
        end = b.select(b.icmp_signed("<", end, stop), end, stop)
        block.then = [b.fadd(block.values[0], lanes(w, block.index, end, more, [none])[0])]
    zero = w.ir.Constant(w.f64, 0.0)
    return w.intrinsic("llvm.vector.reduce.fadd.v16f64", w.f64, zero, block.values[0])


def _send(w: Writer, at: Any, mask: Any, scale: Any, bits: Any) -> None:
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
        w.masked_store(pair, address, _bytes(w, mask))


def _mask(w: Writer, bits: Any, at: Any, mask: Any) -> Any:
    """Which of 16 elements are positive."""
    address = w.at(bits, w.b.lshr(at, w.n(3)))
    if mask is None:
        word = w.load(address, w.i16)
    else:
        word = w.b.bitcast(w.masked_load(address, w.vector(w.i8, 2), _bytes(w, mask)), w.i16)
    return w.b.bitcast(word, w.vector(w.i1))


def _bytes(w: Writer, mask: Any) -> Any:
    """Which of the two bytes of signs exist: those whose first element does."""
    firsts = w.constant(w.i32, [0, 8], 2)
    return w.b.shuffle_vector(mask, mask, firsts)


def _signed(w: Writer, positive: Any, scale: Any) -> Any:
    return w.b.select(positive, scale, w.b.fneg(scale))
