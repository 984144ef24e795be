r"""Levels of 8 or 4 bits in groups: quantize, expand, and quantize in place ("fake").

Each group of neighbours in the last dimension has its scale, and without symmetry its zero:

.. math::
    s = \frac{\max|x|}{2^{b-1} - 1}, \quad q = \mathrm{round}(x / s) \qquad \text{or} \qquad
    z = \min x, \quad s = \frac{\max x - z}{2^b - 1}, \quad q = \mathrm{round}((x - z) / s)

and stands for :math:`q s` or :math:`q s + z`. Nothing is clipped: the greatest value is the
greatest level. A group of zeros has scale 0 and is exact; one that spans no more than
:math:`2^{-100}` has levels of 0, so it expands to 0 or :math:`z`; one with a NaN or an infinity is
lost as a whole: its scale says so, and it expands to NaN, whatever its levels are.

Rounding is to nearest, ties to even, or stochastic: :math:`\mathrm{round}(y + u)` with
:math:`-1/2 \le u < 1/2` of 16 random bits, which depend on the seed and the place alone, so kernel
and twin round alike. The mean of :math:`u` is :math:`-2^{-17}`, the bias in steps. Four neighbours
share a word of 32 bits: the high byte of one's bits is the low byte of another's.

Source: Yao et al., ZeroQuant, 2022; Gupta et al., Deep Learning with Limited Numerical
Precision, 2015 (stochastic rounding).

**Format.** 8 bits: ``int8``, or ``uint8`` without symmetry. 4 bits: two in a ``uint8``, the
first in the low half, plus 8 if symmetric; a row of odd length ends with half a byte of 0.

**Traffic** a bfloat16 element, groups of 256: 3.0 bytes for 8 bits, 2.5 for 4, ``fake_quant`` 4.
7 to 15 instructions, of some 20 that a GPU issues in the time that the bytes take.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.groupwise_torch import Codes, Quantizing, dequantize_twin, quantize_twin
from zfunc.kernels.operators import (
    KernelError,
    contiguous,
    fresh,
    looped,
    numbers,
    operator,
    together,
    undifferentiated,
    wide,
)
from zfunc.kernels.rows import in_rows, rows_of
from zfunc.kernels.tracing import in_graph

__all__ = ["dequantize_groups", "fake_quant", "quantize_groups"]

LONGEST = 16384  # the longest group that a Triton program holds
INSTEAD = "kernels.fake_quant, whose gradient is straight through"


def quantize_groups(
    x: Tensor,
    *,
    bits: int = 8,
    group: int | None = 256,
    symmetric: bool = True,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Levels and scales of a tensor.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32 (float64 is taken by the twin).
        bits: 8 or 4.
        group: neighbours in the last dimension that share a scale, an even number; the
            last group of a row may be shorter. ``None``: the whole row.
        symmetric: zero is in the middle of the levels.
        seed: rounds stochastically, as this number (or 0-d int64 tensor, such as a key of
            ``zf.random``) says; to nearest without one.

    Returns:
        ``(q, scale, zero)``: levels ``[..., K]`` or for 4 bits ``[..., ceil(K / 2)]``;
        scales and zeros ``[..., ceil(K / group)]`` in float32 (float64 for float64).
        ``zero`` is ``None`` if symmetric.

    Raises:
        KernelError: ``bits`` or ``group`` mean nothing, ``x`` is no row of floating-point
            numbers, or gradients are being recorded.

    >>> q, scale, _ = quantize_groups(torch.tensor([1.0, -2.0, 0.25, 2.54]), group=None)
    >>> q, scale
    (tensor([  50, -100,   12,  127], dtype=torch.int8), tensor([0.0200]))
    """
    undifferentiated("quantize_groups", INSTEAD, x)
    _check("quantize_groups", x, bits, group, (8, 4))  # before the length of a row is asked for
    size = _size(x.shape[-1], group)
    q, scale, zero = _quantize_groups(x, bits, size, symmetric, seed_tensor(seed))
    return q, scale, None if symmetric else zero


