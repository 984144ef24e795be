"""Triton for :mod:`zfunc.kernels.onebit`.

A program works on a tile of ``ROWS`` runs of ``GROUP`` elements, seen as ``[ROWS, GROUP/8, 8]``:
the last axis is a byte of signs. With groups each run has its own scale and one launch does
everything; with one scale a first launch sums, and the tile is only a piece of the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.onebit_torch import Packing

__all__ = [
    "onebit_mean",
    "onebit_pack",
    "onebit_pack_kernel",
    "onebit_sum_kernel",
    "onebit_unpack",
    "onebit_unpack_kernel",
]


@triton.jit
def _byte_numbers(ROWS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]


@triton.jit
def _received(
    bits, shares, workers, width, groups, byte, total, GROUPED: tl.constexpr, GROUP: tl.constexpr
):
    """``total`` plus what the workers sent."""
    lane = tl.arange(0, 8)[None, None, :]
    there = byte < width
    for w in range(workers):
        mine = tl.load(bits + w * width + byte, mask=there, other=0).to(tl.int32)
        if GROUPED:
            of = tl.program_id(0).to(tl.int64) * total.shape[0] + tl.arange(0, total.shape[0])
            share = tl.load(shares + w * groups + of, mask=of < groups, other=0.0)[:, None, None]
        else:
            share = tl.load(shares + w)
        total += tl.where(((mine[:, :, None] >> lane) & 1) == 1, share, -share)
    return total


@triton.jit
def _values(
    x, e, bits, shares, workers, width, groups, n, byte,
    SERVER: tl.constexpr, GROUPED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = at < n
    c = tl.load(e + at, mask=inside, other=0.0)
    if SERVER:
        c = _received(bits, shares, workers, width, groups, byte, c, GROUPED, GROUP)
        c = tl.where(inside, c, 0.0)
    else:
        c = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + c
    return c, at, inside


@triton.jit
def onebit_sum_kernel(
    x, e, bits, shares, workers, width, n, sums,
    SERVER: tl.constexpr, MEAN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    byte = _byte_numbers(ROWS, GROUP)
    c, _, _ = _values(x, e, bits, shares, workers, width, 1, n, byte, SERVER, False, GROUP)
    parts = tl.abs(c) if MEAN else c * c
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(tl.sum(parts, 2), 1), 0))


@triton.jit
def onebit_pack_kernel(
    x, e, bits, shares, workers, width, groups, n, e_new, bits_new, scale,
    SERVER: tl.constexpr, MEAN: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    byte = _byte_numbers(ROWS, GROUP)
    c, at, inside = _values(
        x, e, bits, shares, workers, width, groups, n, byte, SERVER, GROUPED, GROUP
    )
    if GROUPED:
        of = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        count = tl.maximum(tl.minimum(n - of * GROUP, GROUP), 1).to(tl.float32)
        parts = tl.abs(c) if MEAN else c * c
        s = tl.sum(tl.sum(parts, 2), 1) / count
        if not MEAN:
            s = tl.sqrt(s)
        tl.store(scale + of, s, mask=of < groups)
        s = s[:, None, None]
    else:
        s = tl.load(scale)
    positive = c.to(tl.int32, bitcast=True) >= 0
    tl.store(e_new + at, c - tl.where(positive, s, -s), mask=inside)
    ones = (positive & inside).to(tl.int32) << tl.arange(0, 8)[None, None, :]
    tl.store(bits_new + byte, tl.sum(ones, 2).to(tl.uint8), mask=byte < width)


@triton.jit
def onebit_unpack_kernel(
    bits, scale, out, width, groups, n,
    GROUPED: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    sender = tl.program_id(1).to(tl.int64)
    byte = _byte_numbers(ROWS, GROUP)
    mine = tl.load(bits + sender * width + byte, mask=byte < width, other=0).to(tl.int32)
    if GROUPED:
        of = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        s = tl.load(scale + sender * groups + of, mask=of < groups, other=0.0).to(tl.float32)
        s = s[:, None, None]
    else:
        s = tl.load(scale + sender).to(tl.float32)
    lane = tl.arange(0, 8)[None, None, :]
    values = tl.where(((mine[:, :, None] >> lane) & 1) == 1, s, -s)
    at = byte[:, :, None] * 8 + lane
    tl.store(out + sender * n + at, values.to(out.dtype.element_ty), mask=at < n)


def onebit_pack(packing: Packing, *, group: int, scaling: str) -> None:
    """Launch for a worker, or for a server."""
    x, scales, error, new, bits, scale = packing
    if not (n := error.numel()):
        scale.zero_()
        return
    server = scales is not None
    how = _tile("onebit_mean" if server else "onebit_pack", group, error.device)
    grid = (triton.cdiv(n, how["ROWS"] * how["GROUP"]),)
    shares = packing.shares if server else scale
    source = (error if server else x, error, x, shares, x.shape[0], bits.numel())
    kind = {"SERVER": server, "MEAN": scaling == "mean", **how}
    if not group:
        sums = error.new_empty(grid)
        onebit_sum_kernel[grid](*source, n, sums, **kind)
        total = sums.sum(dtype=torch.float64) / n
        scale.copy_(total if scaling == "mean" else total.sqrt())
    onebit_pack_kernel[grid](
        *source, scale.numel(), n, new, bits, scale, GROUPED=bool(group), **kind
    )


onebit_mean = onebit_pack  # whether there are scales tells them apart


def onebit_unpack(bits: Tensor, scale: Tensor, out: Tensor, *, group: int) -> None:
    """Launch for one sender, or for one in each row."""
    if not (n := out.shape[-1]) or not out.numel():
        return
    how = _tile("onebit_unpack", group, out.device)
    grid = (triton.cdiv(n, how["ROWS"] * how["GROUP"]), out.numel() // n)
    onebit_unpack_kernel[grid](
        bits, scale, out, bits.shape[-1], scale.shape[-1], n, GROUPED=bool(group), **how
    )


def _tile(name: str, group: int, device: torch.device) -> dict[str, int]:
    """A tile of about the configured size: whole groups, or a piece of all."""
    how = dict(dispatch.config(name, device))
    size = how.pop("BLOCK")
    group = group or size
    how["num_warps"] = min(16, max(how["num_warps"], group // 1024))
    return {"ROWS": max(1, size // group), "GROUP": group, **how}
