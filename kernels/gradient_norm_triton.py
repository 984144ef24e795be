"""Triton for :mod:`zfunc.kernels.gradient_norm`: partial sums of strided blocks, then their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch

__all__ = ["finish_kernel", "squares_kernel", "sum_squares"]

PROGRAMS = 1024  # at most: enough for any GPU, and few enough for one program to sum up


@triton.jit
def squares_kernel(x, parts, most, n, stride, BLOCK: tl.constexpr):
    """The sum of squares and the greatest absolute value (as bits, NaN last) of every stride."""
    total = tl.zeros((BLOCK,), tl.float32)
    greatest = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, stride):
        at = start + tl.arange(0, BLOCK)
        xs = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        total += xs * xs
        greatest = tl.maximum(greatest, xs.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(parts + tl.program_id(0), tl.sum(total))
    tl.store(most + tl.program_id(0), tl.max(greatest))


@triton.jit
def finish_kernel(parts, most, squares, finite, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(squares, tl.sum(tl.load(parts + at, mask=at < count, other=0.0)))
    greatest = tl.max(tl.load(most + at, mask=at < count, other=0))
    tl.store(finite, (greatest < 0x7F800000).to(tl.uint8))


def sum_squares(x: Tensor, squares: Tensor, finite: Tensor) -> None:
    """Launch over a contiguous tensor."""
    how = dict(dispatch.config("sum_squares", x.device))
    n, block = x.numel(), how.pop("BLOCK")
    programs = max(1, min(PROGRAMS, triton.cdiv(n, block)))
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    most = torch.empty(programs, dtype=torch.int32, device=x.device)
    squares_kernel[(programs,)](x, parts, most, n, programs * block, BLOCK=block, **how)
    finish_kernel[(1,)](parts, most, squares, finite.view(torch.uint8), programs, BLOCK=PROGRAMS)