def dequantize_groups(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    length: int,
    *,
    bits: int = 8,
    group: int | None = 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What levels stand for.

    Args:
        q, scale, zero: from :func:`quantize_groups`.
        length: K, the length of a row.
        bits, group: as they were there.
        dtype: of the result.

    Returns:
        ``[..., K]``.

    Raises:
        KernelError: the shapes are not those that such levels have.

    >>> q, scale, zero = quantize_groups(torch.tensor([0.0, 1.0, 5.0]), bits=4, symmetric=False)
    >>> dequantize_groups(q, scale, zero, 3, bits=4)
    tensor([0., 1., 5.])
    """
    undifferentiated("dequantize_groups", INSTEAD, scale, zero)
    check_group("dequantize_groups", bits, group, (8, 4))
    return _dequantize_groups(q, scale, zero, length, bits, _size(length, group), dtype)


def fake_quant(
    x: Tensor,
    *,
    bits: int = 8,
    group: int | None = 256,
    symmetric: bool = True,
    seed: int | Tensor | None = None,
) -> Tensor:
    """What is left of ``x`` after quantizing: the nearest levels, in its own dtype.

    Its gradient is straight through: the identity, forward and backward, of any order.

    Args:
        x, group, symmetric, seed: see :func:`quantize_groups`.
        bits: 2 to 16.

    Returns:
        ``[..., K]`` in the dtype of ``x``.

    Raises:
        KernelError: as :func:`quantize_groups`.

    >>> x = torch.tensor([1.0, -2.2, 0.3], requires_grad=True)
    >>> y = fake_quant(x, bits=2)
    >>> y
    tensor([ 0.0000, -2.2000,  0.0000], grad_fn=<StraightThroughBackward>)
    >>> torch.autograd.grad(y.sum(), x)
    (tensor([1., 1., 1.]),)
    """
    _check("fake_quant", x, bits, group, range(2, 17))
    size = _size(x.shape[-1], group)
    return StraightThrough.apply(x, bits, size, symmetric, seed_tensor(seed))


@in_graph
class StraightThrough(torch.autograd.Function):
    """The operator forward, the identity backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bits: int, size: int, symmetric: bool, seed: Tensor | None) -> Tensor:
        return _fake_quant(x, bits, size, symmetric, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)


def _check(name: str, x: Tensor, bits: int, group: int | None, known: Any) -> None:
    check_group(name, bits, group, known)
    in_rows(name, x=x)


def check_group(name: str, bits: int, group: int | None, known: Any) -> None:
    """Refuse bits that are not ``known``, and groups that neighbours cannot form.

    Raises:
        KernelError: so it is.
    """
    if bits not in known:
        several = f"{known[0]} to {known[-1]}" if isinstance(known, range) else f"one of {known}"
        raise KernelError(f"kernels.{name}: bits={bits}; expected {several}.")
    if group is not None and (group < 2 or group % 2):
        raise KernelError(
            f"kernels.{name}: group={group}; expected an even number, or None for a whole row. "
            "The last group of a row may be shorter."
        )


def _checked(
    name: str, known: Any, x: Tensor, bits: int, size: int, symmetric: bool, seed: Tensor | None
) -> None:
    _check(name, x, bits, size, known)
    check_seed(name, seed)


def check_seed(name: str, seed: Tensor | None) -> None:
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise KernelError(
            f"kernels.{name}: seed is {seed.dtype}{list(seed.shape)}; expected one int64 number."
        )


