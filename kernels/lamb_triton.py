"""Triton for :mod:`zfunc.kernels.lamb`: a program works on a tile, a piece of one segment.

Tiles are listed in a table on the device, made once for a layout: where each begins, how long
it is, to which segment it belongs. A whole tile is loaded without a mask, in wide loads.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.buffers.uploads import on_device
from zfunc.kernels import dispatch
from zfunc.kernels.flat_triton import betas, number
from zfunc.kernels.lamb import LambStep

__all__ = [
    "lamb_apply",
    "lamb_apply_kernel",
    "lamb_finish_kernel",
    "lamb_moments",
    "lamb_moments_kernel",
]


@triton.jit
def _direction(p, m, v, hyper):
    eps, decay = number(hyper, 3), number(hyper, 4)
    scale1, scale2 = number(hyper, 7), number(hyper, 8)
    return (m * scale1) / (tl.sqrt(v) * scale2 + eps) + decay * p


@triton.jit
def _moments_tile(g, p, m, v, hyper, start, length, FULL: tl.constexpr, BLOCK: tl.constexpr):
    b1, b2, rest1, rest2 = betas(hyper)
    at = start + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < (BLOCK if FULL else length)
    gs = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * number(hyper, 5)
    ps = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    ms = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    vs = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    ms = b1 * ms + rest1 * gs
    vs = b2 * vs + rest2 * gs * gs
    tl.store(m + at, ms, mask=inside)
    tl.store(v + at, vs, mask=inside)
    # Beyond the end u would be 0 / eps, which is NaN for an eps of 0.
    u = tl.where(inside, _direction(ps, ms, vs, hyper), 0.0)
    return tl.sum(ps * ps), tl.sum(u * u)


@triton.jit
def lamb_moments_kernel(
    g, p, m, v, tiles, parts, hyper, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    start = tl.load(tiles + 3 * tile)
    length = tl.load(tiles + 3 * tile + 1).to(tl.int32)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if length == BLOCK:
        squares = _moments_tile(g, p, m, v, hyper, start, length, True, BLOCK)
    else:
        squares = _moments_tile(g, p, m, v, hyper, start, length, False, BLOCK)
    tl.store(parts + 2 * tile, squares[0])
    tl.store(parts + 2 * tile + 1, squares[1])


@triton.jit
def lamb_finish_kernel(parts, first, squares, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    stop = tl.load(first + segment + 1).to(tl.int32)
    p = tl.zeros((BLOCK,), tl.float32)
    u = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(first + segment).to(tl.int32), stop, BLOCK):
        at = i + tl.arange(0, BLOCK)
        p += tl.load(parts + 2 * at, mask=at < stop, other=0.0)
        u += tl.load(parts + 2 * at + 1, mask=at < stop, other=0.0)
    tl.store(squares + 2 * segment, tl.sum(p))
    tl.store(squares + 2 * segment + 1, tl.sum(u))


@triton.jit
def _apply_tile(
    p, m, v, low, hyper, step, start, length,
    LOW: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < (BLOCK if FULL else length)
    ps = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    ms = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    vs = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    ps = ps - step * _direction(ps, ms, vs, hyper)
    tl.store(p + at, ps, mask=inside)
    if LOW:
        tl.store(low + at, ps.to(low.dtype.element_ty), mask=inside)


@triton.jit
def lamb_apply_kernel(
    p, m, v, low, tiles, ratios, hyper,
    LOW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start = tl.load(tiles + 3 * tile)
    length = tl.load(tiles + 3 * tile + 1).to(tl.int32)
    step = tl.load(ratios + tl.load(tiles + 3 * tile + 2)).to(tl.float32)
    step = step * number(hyper, 0)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if length == BLOCK:
        _apply_tile(p, m, v, low, hyper, step, start, length, LOW, True, BLOCK)
    else:
        _apply_tile(p, m, v, low, hyper, step, start, length, LOW, False, BLOCK)


@functools.lru_cache(maxsize=256)
def _tiles(
    starts: tuple[int, ...], stops: tuple[int, ...], block: int, device: torch.device
) -> tuple[Tensor, Tensor, bool]:
    """``[tiles, 3]``: start, length, segment; of each segment its first tile; whether every segment
    begins where wide loads may."""
    rows, first = [], [0]
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        rows += [(a, min(block, stop - a), i) for a in range(start, stop, block)]
        first.append(len(rows))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    begun = torch.tensor(first, dtype=torch.int64)
    aligned = all(start % 16 == 0 for start in starts)
    return on_device(table, device), on_device(begun, device), aligned


def _tiled(step: LambStep, block: int, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    return _tiles(tuple(step.starts), tuple(step.stops), block, device)


def lamb_moments(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, squares: Tensor, *, step: LambStep
) -> None:
    """Launch the first pass and its sums."""
    how = dispatch.config("lamb_moments", param.device)
    tiles, first, aligned = _tiled(step, how["BLOCK"], param.device)
    if not len(tiles):
        return
    parts = torch.empty(len(tiles), 2, dtype=torch.float32, device=param.device)
    lamb_moments_kernel[(len(tiles),)](
        grad, param, mu, nu, tiles, parts, step.hyper, ALIGNED=aligned, **how
    )
    lamb_finish_kernel[(len(step.starts),)](parts, first, squares, BLOCK=256)


def lamb_apply(
    param: Tensor, mu: Tensor, nu: Tensor, low: Tensor | None, ratios: Tensor, *, step: LambStep
) -> None:
    """Launch the second pass."""
    how = dispatch.config("lamb_apply", param.device)
    tiles, _, aligned = _tiled(step, how["BLOCK"], param.device)
    if not len(tiles):
        return
    lamb_apply_kernel[(len(tiles),)](
        *(param, mu, nu, param if low is None else low, tiles, ratios, step.hyper),
        LOW=low is not None,
        ALIGNED=aligned,
        **how,
    )
