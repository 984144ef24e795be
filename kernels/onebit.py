r"""One bit an element, with error feedback: compress, average what others sent, expand.

A worker sends the signs of :math:`c = x + e` and one scale, and keeps what that leaves out:

.. math::
    s = \sqrt{\tfrac1n \textstyle\sum_i c_i^2} \quad \text{("rms")} \qquad
    s = \tfrac1n \textstyle\sum_i |c_i| \quad \text{("mean")} \qquad
    e' = c - s \,\mathrm{sign}(c)

A server takes the same step from :math:`c = \tfrac1W \sum_w s_w\,\mathrm{sign}_w + e`.
``"rms"`` is the scale of 1-bit Adam; ``"mean"`` leaves the smallest error that one scale can.
With ``group`` each run of so many elements has a scale of its own.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Tang et al., 1-bit Adam, 2021;
Karimireddy et al., Error Feedback Fixes SignSGD, 2019.

**Format.** Bit ``i % 8`` of byte ``i // 8`` is 1 where element ``i`` is not negative, by its
sign bit: -0 counts as negative, and NaN by its own bit. The bits behind the last element are 0.

**Traffic**, bytes an element of a float32 ``x``: ``onebit_pack`` 20.1 with one scale (the values
are read to sum them and again to send them), 12.1 with groups (once). ``onebit_mean`` from W
workers W/8 + 8.1 with groups. ``onebit_unpack`` 4.1. The same as a sequence of torch
operations moves 100 for ``onebit_pack``, and packs bits in no useful way at all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.onebit_torch import Packing, pack_twin, unpack_twin
from zfunc.kernels.operators import (
    KernelError,
    Written,
    agree,
    apart,
    contiguous,
    dense,
    fresh,
    looped,
    numbers,
    operator,
    together,
    undifferentiated,
    wide,
)

__all__ = [
    "onebit_bytes",
    "onebit_mean",
    "onebit_mean_",
    "onebit_pack",
    "onebit_pack_",
    "onebit_unpack",
    "onebit_unpack_",
]

GROUPS = tuple(2**k for k in range(7, 14))
SCALINGS = ("rms", "mean")
INSTEAD = "the straight-through estimator that you mean: it is the identity in backward"


def onebit_bytes(n: int) -> int:
    """Bytes that the signs of ``n`` elements take.

    >>> onebit_bytes(9)
    2
    """
    return -(-n // 8)


def onebit_pack(
    x: Tensor, error: Tensor, *, group: int | None = None, scaling: str = "rms"
) -> tuple[Tensor, Tensor, Tensor]:
    """Signs and scales of ``x + error``, and the error that remains.

    Args:
        x: ``[n]``, bfloat16, float16 or float32; float64 with an error in float64.
        error: ``[n]``, float32: what earlier calls left out.
        group: elements that share a scale, a power of two from 128 to 8192; all by default.
        scaling: ``"rms"`` or ``"mean"``, see the top of the module.

    Returns:
        ``(bits, scale, error)``: ``uint8[onebit_bytes(n)]``; the scales, ``[1]`` or
        ``[ceil(n / group)]``, and the new error ``[n]``, both of the dtype of ``error``.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or gradients are being recorded.

    >>> x = torch.tensor([3.0, -1.0, 2.0, -2.0])
    >>> bits, scale, error = onebit_pack(x, torch.zeros(4), scaling="mean")
    >>> bits, scale, error
    (tensor([5], dtype=torch.uint8), tensor([2.]), tensor([1., 1., 0., 0.]))
    """
    undifferentiated("onebit_pack", INSTEAD, x, error)
    _check_group("onebit_pack", group)
    return _onebit_pack(x, error, group or 0, scaling)


def onebit_pack_(
    x: Tensor, error: Tensor, *, group: int | None = None, scaling: str = "rms"
) -> tuple[Tensor, Tensor]:
    """As :func:`onebit_pack`; the new error replaces the old one where it lies.

    Returns:
        ``(bits, scale)``.

    Raises:
        KernelError: as :func:`onebit_pack`, or ``error`` is not contiguous.

    >>> error = torch.zeros(4)
    >>> onebit_pack_(torch.tensor([3.0, -1.0, 2.0, -2.0]), error, scaling="mean")
    (tensor([5], dtype=torch.uint8), tensor([2.]))
    >>> error
    tensor([1., 1., 0., 0.])
    """
    undifferentiated("onebit_pack_", INSTEAD, x, error)
    _check_group("onebit_pack_", group)
    return _onebit_pack_(x, error, group or 0, scaling)


def onebit_mean(
    bits: Tensor, scale: Tensor, error: Tensor, *, group: int | None = None, scaling: str = "rms"
) -> tuple[Tensor, Tensor, Tensor]:
    """Average what W workers sent, add the server's error, and compress again.

    Args:
        bits: ``uint8[W, onebit_bytes(n)]``.
        scale: ``[W, 1]`` or ``[W, ceil(n / group)]``.
        error: ``[n]``, what earlier calls left out here.
        group, scaling: see :func:`onebit_pack`; the same on both sides.

    Returns:
        ``(bits, scale, error)`` as from :func:`onebit_pack`.

    Raises:
        KernelError: as :func:`onebit_pack`, or no worker sent anything.

    >>> bits = torch.tensor([[5], [7]], dtype=torch.uint8)
    >>> scale = torch.tensor([[2.0], [4.0]])
    >>> onebit_mean(bits, scale, torch.zeros(4), scaling="mean")  # of +2-2+2-2 and +4+4+4-4
    (tensor([7], dtype=torch.uint8), tensor([2.5000]), tensor([ 0.5000, -1.5000,  0.5000, -0.5000]))
    """
    undifferentiated("onebit_mean", INSTEAD, scale, error)
    _check_group("onebit_mean", group)
    return _onebit_mean(bits, scale, error, group or 0, scaling)


def onebit_mean_(
    bits: Tensor, scale: Tensor, error: Tensor, *, group: int | None = None, scaling: str = "rms"
) -> tuple[Tensor, Tensor]:
    """As :func:`onebit_mean`; the new error replaces the old one where it lies.

    Returns:
        ``(bits, scale)``.

    Raises:
        KernelError: as :func:`onebit_mean`, or ``error`` is not contiguous.

    >>> sent = torch.tensor([[1]], dtype=torch.uint8), torch.tensor([[2.0]])
    >>> onebit_mean_(*sent, torch.zeros(2))
    (tensor([1], dtype=torch.uint8), tensor([2.]))
    """
    undifferentiated("onebit_mean_", INSTEAD, scale, error)
    _check_group("onebit_mean_", group)
    return _onebit_mean_(bits, scale, error, group or 0, scaling)


def onebit_unpack(
    bits: Tensor,
    scale: Tensor,
    n: int,
    *,
    group: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values that signs and scales stand for.

    Args:
        bits: ``uint8[onebit_bytes(n)]``, or a row for each sender.
        scale: ``[1]`` or ``[ceil(n / group)]``, or a row for each sender.
        n: elements of a sender.
        group: see :func:`onebit_pack`.
        dtype: of the result.

    Returns:
        ``[n]`` or ``[senders, n]``: plus or minus the scale.

    Raises:
        KernelError: shapes or dtypes do not fit.

    >>> onebit_unpack(torch.tensor([5], dtype=torch.uint8), torch.tensor([2.0]), 4)
    tensor([ 2., -2.,  2., -2.])
    """
    undifferentiated("onebit_unpack", INSTEAD, scale)
    _check_group("onebit_unpack", group)
    return _onebit_unpack(bits, scale, n, group or 0, dtype)


