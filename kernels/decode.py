r"""Fused blocks of a decoder layer, for one token of each sequence.

- :func:`norm_qkv_rope`: RMS norm, the products for queries, keys and values, their rotation, and
  the keys and values into the cache;
- :func:`norm_gate_up`: RMS norm, the gated half of the feed-forward network;
- the output and the down projection with their residual: any product of
  :mod:`zfunc.kernels.skinny`, with its ``residual``.

.. math::
    \mathrm{norm}(x) = \frac{x \odot g}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \qquad
    (a, b) \mapsto (a \cos\theta - b \sin\theta, \; b \cos\theta + a \sin\theta)

with ``a`` and ``b`` the halves of a head. The scale of the norm is one number a row, so it passes
through the product: the first launch multiplies :math:`x \odot g` and adds up the squares of
:math:`x` on the way, the second sums shares, scales, rotates (or activates) and writes. Two
launches in place of some ten, and nothing between them but float32 sums of a few rows.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021;
Shazeer, GLU Variants Improve Transformer, 2020.

**Traffic**: the weights, once: 2, 1 or 0.5 bytes each.

Nothing here has a gradient. For LayerNorm, or rotation of neighbours in place of halves, write
the block of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.operators import (
    KernelError,
    Written,
    contiguous,
    looped,
    numbers,
    operator,
    together,
    undifferentiated,
)
from zfunc.kernels.packed import BLOCK, NormedProduct, Packed, dequantized
from zfunc.kernels.skinny import ROWS

__all__ = ["norm_gate_up", "norm_qkv_rope"]

HALVES = (16, 32, 64, 128)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
INSTEAD = "the same of torch operations"


def norm_qkv_rope(
    x: Tensor,
    norm: Tensor,
    weight: Packed | Sequence[Packed],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slots: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Queries of one token of each sequence; its key and value go into the cache.

    Args:
        x: ``[M, K]``, a row for each sequence.
        norm: ``[K]``, the weight of the norm.
        weight: ``[(H + 2 G) D, K]``: H heads of queries, G of keys, G of values, below each other;
            16 bits, int8 or words (:class:`Packed`). Or several of one kind, whose rows follow
            each other: a launch for each, and no copy.
        cos, sin: ``[P, D / 2]`` float32.
        positions: ``[M]`` int64, the row of ``cos`` and ``sin`` that each row of ``x`` turns by.
        keys, values: the cache, ``[M, G, S, D]``.
        slots: ``[M]`` int64, where in the cache each row is written: at ``positions`` if left out.
            One that is not below S is not written.
        bias: ``[(H + 2 G) D]``.
        eps: of the norm.

    Returns:
        ``[M, H, D]``, rotated, in the dtype of ``x``.

    Raises:
        KernelError: shapes or dtypes do not fit, or gradients are being recorded.

    >>> cache = torch.zeros(2, 1, 1, 2, 2).unbind()
    >>> turn = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])  # by 0, by 90 degrees
    >>> weight = Packed.of(torch.eye(2).repeat(3, 1))
    >>> x, at = torch.tensor([[1.0, 1.0]]), torch.tensor([1])
    >>> norm_qkv_rope(x, torch.ones(2), weight, *turn, at, *cache, eps=0.0)
    tensor([[[-1.,  1.]]])
    >>> cache[1][0, 0, 1]
    tensor([1., 1.])
    """
    parts = _listed("norm_qkv_rope", x, weight)
    inner = [t for w in parts for t in (w.data, w.scale)]
    undifferentiated("norm_qkv_rope", INSTEAD, x, norm, cos, sin, keys, values, bias, *inner)
    (m, k), n = x.shape, sum(len(w.data) for w in parts)
    groups, length, width = keys.shape[1:]
    heads = n // width - 2 * groups
    rows = length if slots is None else 1
    fits = {
        "norm": norm.shape == (k,) and parts[0].length == k,
        "weight": n % width == 0 and heads > 0 and width % 2 == 0,
        "bias": bias is None or bias.shape == (n,),
        "cos and sin": cos.shape == sin.shape == (len(cos), width // 2) and len(cos) >= rows,
        "positions": _indices(positions, m) and (slots is None or _indices(slots, m)),
        "keys and values": keys.shape == values.shape == (m, groups, length, width),
        "dtypes": keys.dtype == values.dtype == x.dtype and cos.dtype == torch.float32,
    }
    if not all(fits.values()):
        raise KernelError(
            f"kernels.norm_qkv_rope: {', '.join(k for k, good in fits.items() if not good)} do not "
            f"fit x {tuple(x.shape)}, weights of {n} rows of {parts[0].length}, and caches "
            f"{tuple(keys.shape)}, {tuple(values.shape)}; see its arguments."
        )
    for label, cache in (("keys", keys), ("values", values)):
        if cache.stride(-1) != 1 or cache.stride() != keys.stride():
            raise KernelError(
                f"kernels.norm_qkv_rope: {label} have strides {cache.stride()}; expected heads to "
                "lie in one piece, and both caches alike."
            )
    at = (cos, sin, positions, positions if slots is None else slots)
    return _norm_qkv_rope(x, norm, *_flat(parts), eps, bias, *at, keys, values)


def norm_gate_up(
    x: Tensor,
    norm: Tensor,
    weight: Packed | Sequence[Packed],
    *,
    activation: str = "silu",
    eps: float = 1e-6,
) -> Tensor:
    """``act(n(x) W_gate^T) * (n(x) W_up^T)``, rounded once.

    Args:
        x: ``[M, K]``.
        norm: ``[K]``, the weight of the norm.
        weight: ``[2 F, K]``, the rows of the gate above those of the other half; or two.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        eps: of the norm.

    Returns:
        ``[M, F]`` in the dtype of ``x``.

    Raises:
        KernelError: shapes do not fit, the activation is unknown, or gradients are being recorded.

    >>> weight = Packed.of(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    >>> norm_gate_up(torch.tensor([[1.0, 1.0]]), torch.ones(2), weight, eps=0.0)  # 2 silu(1)
    tensor([[1.4621]])
    """
    parts = _listed("norm_gate_up", x, weight)
    undifferentiated(
        "norm_gate_up", INSTEAD, x, norm, *(t for w in parts for t in (w.data, w.scale))
    )
    n, length = sum(len(w.data) for w in parts), parts[0].length
    good = x.dim() == 2 and norm.shape == (x.shape[1],) and length == x.shape[1]
    if not good or n % 2 or activation not in ACTIVATIONS:
        raise KernelError(
            f"kernels.norm_gate_up: x {tuple(x.shape)}, norm {tuple(norm.shape)}, weights of "
            f"{n} rows of {length}, {activation!r}; expected [M, K], [K], an even number of rows "
            f"of K, and one of {', '.join(ACTIVATIONS)}."
        )
    return _norm_gate_up(x, norm, *_flat(parts), eps, activation)


def _listed(name: str, x: Tensor, weight: Packed | Sequence[Packed]) -> Sequence[Packed]:
    """Matrices whose rows follow each other, checked, also against their input."""
    parts = (weight,) if isinstance(weight, Packed) else weight
    for w in parts:
        w.check(name)
        together(name, x=x, weight=w.data, scale=w.scale)
        if not numbers(x) or (w.scale is None and w.data.dtype != x.dtype):
            raise KernelError(
                f"kernels.{name}: x is {x.dtype}, weights are {w.data.dtype}; expected "
                "floating-point numbers of 16 bits or more, and the same of weights without scales."
            )
    if len({(w.kind, w.length, w.group, w.zero is None) for w in parts}) != 1:
        raise KernelError(
            f"kernels.{name}: weights {[(w.kind, w.length, w.group) for w in parts]} differ; "
            "expected at least one, all of one kind, length and group, with zeros or without."
        )
    return parts


def _flat(parts: Sequence[Packed]) -> tuple[Any, ...]:
    """Their data, scales and zeros, their kind and group, as the operators take them."""
    scales = [w.scale for w in parts if w.scale is not None]
    zeros = [w.zero for w in parts if w.zero is not None]
    return [w.data for w in parts], scales, zeros, parts[0].kind, parts[0].group or 0


def _indices(x: Tensor, m: int) -> bool:
    return x.shape == (m,) and x.dtype == torch.int64


class Places(NamedTuple):
    """The angles of all positions; of each row its position, and its slot in the cache."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor


class KeyValues(NamedTuple):
    """A cache, ``[M, G, S, D]`` each."""

    keys: Written
    values: Written


def _held(product: NormedProduct) -> NormedProduct:
    """All of it contiguous, but for scales and zeros, whose strides are given."""
    x, norm, *w = contiguous(product.x, product.norm, *product.w)
    return product._replace(x=x, norm=norm, w=w)


def _room_qkv(product: NormedProduct, bias: Tensor | None, at: Places, cache: KeyValues) -> Tensor:
    x, (_, groups, _, width) = product.x, cache.keys.shape
    return x.new_empty(len(x), sum(map(len, product.w)) // width - 2 * groups, width)


@operator(_room_qkv)
def _norm_qkv_rope(
    product: NormedProduct, bias: Tensor | None, at: Places, cache: KeyValues
) -> Tensor:
    q = _room_qkv(product, bias, at, cache)
    if len(product.x):
        added, *places = contiguous(bias, *at)
        given = (_held(product), added, Places(*places), cache, q)
        dispatch.run("norm_qkv_rope", *given, **product.how, half=cache.keys.shape[3] // 2)
    return q


def _room_gate_up(product: NormedProduct, activation: str) -> Tensor:
    return product.x.new_empty(len(product.x), sum(map(len, product.w)) // 2)


@operator(_room_gate_up, batch=looped)
def _norm_gate_up(product: NormedProduct, activation: str) -> Tensor:
    y = _room_gate_up(product, activation)
    if y.numel():
        how = {"activation": activation, **product.how}
        dispatch.run("norm_gate_up", _held(product), y, **how)
    return y


def limit(
    *, kind: str, group: int, rows: int, dtype: torch.dtype, half: int = 16, **how: Any
) -> str | None:
    """Why Triton does not take a block; ``None`` if it does."""
    if rows > ROWS:
        return f"its Triton kernel takes up to {ROWS} rows, not {rows}"
    if dtype != torch.bfloat16:  # x times the norm's weight may be too large for float16
        return f"its Triton kernel takes bfloat16, not {dtype}"
    if kind == "w8a8_mm":
        return "its Triton kernel takes inputs of 16 bits, not w8a8_mm"
    if group and group % BLOCK and group not in (32, 64):
        return f"its Triton kernel takes groups of 32, 64 or multiples of {BLOCK}, not {group}"
    return None if half in HALVES else f"its Triton kernel takes no heads of {2 * half}"


def _normed_product(product: NormedProduct) -> Tensor:
    """The product of the normed rows, in float32 at least."""
    x = product.x
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    rows = rows * (rows.square().mean(1, keepdim=True) + product.eps).rsqrt()
    normed = (rows * product.norm.to(wide)).to(x.dtype)
    plain = (dequantized(weight, x.shape[1]).to(x.dtype) for weight in product.matrices)
    return torch.cat([F.linear(normed, w) for w in plain], 1).to(wide)


def qkv_twin(
    product: NormedProduct, bias: Tensor | None, at: Places, cache: KeyValues, q: Tensor, **how: Any
) -> None:
    """In torch, an operation after the other."""
    (cos, sin, positions, slots), keys = at, cache.keys
    y = _normed_product(product)
    y = y if bias is None else y + bias
    (m, heads, width), groups = q.shape, keys.shape[1]
    parts = y.view(m, -1, width)
    turns = torch.where((positions >= 0) & (positions < len(cos)), positions, 0)
    c, s = cos[turns][:, None], sin[turns][:, None]
    a, b = parts[:, : heads + groups].split(width // 2, 2)
    turned = torch.cat([a * c - b * s, b * c + a * s], 2)
    q.copy_(turned[:, :heads])
    rows = torch.arange(m, device=y.device)
    inside = ((slots >= 0) & (slots < keys.shape[2]))[:, None, None]
    to = slots.clamp(0, keys.shape[2] - 1)
    fresh = (turned[:, heads:], parts[:, heads + groups :])
    for held, new in zip(cache, fresh, strict=True):
        held[rows, :, to] = torch.where(inside, new.to(held.dtype), held[rows, :, to])


def gate_up_twin(product: NormedProduct, y: Tensor, *, activation: str, **how: Any) -> None:
    """In torch, an operation after the other."""
    gate, up = _normed_product(product).chunk(2, 1)
    if activation == "silu":
        y.copy_(F.silu(gate) * up)
    else:
        y.copy_(F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up)


for _name, _twin in (("norm_qkv_rope", qkv_twin), ("norm_gate_up", gate_up_twin)):
    _how: dict[str, Any] = {"dtypes": dispatch.NUMBERS, "limit": limit}
    dispatch.register(_name, _twin, "decode_triton", "2, 1 or 0.5 B a weight", **_how)
