"""Triton for :mod:`zfunc.kernels.activations`.

Elementwise kernels take rows whose stride is given, so that the halves of a packed tensor are read
where they lie; contiguous tensors are one long row (``FLAT``). The gradient of a bias is
summed over rows in stripes: each program keeps its columns' sums in registers, and one
more sum over programs makes them whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu

__all__ = [
    "bias_gelu",
    "bias_gelu_backward",
    "bias_gelu_backward_kernel",
    "bias_gelu_kernel",
    "glu",
    "glu_backward",
    "glu_backward_kernel",
    "glu_kernel",
]

SUMS = {"ROWS": 16, "BLOCK": 128, "num_warps": 4}
TO_BITS = tl.constexpr(-1.4426950408889634)  # -log2(e): what `exp2` takes of a sigmoid
SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
CUBE = tl.constexpr(0.044715)
SLOPE = tl.constexpr(3 * 0.044715)
HALF_BITS = tl.constexpr(-0.7213475204444817)  # -log2(e) / 2
DENSITY = tl.constexpr(-1.3257480647361593)  # log2(1 / sqrt(2 * pi))


@triton.jit
def _logistic(bits):
    """``1 / (1 + 2**bits)``: the squared reciprocal root is one instruction and a product, where a
    quotient is eight, and ``exp`` four more than ``exp2``."""
    root = tl.rsqrt(1.0 + tl.exp2(bits))
    return root * root


@triton.jit
def _normal_below(x):
    """The normal distribution function within 1.6e-7, and within 1e-4 of itself down to -5.

    ``log2`` of a tail is smooth: this is its polynomial of least greatest error for a weight of
    ``max(tail, 1e-3)`` on 0 to 6, which falls for ever from there. The error function takes three
    times as many instructions.
    """
    a = tl.abs(x)
    bits = 1.0841135008377023e-05 - 6.04109231971961e-07 * a
    bits = bits * a - 4.36559748777654e-05
    bits = bits * a - 0.0004895008751191199
    bits = bits * a + 0.007519056089222431
    bits = bits * a - 0.05279447138309479
    bits = bits * a - 0.4591207504272461
    bits = bits * a - 1.1511133909225464
    tail = tl.exp2(bits * a - 1.0)
    return tl.where(x > 0.0, 1.0 - tail, tail)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        return x * _logistic(x * TO_BITS)
    elif ACT == "gelu":
        return x * _normal_below(x)
    else:
        return x * _logistic((x * x * (CUBE * SCALE * TO_BITS) + SCALE * TO_BITS) * x)


@triton.jit
def _both(x, ACT: tl.constexpr):
    """The activation and its derivative."""
    if ACT == "silu":
        s = _logistic(x * TO_BITS)
        y = x * s
        return y, s + y * (1.0 - s)
    elif ACT == "gelu":
        below = _normal_below(x)
        return x * below, below + x * tl.exp2(x * x * HALF_BITS + DENSITY)
    else:
        square = x * x
        s = _logistic((square * (CUBE * SCALE * TO_BITS) + SCALE * TO_BITS) * x)
        y = x * s
        return y, s + y * (1.0 - s) * (square * (SLOPE * SCALE) + SCALE)


@triton.jit
def _place(F, blocks, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """The row, where this program begins in it, each element from there, and which exist."""
    program = tl.program_id(0)
    if FLAT:
        row = program.to(tl.int64) * 0
        first = program.to(tl.int64) * BLOCK
    else:
        row = (program // blocks).to(tl.int64)
        first = (program % blocks).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    return row, first, at, at < tl.minimum(F - first, BLOCK).to(tl.int32)


@triton.jit
def glu_kernel(
    gate, up, out, F, blocks, gate_stride, up_stride,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, at, inside = _place(F, blocks, FLAT, BLOCK)
    g = tl.load(gate + (row * gate_stride + first) + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + (row * up_stride + first) + at, mask=inside, other=0.0).to(tl.float32)
    y = (_activated(g, ACT) * u).to(out.dtype.element_ty)
    tl.store(out + (row * F + first) + at, y, mask=inside)


@triton.jit
def glu_backward_kernel(
    grad, gate, up, d_gate, d_up, F, blocks, grad_stride, gate_stride, up_stride,
    ACT: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, at, inside = _place(F, blocks, FLAT, BLOCK)
    go = tl.load(grad + (row * grad_stride + first) + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + (row * gate_stride + first) + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + (row * up_stride + first) + at, mask=inside, other=0.0).to(tl.float32)
    y, slope = _both(g, ACT)
    start = row * F + first
    tl.store(d_up + start + at, (go * y).to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_gate + start + at, (go * u * slope).to(d_gate.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_kernel(
    grad, x, bias, out, F, blocks,
    GRAD: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, at, inside = _place(F, blocks, not BIAS, BLOCK)
    start = row * F + first
    v = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + first + at, mask=inside, other=0.0).to(tl.float32)
    if GRAD:
        _, slope = _both(v, ACT)
        y = tl.load(grad + start + at, mask=inside, other=0.0).to(tl.float32) * slope
    else:
        y = _activated(v, ACT)
    tl.store(out + start + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_gelu_backward_kernel(
    grad, x, bias, dx, sums, M, F, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(1)
    zero = program.to(tl.int64) * 0  # makes addresses of 64 bits
    lanes = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < F
    offsets = lanes[:, None] * F + column[None, :]
    b = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(1)):
        inside = (tile * ROWS + lanes < M)[:, None] & real[None, :]
        at = (tile + zero) * ROWS * F + offsets
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
        _, slope = _both(v, ACT)
        y = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + at, y.to(dx.dtype.element_ty), mask=inside)
        total += tl.where(inside, y, 0.0)
    tl.store(sums + program * F + column, tl.sum(total, 0), mask=real)


def _grid(name: str, x: Tensor) -> tuple[tuple[int], tuple[int, int], dict[str, int]]:
    """The grid over rows ``[M, F]``, ``(F, blocks in a row)``, and the configuration."""
    how = dict(dispatch.config(name, x.device))
    how.pop("PROGRAMS", None)
    blocks = triton.cdiv(x.shape[1], how["BLOCK"])
    return (x.shape[0] * blocks,), (x.shape[1], blocks), how


def glu(gate: Tensor, up: Tensor, out: Tensor, *, act: str) -> None:
    """Launch over rows ``[M, F]``."""
    grid, sizes, how = _grid("glu", gate)
    strides = (gate.stride(0), up.stride(0))
    glu_kernel[grid](gate, up, out, *sizes, *strides, ACT=act, FLAT=len(gate) == 1, **how)


def glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, *, act: str
) -> None:
    """Launch over rows ``[M, F]``."""
    grid, sizes, how = _grid("glu_backward", gate)
    strides = (grad.stride(0), gate.stride(0), up.stride(0))
    glu_backward_kernel[grid](
        *(grad, gate, up, d_gate, d_up), *sizes, *strides, ACT=act, FLAT=len(gate) == 1, **how
    )


def bias_gelu(x: Tensor, bias: Tensor | None, out: Tensor, *, act: str) -> None:
    """Launch over rows ``[M, F]``; one row without a bias."""
    grid, sizes, how = _grid("bias_gelu", x)
    b = x if bias is None else bias
    flags = {"GRAD": False, "BIAS": bias is not None}
    bias_gelu_kernel[grid](x, x, b, out, *sizes, ACT=act, **flags, **how)


def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, dx: Tensor, db: Tensor | None, *, act: str
) -> None:
    """Launch over rows ``[M, F]``; each program leaves its share of the sums."""
    if bias is None or db is None:
        grid, sizes, how = _grid("bias_gelu_backward", x)
        bias_gelu_kernel[grid](grad, x, x, dx, *sizes, ACT=act, GRAD=True, BIAS=False, **how)
        return
    rows, length = x.shape
    columns = triton.cdiv(length, SUMS["BLOCK"])
    most = dispatch.config("bias_gelu_backward", x.device)["PROGRAMS"] * gpu(x.device).processors
    programs = max(1, min(triton.cdiv(rows, SUMS["ROWS"]), most // columns))
    sums = torch.empty((programs, length), dtype=torch.float32, device=x.device)
    bias_gelu_backward_kernel[(columns, programs)](
        grad, x, bias, dx, sums, rows, length, ACT=act, **SUMS
    )
    db.copy_(sums.sum(0))