def onebit_unpack_(bits: Tensor, scale: Tensor, out: Tensor, *, group: int | None = None) -> Tensor:
    """As :func:`onebit_unpack`, into memory that is there already.

    Args:
        bits, scale, group: of one sender, or of several.
        out: ``[n]`` or ``[senders, n]``, contiguous, of any floating dtype; overwritten.

    Returns:
        ``out``.

    Raises:
        KernelError: as :func:`onebit_unpack`, or ``out`` is not contiguous.

    >>> onebit_unpack_(torch.tensor([1], dtype=torch.uint8), torch.tensor([2.0]), torch.zeros(2))
    tensor([ 2., -2.])
    """
    undifferentiated("onebit_unpack_", INSTEAD, scale, out)
    _check_group("onebit_unpack_", group)
    _onebit_unpack_(bits, scale, out, group or 0)
    return out


def _check(name: str, x: Tensor, error: Tensor, group: int, scaling: str) -> None:
    agree(name, x=x, error=error)
    if name.endswith("_"):
        dense(name, error=error)
    _check_group(name, group or None)
    if x.dim() != 1:
        raise KernelError(f"kernels.{name}: x is {tuple(x.shape)}; expected [n]: pass x.view(-1).")
    if error.dtype != wide(x) or not numbers(x):
        raise KernelError(
            f"kernels.{name}: x is {x.dtype} and error {error.dtype}; expected an error in "
            f"{wide(x)} with a floating-point x of 16 bits or more."
        )
    if scaling not in SCALINGS:
        raise KernelError(f"kernels.{name}: scaling {scaling!r}; expected one of {SCALINGS}.")


