"""Torch for :mod:`zfunc.kernels.onebit`: blocks that stay in cache, a pass or two over memory.

Signs are taken and put on as bits of the floats themselves. Eight of them, one a byte, are
packed by one multiplication of a 64-bit integer, and unpacked by a table of 256 rows. Sums are
taken in float64 in a fixed order, that of machine code, so that both give the same bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LANES", "PART", "ROWS", "Packing", "pack_twin", "scale_of", "unpack_twin"]

CHUNK = 1 << 17  # a multiple of every group; a buffer of 512 KiB
PART = 1 << 13  # elements that are summed together where there is one scale
LANES, ROWS = 16, 16  # elements of a row, and rows of a block: the order of a sum
# Byte i of a 64-bit integer, 0 or 1, ends up as bit 56 + i of the product (little-endian).
GATHER = 0x0102040810204080


class Packing(NamedTuple):
    """What is compressed, and what that gives; contiguous.

    Attributes:
        x: ``[n]``; at a server what workers sent, ``uint8[W, bytes]``.
        scales: of what they sent, a row for each; ``None`` at a worker.
        error: ``[n]``, added to the values.
        new: the error that is left; may be ``error``.
        bits, scale: what is sent.
    """

    x: Tensor
    scales: Tensor | None
    error: Tensor
    new: Tensor
    bits: Tensor
    scale: Tensor

    @property
    def shares(self) -> Tensor | None:
        """What each worker adds to the mean."""
        return None if self.scales is None else self.scales / self.x.shape[0]


def pack_twin(packing: Packing, *, group: int, scaling: str) -> None:
    """Fill ``new`` with the values, then send them and keep the error in it; one scale with 0."""
    x, _, error, new, bits, scale = packing
    shares, n = packing.shares, new.numel()
    scratch = new.new_empty(_room(n))

    def fill(a: int, b: int) -> Tensor:
        out = new[a:b]
        if shares is None:
            part = x[a:b] if x.dtype == out.dtype else scratch[: b - a].copy_(x[a:b])
            return torch.add(part, error[a:b], out=out)
        if out.data_ptr() != error[a:].data_ptr():
            out.copy_(error[a:b])
        for its, share in zip(x, shares, strict=True):
            signs = _rows(_signs(its, a, b, scratch), group)
            total = _rows(out, group)
            torch.addcmul(total, signs, _its(share, a, b, group), out=total)
        return out

    chunks = list(_chunks(n, group))
    room = new.new_empty(min(CHUNK, n + -n % PART), dtype=torch.float64)
    if not group:
        parts = [new.new_zeros(1, dtype=torch.float64)]
        parts += [_sums(fill(a, b), PART, scaling, room).clone() for a, b in chunks]
        scale.copy_(scale_of(torch.cat(parts), n, scaling))
    send = _Sender(new)
    for a, b in chunks:
        values, its = new[a:b], _its(scale, a, b, group)
        if group:
            size = min(group, b - a)
            sums = _sums(fill(a, b), size, scaling, room)
            its.copy_(scale_of(sums[None], size, scaling)[:, None])
        send(values, its, bits[a // 8 : -(-b // 8)], group)


def unpack_twin(bits: Tensor, scale: Tensor, out: Tensor, *, group: int) -> None:
    """Bits to values, of one sender or of one in each row."""
    if not out.numel():
        return
    n = out.shape[-1]
    room = scale.new_empty(_room(n))
    columns = (x.view(-1, x.shape[-1]) for x in (out, bits, scale))
    for target, mine, its in zip(*columns, strict=True):
        for a, b in _chunks(n, group):
            rows = _rows(_signs(mine, a, b, room), group)
            target[a:b].copy_(rows.mul_(_its(its, a, b, group)).view(-1))


def _sums(x: Tensor, size: int, scaling: str, room: Tensor) -> Tensor:
    """Of each ``size`` elements the sum of squares, or of absolute values; ``room`` is float64."""
    n, count = x.numel(), min(ROWS, -(-size // LANES))
    wide = room[: -(-n // size) * (size + -size % (count * LANES))]
    wide[:n].copy_(x)
    wide[n:].zero_()
    wide = wide.abs_() if scaling == "mean" else wide.mul_(wide)
    rows = wide.view(-(-n // size), -1, count, LANES).unbind(2)
    blocks = functools.reduce(operator.iadd, rows)
    return blocks.cumsum(1)[:, -1].cumsum(1)[:, -1]  # which adds one by one


def scale_of(sums: Tensor, count: int, scaling: str) -> Tensor:
    """The scale of ``count`` elements from sums of their parts, along the first dimension."""
    mean = sums.cumsum(0)[-1] / max(count, 1)  # in order, whatever the number of threads
    return mean if scaling == "mean" else mean.sqrt()


class _Sender:
    """Takes the signs of values and what is sent from them, in scratch of its own."""

    def __init__(self, like: Tensor) -> None:
        size = _room(like.numel())
        single = like.dtype == torch.float32
        self.integers = torch.int32 if single else torch.int64
        self.top = 31 if single else 63
        self.scratch = like.new_empty(size)
        self.bytes = like.new_empty(size, dtype=torch.uint8)
        self.words = like.new_empty(size // 8, dtype=torch.int64)

    def __call__(self, values: Tensor, scale: Tensor, bits: Tensor, group: int) -> None:
        n, room = values.numel(), 8 * bits.numel()
        mine = values.view(self.integers)
        sent = self.scratch[:n].view(self.integers)
        torch.bitwise_right_shift(mine, self.top, out=sent)  # 0, or -1 where negative
        self.bytes[:n].copy_(sent).add_(1)
        self.bytes[n:room].zero_()
        words = self.words[: bits.numel()]
        torch.mul(self.bytes[:room].view(torch.int64), GATHER, out=words)
        bits.copy_(words.bitwise_right_shift_(56))
        torch.bitwise_and(mine, -(1 << self.top), out=sent)
        _rows(sent, group).bitwise_or_(scale.view(self.integers))
        values.sub_(self.scratch[:n])


def _signs(bits: Tensor, a: int, b: int, room: Tensor) -> Tensor:
    """1 or -1 for elements ``a`` to ``b``, in ``room``."""
    mine = bits[a // 8 : -(-b // 8)]
    out = room[: 8 * mine.numel()].view(-1, 8)
    out.copy_(_table(room.dtype).to(room.device)[mine.int()])
    return room[: b - a]


@functools.cache
def _table(dtype: torch.dtype) -> Tensor:
    """For each byte its eight signs."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (2 * bits - 1).to(dtype)


def _chunks(n: int, group: int) -> Iterator[tuple[int, int]]:
    """Ranges to work on; the last group, if it is shorter, is one of its own."""
    whole = n - n % group if group else n
    for a in range(0, whole, CHUNK):
        yield a, min(a + CHUNK, whole)
    if whole < n:
        yield whole, n


def _rows(x: Tensor, group: int) -> Tensor:
    return x.view(-1, min(group, x.numel()) if group else x.numel())


def _its(scale: Tensor, a: int, b: int, group: int) -> Tensor:
    """The scales of elements ``a`` to ``b``, as a column."""
    return (scale[a // group : -(-b // group)] if group else scale)[:, None]


def _room(n: int) -> int:
    return min(CHUNK, n + -n % 8)
