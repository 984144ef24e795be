r"""Products of a few rows with a matrix that is read once: decoding, 1 to 16 rows.

:math:`y_{mn} = \sum_k x_{mk} W_{nk} + b_n + r_{mn}`, sums in float32, one rounding at the end.
``W`` is ``[N, K]`` in one of these kinds (:class:`~zfunc.kernels.packed.Packed`):

- ``skinny_mm``: 16 bits, as it is;
- ``w8_mm``: int8 codes, :math:`W = s (q - z)`, a scale for each row or each group of its elements;
- ``w4_mm``: codes of 4 bits in words (:func:`~zfunc.kernels.pack_words`), likewise;
- ``w8a8_mm``: int8 codes, and the rows of ``x`` are rounded to 8 bits as well (nearest, scale
  :math:`\max|x| / 127`): sums within a group are exact.

Codes are widened in registers; nothing but codes and scales is read from memory. More rows, other
dtypes and other groups go to the twin, which widens the weights and calls ``F.linear``.

Source: Dettmers et al., LLM.int8(), 2022 (W8A8 with a scale for each row); Frantar and Alistarh,
MARLIN, 2024 (4-bit words in the order of the tensor cores).

**Traffic** a weight: 2, 1, 0.5 and 1 bytes, and those of the scales. Operations: 2 M a weight, so
bound by memory up to 16 rows on any GPU with tensor cores; what limits the 4-bit kind is the
number of instructions (``docs/figures/kernel-code.md``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.groupwise import quantize_groups
from zfunc.kernels.operators import (
    KernelError,
    contiguous,
    looped,
    operator,
    together,
    undifferentiated,
)
from zfunc.kernels.packed import BLOCK, Matrix, Packed, dequantized
from zfunc.kernels.rows import in_rows
from zfunc.kernels.tracing import in_graph

__all__ = ["packed_mm", "skinny_mm", "w4_mm", "w8_mm", "w8a8_mm"]

INSTEAD = "x @ w.T with w widened in plain torch, whose scales have gradients"
ROWS = 16  # what the tensor cores take at once
HALVES = (torch.bfloat16, torch.float16)


def skinny_mm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """``x W^T + bias + residual`` for weights of 16 bits.

    Args:
        x: ``[..., K]``, bfloat16 or float16 (others are taken by the twin).
        w: ``[N, K]`` of the dtype of ``x``.
        bias: ``[N]``.
        residual: ``[..., N]``, added before the one rounding.

    Returns:
        ``[..., N]`` in the dtype of ``x``. Differentiable in all arguments, forward and backward.

    Raises:
        KernelError: the shapes do not fit.

    >>> skinny_mm(torch.ones(1, 3), torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1))
    tensor([[7.]])
    """
    return _product("skinny_mm", x, Packed.of(w), bias, residual)


def w8_mm(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group: int | None = None,
) -> Tensor:
    """``x W^T + bias + residual`` for int8 codes, widened in registers.

    Args:
        x, bias, residual: see :func:`skinny_mm`; only they have gradients.
        q: ``[N, K]`` int8.
        scale, zero: ``[N, ceil(K / group)]``, as in ``Packed``; any strides.
        group: elements of a row that share a scale; all of them if left out.

    >>> q, scale = torch.tensor([[127, -127]], dtype=torch.int8), torch.tensor([[0.5]])
    >>> w8_mm(torch.tensor([[2.0, 1.0]]), q, scale)
    tensor([[63.5000]])
    """
    weight = Packed("w8_mm", q, _length("w8_mm", x), scale, zero, group)
    return _product("w8_mm", x, weight, bias, residual)


def w4_mm(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group: int | None = None,
) -> Tensor:
    """``x W^T + bias + residual`` for codes of 4 bits in words, widened in registers.

    Args:
        x, bias, residual: see :func:`skinny_mm`; only they have gradients.
        words: from :func:`~zfunc.kernels.pack_words`.
        scale, zero, group: see :func:`w8_mm`.

    >>> from zfunc.kernels import pack_words
    >>> words = pack_words(torch.tensor([[7, -7]], dtype=torch.int8))
    >>> w4_mm(torch.tensor([[2.0, 1.0]]), words, torch.tensor([[0.5]]))
    tensor([[3.5000]])
    """
    weight = Packed("w4_mm", words, _length("w4_mm", x), scale, zero, group)
    return _product("w4_mm", x, weight, bias, residual)


def w8a8_mm(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group: int | None = None,
) -> Tensor:
    """``x W^T + bias + residual`` for int8 codes and rows of ``x`` rounded to 8 bits.

    The gradient of ``x`` is straight through its rounding.

    Args:
        x, q, scale, zero, bias, residual, group: see :func:`w8_mm`.

    >>> q, scale = torch.tensor([[127, -127]], dtype=torch.int8), torch.tensor([[0.5]])
    >>> w8a8_mm(torch.tensor([[127.0, 1.4]]), q, scale)  # 1.4 becomes 1
    tensor([[8001.]])
    """
    weight = Packed("w8a8_mm", q, _length("w8a8_mm", x), scale, zero, group)
    return _product("w8a8_mm", x, weight, bias, residual)


def packed_mm(
    x: Tensor, weight: Packed, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """``x W^T + bias + residual`` for a matrix of any kind: the function of its name.

    >>> packed_mm(torch.ones(1, 2), Packed.of(torch.tensor([[1.0, 2.0]])))
    tensor([[3.]])
    """
    return _product(weight.kind, x, weight, bias, residual)


def _length(name: str, x: Tensor) -> int:
    """Of the rows of an input."""
    in_rows(name, x=x)
    return x.shape[-1]


def _product(
    name: str, x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    _length(name, x)
    weight.check(name)
    undifferentiated(name, INSTEAD, weight.scale, weight.zero)
    if weight.scale is None and weight.data.dtype != x.dtype:
        raise KernelError(
            f"kernels.{name}: w is {weight.data.dtype}, x is {x.dtype}; expected one dtype."
        )
    together(name, x=x, w=weight.data, scale=weight.scale, bias=bias, residual=residual)
    n, k = weight.data.shape[0], weight.length
    shape = (*x.shape[:-1], n)
    bad = x.shape[-1] != k or (bias is not None and bias.shape != (n,))
    if bad or (residual is not None and residual.shape != shape):
        shapes = [None if t is None else tuple(t.shape) for t in (x, bias, residual)]
        raise KernelError(
            f"kernels.{name}: x, bias, residual are {shapes}; expected (..., {k}), ({n},) and "
            f"{shape} for weights of {n} rows of {k}."
        )
    rows = x.shape[:-1].numel()
    rest = None if residual is None else residual.reshape(rows, n)
    matrix = (weight.data, weight.scale, weight.zero, weight.kind, weight.group or 0)
    y: Tensor = PackedProduct.apply(x.reshape(rows, k), *matrix, bias, rest)
    return y.reshape(shape)


@in_graph
class PackedProduct(torch.autograd.Function):
    """The operator forward; products of plain torch backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Any:
        return _packed_mm(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, scale, zero, ctx.kind, ctx.group, bias, residual = inputs
        ctx.dtypes = [None if t is None else t.dtype for t in (bias, residual)]
        ctx.save_for_backward(x, w, scale, zero)
        ctx.save_for_forward(x, w, scale, zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, w, scale, zero = ctx.saved_tensors
        need, weight = ctx.needs_input_grad, Matrix(w, scale, zero, ctx.kind, ctx.group)
        plain = dequantized(weight, x.shape[-1]).to(grad.dtype)
        dx = (grad @ plain).to(x.dtype) if need[0] else None
        dw = (grad.transpose(-1, -2) @ x.to(grad.dtype)).to(w.dtype) if need[1] else None
        db = grad.sum(0).to(ctx.dtypes[0]) if need[6] else None
        dr = grad.to(ctx.dtypes[1]) if need[7] else None
        return dx, dw, None, None, None, None, db, dr

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        x, w, scale, zero = ctx.saved_tensors
        tx, tw, *_, tb, tr = tangents
        plain = dequantized(Matrix(w, scale, zero, ctx.kind, ctx.group), x.shape[-1]).to(x.dtype)
        total = x.new_zeros(len(x), len(plain)) if tx is None else F.linear(tx, plain)
        if tw is not None:
            total = total + F.linear(x, tw)
        for t in (tb, tr):
            total = total if t is None else total + t
        return total


def _batch(op: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Rows of a batch are rows, where it is only inputs that have one."""
    if dims[0] is None or any(dim is not None for dim in dims[1:]):
        return looped(op, info, dims, *args)
    x, residual = args[0].movedim(dims[0], 0), args[-1]
    if residual is not None:
        residual = residual.expand(len(x), *residual.shape).flatten(0, 1)
    y = op(x.flatten(0, 1), *args[1:-1], residual)
    return y.view(*x.shape[:2], -1), 0


def _room(x: Tensor, weight: Matrix, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.w.shape[0])


@operator(_room, batch=_batch)
def _packed_mm(x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = _room(x, weight)
    if y.numel():
        x, w, bias, residual = contiguous(x, weight.w, bias, residual)
        how = {"group": weight.group, "rows": len(x), "dtype": x.dtype}
        dispatch.run(weight.kind, x, weight._replace(w=w), bias, residual, y, **how)
    return y


def limit(*, group: int, rows: int, dtype: torch.dtype, **how: Any) -> str | None:
    """Why Triton does not take a product; ``None`` if it does."""
    if rows > ROWS:
        return f"its Triton kernel takes up to {ROWS} rows, not {rows}"
    if dtype not in HALVES:
        return f"its Triton kernel takes inputs of 16 bits, not {dtype}"
    if group and group % BLOCK and group not in (32, 64):
        return f"its Triton kernel takes groups of 32, 64 or multiples of {BLOCK}, not {group}"
    return None


def twin(
    x: Tensor, weight: Matrix, bias: Tensor | None, residual: Tensor | None, y: Tensor, **how: Any
) -> None:
    """In torch: weights widened, then the product that torch has."""
    plain = dequantized(weight, x.shape[1])
    if weight.kind == "w8a8_mm" and x.shape[1]:
        codes, step, _ = quantize_groups(x, group=None)
        total = F.linear(codes.to(plain.dtype), plain) * step
    else:
        plain = plain.to(x.dtype)
        if all(t is None or t.dtype == x.dtype for t in (bias, residual)):
            y.copy_(_rounded_once(x, plain, bias, residual))
            return
        total = F.linear(x, plain)
    if bias is not None:
        total = total + bias
    y.copy_(total if residual is None else total + residual)


def _rounded_once(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """With what is added before the sums are rounded; bias and residual are added to each other."""
    if residual is None:
        return F.linear(x, w, bias)
    return torch.addmm(residual if bias is None else residual + bias, x, w.t())


for _kind, _traffic in (
    ("skinny_mm", "2 B a weight"),
    ("w8_mm", "1 B a weight and its scales"),
    ("w4_mm", "0.5 B a weight and its scales"),
    ("w8a8_mm", "1 B a weight and its scales"),
):
    _how: dict[str, Any] = {"dtypes": dispatch.NUMBERS, "limit": limit}
    dispatch.register(_kind, twin, "skinny_launch", _traffic, **_how)
