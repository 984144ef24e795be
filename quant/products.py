"""Products with low-bit weights: the routes that there are, which one is taken, and gradients.

``y[m, n] = x[m, k] W[n, k]^T``. :data:`ROUTES` is the table of the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from zfunc.quant import grids, int4_products, int8_products, kernel_products, panel_products
from zfunc.quant.grids import Grid
from zfunc.quant.low_bit import LowBit
from zfunc.ranks.collectives import largest
from zfunc.ranks.comm import Group

__all__ = ["ROUTES", "Route", "dequantised_product", "product", "route", "several", "summand"]

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
    rows = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), k)
    if (torch.is_grad_enabled() and x.requires_grad) or transformed(x):
        y: Tensor = _Product.apply(rows, _Opaque(weight))
    else:
        way = route(rows, weight)
        if way == "kernel":  # which adds the bias, too
            return kernel_products.product(rows, weight, bias).reshape(*x.shape[:-1], n)
        y = _forward(rows, weight, way)
    y = y if x.ndim == 2 else y.reshape(*x.shape[:-1], n)
    return y if bias is None else y + bias.to(y.dtype)


def summand(x: Tensor, weight: LowBit, ranks: Group) -> Tensor:
    """This rank's summand of ``x W^T``, where ranks have parts of what is summed over.

    ``dynamic`` formats round inputs with the scale of the whole row, about which ranks agree: a
    collective. What is rounded takes the route of weights alone, to which 8 bits are exact up to
    its own rounding to 16.
    """
    if not weight.format.dynamic or not x.is_floating_point():
        return product(x, weight, None)
    wide = x.to(grids.wide(x.dtype))
    own = wide.detach().abs()
    most = own.amax(-1, keepdim=True) if x.shape[-1] else own.new_zeros(*x.shape[:-1], 1)
    low = int8_products.rounded(wide.detach(), largest(most, ranks, "tensor scales"))
    if wide.requires_grad and torch.is_grad_enabled():
        low = wide + (low - wide.detach())  # rounding is passed straight through
    return product(low, weight.static, None).to(x.dtype)


def several(x: Tensor, weights: Sequence[LowBit]) -> list[Tensor]:
    """``x W^T`` for each of several weights and ``x`` ``[m, k]``, which a route prepares once."""
    if torch.is_grad_enabled() or transformed(x) or any(w.rows[1] != x.shape[1] for w in weights):
        return [product(x, w, None) for w in weights]
    ways = {(route(x, w), w.format.dynamic) for w in weights}
    way = ROUTES[ways.pop()[0]] if len(ways) == 1 else None
    if way is None or way.several is None:
        return [product(x, w, None) for w in weights]
    parts = x.split(way.rows) if way.rows is not None else [x]
    made = [way.several(part.to(way.dtype or x.dtype), weights) for part in parts]
    joined = made[0] if len(made) == 1 else map(torch.cat, zip(*made, strict=True))
    return [y.to(x.dtype) for y in joined]


def route(x: Tensor, weight: LowBit) -> str:
    """The name of the route that a product takes: the first one in :data:`ROUTES` that applies."""
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
    """The product of ``x`` ``[m, k]``, in its dtype."""
    route = ROUTES[way]
    if route.rows is not None and x.shape[0] > route.rows:
        return torch.cat([_forward(part, weight, way) for part in x.split(route.rows)])
    dtype = x.dtype
    if route.dtype is None or route.dtype == dtype:  # conversions to the same cost time, too
        return route.product(x, weight)
    return route.product(x.to(route.dtype), weight).to(dtype)


def _dequantised(x: Tensor, weight: LowBit) -> Tensor:
    inputs = int8_products.rounded(x) if weight.format.dynamic else x
    return dequantised_product(inputs, weight)


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
class _Opaque:
    """A weight as torch.func leaves it alone: it would take a tensor's place by a plain one."""

    weight: LowBit


class _Product(torch.autograd.Function):
    """The gradient of the input; the rounding of a dynamic input is passed straight through."""

    @staticmethod
    def forward(x: Tensor, held: _Opaque) -> Tensor:
        y = _forward(x.detach(), held.weight, route(x, held.weight))
        return y.clone() if y._is_view() else y  # tangents are not made for views

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.weight = inputs[1].weight

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return dequantised_product(tangent, ctx.weight)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, held: _Opaque) -> tuple[Tensor, int]:
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


@dataclass(frozen=True)
class Route:
    """A way to compute products.

    Attributes:
        product: ``product(x, weight)`` of ``x`` ``[m, k]``.
        several: the same with several weights of one format, for which inputs are prepared once.
        dtype: of the inputs that it takes; None: any.
        rows: how many rows of the input it takes at once; None: any number.
    """

    product: Callable[[Tensor, LowBit], Tensor]
    several: Callable[[Tensor, Sequence[LowBit]], list[Tensor]] | None = None
    dtype: torch.dtype | None = None
    rows: int | None = None


ROUTES = {
    # On a GPU: a few rows, groups that a Triton kernel takes.
    "kernel": Route(kernel_products.product),
    # On a CPU of x86-64 with llvmlite: any format, fewer rows than a product with plain weights
    # takes less time for. Not in float64, nor under torch.func or a compiler.
    "panels": Route(panel_products.product, panel_products.several, torch.float32),
    # On other CPUs: 8-bit weights, or 4-bit ones with 8-bit inputs, where oneDNN's sums are exact.
    "int8": Route(int8_products.product, int8_products.several, torch.float32, int8_products.ROWS),
    # On other CPUs: 4-bit weights in groups of 32 to 256, n a multiple of 64.
    "int4": Route(int4_products.product, None, torch.bfloat16, int4_products.ROWS),
    # Everywhere: some rows of the weight at a time become plain numbers.
    "dequantised": Route(_dequantised),
}
"""The routes, each with what it needs, in the order in which they are tried."""