def _check_received(
    name: str, bits: Tensor, scale: Tensor, error: Tensor, group: int, scaling: str
) -> None:
    _check(name, error, error, group, scaling)
    if bits.dim() != 2 or not bits.shape[0]:
        raise KernelError(
            f"kernels.{name}: bits are {tuple(bits.shape)}; expected a row for each worker, one "
            "at least."
        )
    together(name, bits=bits, error=error)
    _check_bits(name, bits, scale, error.numel(), group)
    if scale.dtype != error.dtype:
        raise KernelError(
            f"kernels.{name}: scale is {scale.dtype}, but error {error.dtype}; expected one dtype."
        )


def _check_unpack(bits: Tensor, scale: Tensor, n: int, group: int, dtype: torch.dtype) -> None:
    _check_group("onebit_unpack", group or None)
    _check_bits("onebit_unpack", bits, scale, n, group)
    if n < 0:
        raise KernelError(f"kernels.onebit_unpack: {n} elements; expected a number of them.")


def _check_unpack_(bits: Tensor, scale: Tensor, out: Tensor, group: int) -> None:
    name = "onebit_unpack_"
    dense(name, out=out)
    _check_group(name, group or None)
    together(name, bits=bits, out=out)
    _check_bits(name, bits, scale, out.shape[-1] if out.dim() else 1, group)
    if out.dim() != bits.dim() or out.shape[:-1] != bits.shape[:-1]:
        raise KernelError(
            f"kernels.{name}: out is {tuple(out.shape)}, but bits {tuple(bits.shape)}; "
            "expected a row for each sender."
        )
    if not out.is_floating_point():
        raise KernelError(f"kernels.{name}: out is {out.dtype}; expected a floating-point dtype.")


def _check_bits(name: str, bits: Tensor, scale: Tensor, n: int, group: int) -> None:
    together(name, bits=bits, scale=scale)
    rows = bits.shape[:-1]
    wanted = ((*rows, onebit_bytes(n)), (*rows, _scales(n, group)))
    if bits.dim() not in (1, 2) or (tuple(bits.shape), tuple(scale.shape)) != wanted:
        raise KernelError(
            f"kernels.{name}: bits are {tuple(bits.shape)} and scales {tuple(scale.shape)}; "
            f"expected {wanted[0]} and {wanted[1]} for {n} elements"
            + (f" in groups of {group}." if group else ".")
        )
    if bits.dtype != torch.uint8 or not numbers(scale):
        raise KernelError(
            f"kernels.{name}: bits are {bits.dtype} and scales {scale.dtype}; expected uint8 and "
            "floating-point numbers of 16 bits or more."
        )


def _check_group(name: str, group: int | None) -> None:
    if group is not None and group not in GROUPS:
        raise KernelError(
            f"kernels.{name}: group={group}; expected a power of two from {GROUPS[0]} to "
            f"{GROUPS[-1]}, or None for one scale. The last group may be shorter."
        )