def _check_dequantize(codes: Codes, length: int, bits: int, size: int, dtype: torch.dtype) -> None:
    q, scale, zero = codes
    name = "dequantize_groups"
    check_group(name, bits, size, (8, 4))
    together(name, q=q, scale=scale, zero=zero)
    width = length if bits == 8 else -(-length // 2)
    wanted = ((*q.shape[:-1], width), (*q.shape[:-1], _groups(length, size)))
    lows = wanted[1] if zero is None else tuple(zero.shape)
    if (tuple(q.shape), tuple(scale.shape), lows) != (*wanted, wanted[1]):
        raise KernelError(
            f"kernels.{name}: levels {tuple(q.shape)}, scales {tuple(scale.shape)}, "
            f"zeros {None if zero is None else tuple(zero.shape)}; expected {wanted[0]} and "
            f"{wanted[1]} for rows of {length} with bits={bits}, groups of {size}."
        )
    parts = [scale] if zero is None else [scale, zero]
    if q.is_complex() or dtype.is_complex or not numbers(*parts):
        raise KernelError(
            f"kernels.{name}: levels are {q.dtype}, scales and zeros {[x.dtype for x in parts]}, "
            f"the result {dtype}; expected real levels and results, and floating-point scales of "
            "16 bits or more."
        )


def _size(length: int, group: int | None) -> int:
    """Elements of a group, counted even: two neighbours share random bits, and a byte."""
    return max(2, length + length % 2) if group is None else group


def _groups(length: int, size: int) -> int:
    return -(-length // size)


def seed_tensor(seed: int | Tensor | None) -> Tensor | None:
    """A seed as an int64 tensor; numbers in a row give unrelated streams (splitmix64)."""
    if seed is None or isinstance(seed, Tensor):
        return seed
    word, mask = (seed + 1) * 0x9E3779B97F4A7C15, (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (((word & mask) ^ ((word & mask) >> shift)) * factor) & mask
    word ^= word >> 31
    return torch.tensor(word - ((word >> 63) << 64), dtype=torch.int64)


def limit(**how: Any) -> str | None:
    """Why groups are too long for Triton; ``None`` if they are not."""
    if how["size"] <= LONGEST:
        return None
    return f"its Triton kernel takes groups up to {LONGEST}, not {how['size']}"


def _rooms(
    x: Tensor, bits: int, size: int, symmetric: bool, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh levels, scales and zeros; of a symmetric grid the last are empty."""
    length = x.shape[-1]
    kind = torch.int8 if symmetric and bits == 8 else torch.uint8
    width, groups = length if bits == 8 else -(-length // 2), _groups(length, size)
    q = x.new_empty((*x.shape[:-1], width), dtype=kind)
    scale = x.new_empty((*x.shape[:-1], groups), dtype=wide(x))
    return q, scale, scale.new_empty((*x.shape[:-1], 0 if symmetric else groups))


@operator(_rooms, batch=looped, check=partial(_checked, "quantize_groups", (8, 4)))
def _quantize_groups(
    x: Tensor, bits: int, size: int, symmetric: bool, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, zero = _rooms(x, bits, size, symmetric)
    if x.numel():
        rows = rows_of(x)
        into = {"q": q, "scale": scale, "zero": None if symmetric else zero}
        given = Quantizing(rows, rows.shape, symmetric, **into)
        dispatch.run("quantize_groups", given, bits=bits, size=size, seed=seed)
    return q, scale, zero


def _dequantized(codes: Codes, length: int, *rest: Any) -> Tensor:
    return codes.q.new_empty((*codes.q.shape[:-1], length), dtype=rest[-1])


@operator(_dequantized, batch=looped, check=_check_dequantize)
def _dequantize_groups(
    codes: Codes, length: int, bits: int, size: int, dtype: torch.dtype
) -> Tensor:
    out = _dequantized(codes, length, dtype)
    if out.numel():
        parts = contiguous(*codes)
        dispatch.run("dequantize_groups", *parts, rows_of(out), bits=bits, size=size)
    return out


@operator(fresh, batch=looped, check=partial(_checked, "fake_quant", range(2, 17)))
def _fake_quant(x: Tensor, bits: int, size: int, symmetric: bool, seed: Tensor | None) -> Tensor:
    out = fresh(x)
    if x.numel():
        rows = rows_of(x)
        given = Quantizing(rows, rows.shape, symmetric, fake=rows_of(out))
        dispatch.run("fake_quant", given, bits=bits, size=size, seed=seed)
    return out


def dequantize_limit(*tensors: Tensor, **how: Any) -> str | None:
    """Why machine code cannot take these: levels are not as :func:`quantize_groups` leaves them."""
    q, ends = tensors[0], tensors[1:-1]
    kind = torch.int8 if how.get("bits") == 8 and len(ends) == 1 else torch.uint8
    if how and q.dtype != kind:
        return f"it takes such levels in {kind}, not {q.dtype}"
    for x in ends:
        if x.dtype != torch.float32:
            return f"it takes scales and zeros in float32, not {x.dtype}"
    return dispatch.any_float(*tensors)


def mean_limit(*tensors: Tensor, **how: Any) -> str | None:
    """Why it cannot take these means, of which each thread keeps a group."""
    if how and how["size"] > LONGEST:
        return f"it takes groups up to {LONGEST}, not {how['size']}"
    return dispatch.in_float32(*tensors)


KINDS: dict[str, Any] = {"dtypes": dispatch.NUMBERS, "limit": limit}
TRAFFIC = "3.0 B for 8 bits, 2.5 B for 4 (bf16)"
for _name, _twin, _traffic, _limit in (
    ("quantize_groups", quantize_twin, TRAFFIC, dispatch.in_float32),
    ("dequantize_groups", dequantize_twin, TRAFFIC, dequantize_limit),
    ("fake_quant", quantize_twin, "4 B (bf16)", dispatch.known),
):
    dispatch.register(_name, _twin, "groupwise_triton", _traffic, machine=_limit, **KINDS)
