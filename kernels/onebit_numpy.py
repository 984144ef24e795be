"""NumPy for :mod:`zfunc.kernels.onebit` on a CPU: blocks that stay in cache.

A block is short, so that what it costs to begin an operation counts; NumPy's begin at once, and
pack bits in vectors. Signs are taken and put on as bits of the floats themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["mean", "pack", "unpack"]

CHUNK = 1 << 16  # a multiple of every group; blocks of 256 KiB, of which four are at work

Array = np.ndarray[Any, Any]
Fill = Callable[[int, int, Array], None]


def pack(
    x: Tensor, error: Tensor, new: Tensor, bits: Tensor, scale: Tensor, group: int, scaling: str
) -> None:
    """``new`` may be ``error``. All contiguous; ``group`` is 0 for one scale."""
    old = error.numpy()
    mine = x.numpy() if x.dtype == error.dtype else None  # NumPy has no bfloat16

    def fill(a: int, b: int, out: Array) -> None:
        part = x[a:b].to(error.dtype).numpy() if mine is None else mine[a:b]
        np.add(part, old[a:b], out=out)

    _compress(fill, new, bits, scale, group, scaling)


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
    old, shares = error.numpy(), (scales / received.shape[0]).numpy()
    room, workers = _room(error), list(zip(received.numpy(), shares, strict=True))

    def fill(a: int, b: int, out: Array) -> None:
        if new is not error:
            out[...] = old[a:b]
        for its, share in workers:
            np.add(out, _values(its, share, a, b, group, room), out=out)

    _compress(fill, new, bits, scale, group, scaling)


def unpack(bits: Tensor, scale: Tensor, out: Tensor, group: int) -> None:
    """Bits to values, of one sender or of one in each row."""
    if not out.numel():
        return
    room, direct = _room(scale), out.dtype == scale.dtype
    columns = (x.view(-1, x.shape[-1]) for x in (out, bits, scale))
    for target, mine, its in zip(*columns, strict=True):
        for a, b in _chunks(len(target), group):
            # Not beyond its end: the last byte may hold fewer than eight signs.
            here = target[a:b].numpy() if direct and (b - a) % 8 == 0 else room
            values = _values(mine.numpy(), its.numpy(), a, b, group, here)
            if here is room:
                target[a:b].copy_(torch.from_numpy(values))


@np.errstate(invalid="ignore", over="ignore")  # what is not finite is for the caller to find
def _compress(
    fill: Fill, into: Tensor, out: Tensor, scales: Tensor, group: int, scaling: str
) -> None:
    """Fill ``into`` with the values, then send them and keep the error in it."""
    new, bits, scale = into.numpy(), out.numpy(), scales.numpy()
    room, integers = _room(into), np.int32 if new.itemsize == 4 else np.int64
    signs, top = np.empty(len(room), bool), integers(np.iinfo(integers).min)
    if not group:
        total = 0.0
        for a, b in _chunks(len(new), 0):
            fill(a, b, new[a:b])
            total += float(_sums(new[a:b][None], scaling, room)[0, 0])
        scale[0] = _scale(np.float64(total / max(len(new), 1)), scaling)
    for a, b in _chunks(len(new), group):
        values, sent = new[a:b], room[: b - a]
        its = _its(scale, a, b, group)
        if group:
            fill(a, b, values)
            rows = values.reshape(len(its), -1)
            its[...] = _scale(_sums(rows, scaling, room) / rows.shape[1], scaling)
        np.signbit(values, out=signs[: b - a])
        packed = np.packbits(signs[: b - a], bitorder="little")
        np.invert(packed, out=bits[a // 8 : -(-b // 8)])
        signed = sent.view(integers)
        np.bitwise_and(values.view(integers), top, out=signed)
        rows = signed.reshape(len(its), -1)
        np.bitwise_or(rows, its.view(integers), out=rows)
        np.subtract(values, sent, out=values)
    if rest := len(new) % 8:
        bits[-1] &= (1 << rest) - 1


def _sums(rows: Array, scaling: str, room: Array) -> Array:
    """The sum of each row's squares, or of its absolute values, as a column."""
    sizes = room[: rows.size].reshape(rows.shape)
    (np.abs if scaling == "mean" else np.square)(rows, out=sizes)
    return np.add.reduce(sizes, axis=1, keepdims=True)


def _scale(means: Any, scaling: str) -> Any:
    return means if scaling == "mean" else np.sqrt(means)


def _values(bits: Array, scale: Array, a: int, b: int, group: int, room: Array) -> Array:
    """What elements ``a`` to ``b`` stand for, in ``room``."""
    mine, its = bits[a // 8 : -(-b // 8)], _its(scale, a, b, group)
    out = room[: 8 * len(mine)].reshape(-1, 8)
    np.take(_table(scale.dtype), mine, axis=0, out=out, mode="clip")
    values = room[: b - a]
    rows = values.reshape(len(its), -1)
    np.multiply(rows, its, out=rows)
    return values


@functools.cache
def _table(dtype: Any) -> Array:
    """For each byte its eight signs."""
    return (2 * (np.arange(256)[:, None] >> np.arange(8) & 1) - 1).astype(dtype)


def _chunks(n: int, group: int) -> Iterator[tuple[int, int]]:
    """Ranges to work on; the last group, if it is shorter, is one of its own."""
    whole = n - n % group if group else n
    for a in range(0, whole, CHUNK):
        yield a, min(a + CHUNK, whole)
    if whole < n:
        yield whole, n


def _its(scale: Array, a: int, b: int, group: int) -> Array:
    """The scales of elements ``a`` to ``b``, as a column."""
    return (scale[a // group : -(-b // group)] if group else scale)[:, None]


def _room(like: Tensor) -> Array:
    return like.new_empty(CHUNK).numpy()