def _scales(n: int, group: int) -> int:
    return -(-n // group) if group else 1


def _room(error: Tensor, group: int) -> tuple[Tensor, Tensor]:
    n = error.shape[-1]
    return error.new_empty(onebit_bytes(n), dtype=torch.uint8), error.new_empty(_scales(n, group))


def _sent(*args: Any) -> Any:
    """Room for signs and scales, from the arguments ``(..., error, group, scaling)``."""
    return _room(*args[-3:-1])


def _sent_and_left(*args: Any) -> Any:
    return *_sent(*args), fresh(args[-3])


def _run(
    x: Tensor, scales: Tensor | None, error: Tensor, new: Tensor, group: int, scaling: str
) -> Any:
    out = _room(error, group)
    name = "onebit_pack" if scales is None else "onebit_mean"
    x, scales = contiguous(x, scales)
    packing = Packing(x, scales, error, new, *out)
    dispatch.run(name, packing, group=group, scaling=scaling)
    return out


@operator(_sent_and_left, batch=looped, check=partial(_check, "onebit_pack"))
def _onebit_pack(
    x: Tensor, error: Tensor, group: int, scaling: str
) -> tuple[Tensor, Tensor, Tensor]:
    error = error.contiguous()
    new = torch.empty_like(error)
    return *_run(x, None, error, new, group, scaling), new


@operator(_sent, check=partial(_check, "onebit_pack_"))
def _onebit_pack_(x: Tensor, error: Written, group: int, scaling: str) -> tuple[Tensor, Tensor]:
    apart("onebit_pack_", x=x, error=error)
    return _run(x, None, error, error, group, scaling)


@operator(_sent_and_left, batch=looped, check=partial(_check_received, "onebit_mean"))
def _onebit_mean(
    bits: Tensor, scale: Tensor, error: Tensor, group: int, scaling: str
) -> tuple[Tensor, Tensor, Tensor]:
    error = error.contiguous()
    new = torch.empty_like(error)
    return *_run(bits, scale, error, new, group, scaling), new


@operator(_sent, check=partial(_check_received, "onebit_mean_"))
def _onebit_mean_(
    bits: Tensor, scale: Tensor, error: Written, group: int, scaling: str
) -> tuple[Tensor, Tensor]:
    bits, scale = contiguous(bits, scale)
    apart("onebit_mean_", bits=bits, scale=scale, error=error)
    return _run(bits, scale, error, error, group, scaling)


def _values(bits: Tensor, scale: Tensor, n: int, group: int, dtype: torch.dtype) -> Tensor:
    return scale.new_empty((*bits.shape[:-1], n), dtype=dtype)


@operator(_values, batch=looped, check=_check_unpack)
def _onebit_unpack(bits: Tensor, scale: Tensor, n: int, group: int, dtype: torch.dtype) -> Tensor:
    out = _values(bits, scale, n, group, dtype)
    dispatch.run("onebit_unpack", *contiguous(bits, scale), out, group=group)
    return out


@operator(check=_check_unpack_)
def _onebit_unpack_(bits: Tensor, scale: Tensor, out: Written, group: int) -> None:
    bits, scale = contiguous(bits, scale)
    for label, x in {"bits": bits, "scale": scale}.items():
        apart("onebit_unpack_", out=out, **{label: x})
    dispatch.run("onebit_unpack", bits, scale, out, group=group)


for _name, _twin, _traffic, _limit in (
    ("onebit_pack", pack_twin, "20.1 B, or 12.1 B in groups (float32)", dispatch.in_float32),
    (
        "onebit_mean",
        pack_twin,
        "W/4 + 12.1 B from W workers, or W/8 + 8.1 B in groups",
        dispatch.in_float32,
    ),
    ("onebit_unpack", unpack_twin, "4.1 B (float32)", dispatch.any_float),
):
    dispatch.register(
        *(_name, _twin, "onebit_triton", _traffic),
        dtypes=(*dispatch.FLOATS, torch.uint8),
        machine=_limit,
    )
