"""Products with low-bit weights: which route is taken, and their gradients.

``y[m, n] = x[m, k] W[n, k]^T``. On a GPU the kernels for a few rows multiply
(:mod:`zfunc.quant.kernel_products`), on a CPU of x86-64 ours for it
(:mod:`zfunc.quant.panel_products`); on other CPUs torch's own, with sums in int32
(:mod:`zfunc.quant.int8_products`) or for 4 bits (:mod:`zfunc.quant.int4_products`). In float64 and
for shapes that none of them takes, weights are dequantised a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from zfunc.quant import grids, int4_products, int8_products, kernel_products, panel_products
from zfunc.quant.grids import Grid
from zfunc.quant.low_bit import LowBit

__all__ = ["dequantised_product", "product", "route", "several"]

BLOCK = 1 << 20  # weights dequantised at once: they stay in a core's cache until they are used


def product(x: Tensor, weight: LowBit, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` for ``x`` ``[..., k]``, in the dtype of ``x``."""
    n, k = weight.rows
    if x.shape[-1] != k:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied: {tuple(x.shape)} with a weight that sums "
            f"over {k} ({weight!r})"
        )
    if not x.is_floating_point():
        return F.linear(x, weight.dequantized_rows(weight.dtype), bias)  # torch says what is wrong
    rows = x if x.ndim == 2 else x.reshape(-1, k)
    if (torch.is_grad_enabled() and x.requires_grad) or transformed(x):
        y: Tensor = _Product.apply(rows, _Held(weight))
    else:
        way = route(rows, weight)
        if way == "kernel":
            return kernel_products.product(rows, weight, bias).reshape(*x.shape[:-1], n)
        y = _forward(rows, weight, way)
    y = y if x.ndim == 2 else y.reshape(*x.shape[:-1], n)
    return y if bias is None else y + bias.to(y.dtype)


def several(x: Tensor, weights: Sequence[LowBit]) -> list[Tensor]:
    """``x W^T`` for each of several weights and ``x`` ``[m, k]``, which a route prepares once."""
    if torch.is_grad_enabled() or transformed(x) or any(w.rows[1] != x.shape[1] for w in weights):
        return [product(x, w, None) for w in weights]
    ways = {(route(x, w), w.format.dynamic) for w in weights}
    way = ways.pop()[0] if len(ways) == 1 else ""
    if way == "panels":
        return [y.to(x.dtype) for y in panel_products.several(x.float(), weights)]
    if way == "int8":
        return [y.to(x.dtype) for y in int8_products.several(x.float(), weights)]
    if way == "int4":
        short = x.bfloat16()
        return [int4_products.product(short, w).to(x.dtype) for w in weights]
    return [product(x, w, None) for w in weights]


def route(x: Tensor, weight: LowBit) -> str:
    """Which way a product goes.

    ``"kernel"``, ``"panels"``, ``"int8"``, ``"int4"`` or ``"dequantised"``.
    """
    if kernel_products.takes(x, weight):
        return "kernel"
    if not (x.is_cpu and weight.scale.is_cpu) or x.dtype == torch.float64:
        return "dequantised"
    if panel_products.takes(x, weight):
        return "panels"
    if panel_products.holds(weight):
        return "dequantised"  # to put the codes in order for another route would take longer
    # Between narrow layers Python counts: shapes are read past torch's own `len`.
    if weight.format.dynamic or not weight.format.packed:
        return "int8" if int8_products.takes(weight, x.shape[0]) else "dequantised"
    return "int4" if int4_products.takes(weight, x.shape[0]) else "dequantised"


def _forward(x: Tensor, weight: LowBit, way: str) -> Tensor:
    if way == "kernel":
        return kernel_products.product(x, weight)
    if way == "panels":
        return panel_products.product(x.float(), weight).to(x.dtype)
    if way == "int8":
        return int8_products.product(x.float(), weight).to(x.dtype)
    if way == "int4":
        return int4_products.product(x, weight)
    if weight.format.dynamic:
        x = int8_products.rounded(x)
    return dequantised_product(x, weight)


def dequantised_product(x: Tensor, weight: LowBit) -> Tensor:
    """``x W^T``, holding :data:`BLOCK` dequantised weights at a time."""
    n, k = weight.rows
    step = max(1, BLOCK // max(1, k)) if x.device.type == "cpu" else max(1, n)
    if step >= n > 0:
        return F.linear(x, weight.dequantized_rows(x.dtype))
    parts = [F.linear(x, part.to(x.dtype)) for part in _blocks(weight, step, x.dtype)]
    return torch.cat(parts, dim=1) if parts else x.new_zeros(len(x), 0)


def _blocks(weight: LowBit, step: int, dtype: torch.dtype) -> Any:
    n = weight.rows[0]
    codes = weight.codes
    for i in range(0, n, step):
        zero = None if weight.zero is None else weight.zero[i : i + step]
        grid = Grid(weight.scale[i : i + step], zero)
        yield grids.dequantize(codes[i : i + step], grid, weight.format, grids.wide(dtype))


def transformed(x: Tensor) -> bool:
    """Whether a transform of torch.func is at work on ``x``, or a tangent may go with it."""
    if torch.compiler.is_compiling():
        return False  # what is traced is not asked about
    if forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


@dataclass(frozen=True)
class _Held:
    """A weight as torch.func leaves it alone: it would take a tensor's place by a plain one."""

    weight: LowBit


class _Product(torch.autograd.Function):
    """The gradient of the input; the rounding of a dynamic input is passed straight through."""

    @staticmethod
    def forward(x: Tensor, held: _Held) -> Tensor:
        y = _forward(x.detach(), held.weight, route(x, held.weight))
        return y.clone() if y._is_view() else y  # tangents are not made for views

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.weight = inputs[1].weight

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return dequantised_product(tangent, ctx.weight)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, held: _Held) -> tuple[Tensor, int]:
        rows = x.movedim(in_dims[0], 0)  # a batch of rows is more rows
        y: Tensor = _Product.apply(rows.flatten(0, 1), held)
        return y.unflatten(0, rows.shape[:2]), 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.weight
        step = max(1, BLOCK // max(1, weight.rows[1]))
        total, at = grad.new_zeros(len(grad), weight.rows[1]), 0
        for part in _blocks(weight, step, grad.dtype):
            total = total + grad[:, at : at + len(part)] @ part.to(grad.dtype)
            at += len(part)
        return total, None
