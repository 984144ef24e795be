"""Quantized values as one buffer of bytes: what a collective carries, in one call.

A payload holds the levels of a flat buffer, then its scales, then, without symmetry, its zeros,
each part padded to 16 bytes. ``quantize_payload`` fills it in one pass, with error feedback if
there is an error to feed; ``mean_payloads`` takes what W ranks sent and makes the payload of the
mean, without writing a float; ``dequantize_payload`` expands any number of them.

The levels are those of :mod:`zfunc.kernels.groupwise`, with groups along the buffer.

Sources: Wang et al., ZeRO++, 2023 (quantized weights and gradients); Xie et al., LoCo, 2024
(error feedback between its hops).

**Traffic** an element: ``quantize_payload`` 3.0 bytes from bfloat16 to 8 bits, 13.0 from
float32 with an error; ``mean_payloads`` of W with 4 bits W/2 + 0.5, and 8 more with an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zfunc.kernels import dispatch
from zfunc.kernels.groupwise import (
    INSTEAD,
    KINDS,
    check_group,
    check_seed,
    mean_limit,
    seed_tensor,
)
from zfunc.kernels.groupwise_torch import Quantizing, quantize_twin
from zfunc.kernels.operators import (
    KernelError,
    Written,
    agree,
    aligned,
    apart,
    dense,
    looped,
    numbers,
    operator,
    together,
    undifferentiated,
)

__all__ = [
    "Payload",
    "dequantize_payload",
    "mean_payloads",
    "mean_payloads_",
    "quantize_payload",
    "quantize_payload_",
]

Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Payload:
    """The format of a payload; sender and receiver must mean the same.

    Attributes:
        n: elements.
        bits: 8 or 4.
        group: elements that share a scale, an even number; the last may be shorter.
        symmetric: zero is in the middle of the levels.
        dtype: of scales and zeros, and of the arithmetic.

    Raises:
        KernelError: ``bits`` or ``group`` mean nothing.

    >>> Payload(1000, bits=4).bytes  # 500 of levels, 4 scales
    528
    """

    n: int
    bits: int = 8
    group: int = 256
    symmetric: bool = True
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_group("Payload", self.bits, self.group, (8, 4))

    @property
    def groups(self) -> int:
        """How many scales there are."""
        return -(-self.n // self.group)

    @property
    def levels(self) -> int:
        """Bytes of levels."""
        return self.n if self.bits == 8 else -(-self.n // 2)

    @property
    def bytes(self) -> int:
        """Bytes in all, a multiple of 16."""
        return _padded(self.levels) + (1 if self.symmetric else 2) * self._scales

    @property
    def _scales(self) -> int:
        return _padded(self.groups * self.dtype.itemsize)

    def parts(self, payload: Tensor) -> Parts:
        """Levels, scales and zeros of payloads ``[..., bytes]``, as views."""
        start = _padded(self.levels)
        q = payload[..., : self.levels]
        ends = [payload[..., a : a + self._scales] for a in (start, start + self._scales)]
        scale, zero = (x.view(self.dtype)[..., : self.groups] for x in ends)
        kind = torch.int8 if self.symmetric and self.bits == 8 else torch.uint8
        return q.view(kind), scale, None if self.symmetric else zero


def _padded(size: int) -> int:
    return size + -size % 16


def quantize_payload(
    x: Tensor,
    form: Payload,
    error: Tensor | None = None,
    *,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The payload of ``x``, or of ``x + error`` and the error that remains.

    Args:
        x: ``[n]``, floating-point.
        form: what to send.
        error: ``[n]`` of ``form.dtype``: what earlier calls left out.
        seed: rounds stochastically; to nearest without one.

    Returns:
        ``(payload, error)``: ``uint8[form.bytes]``, and the new error, ``None`` without one.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or gradients are being recorded.

    >>> form = Payload(4, bits=8)
    >>> payload, left = quantize_payload(torch.tensor([1.0, 2.0, 3.0, 127.4]), form, torch.zeros(4))
    >>> payload[:4]
    tensor([  1,   2,   3, 127], dtype=torch.uint8)
    """
    undifferentiated("quantize_payload", INSTEAD, x, error)
    payload, new = _quantize_payload(x, error, *_flat(form), seed_tensor(seed))
    return payload, None if error is None else new


def quantize_payload_(
    x: Tensor, form: Payload, error: Tensor, *, seed: int | Tensor | None = None
) -> Tensor:
    """As :func:`quantize_payload`; the new error replaces the old one where it lies.

    Returns:
        The payload.

    Raises:
        KernelError: as :func:`quantize_payload`, or ``error`` is not contiguous.

    >>> error = torch.full((2,), 0.25)
    >>> quantize_payload_(torch.tensor([1.0, 126.75]), Payload(2), error)[:2], error
    (tensor([  1, 127], dtype=torch.uint8), tensor([0.2500, 0.0000]))
    """
    undifferentiated("quantize_payload_", INSTEAD, x, error)
    return _quantize_payload_(x, error, *_flat(form), seed_tensor(seed))


def mean_payloads(
    received: Tensor,
    form: Payload,
    error: Tensor | None = None,
    *,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The payload of the mean of what W ranks sent, with the error that is left.

    Of 4 bits in float32 and without an error, each sender's scale is rounded to 16 bits first: one
    multiply-add for a level is exact then, and the mean off by 2**-16 of its terms at most.

    Args:
        received: ``uint8[W, form.bytes]``.
        form: of what came and of what leaves.
        error: ``[n]`` of ``form.dtype``, added to the mean.
        seed: rounds stochastically; to nearest without one.

    Returns:
        ``(payload, error)`` as from :func:`quantize_payload`.

    Raises:
        KernelError: as :func:`quantize_payload`, or no rank sent anything.

    >>> form = Payload(2)
    >>> sent = [quantize_payload(torch.tensor(x), form)[0] for x in ([1.0, 127.0], [3.0, 127.0])]
    >>> dequantize_payload(mean_payloads(torch.stack(sent), form)[0], form)
    tensor([  2., 127.])
    """
    undifferentiated("mean_payloads", INSTEAD, error)
    payload, new = _mean_payloads(received, error, *_flat(form), seed_tensor(seed))
    return payload, None if error is None else new


def mean_payloads_(
    received: Tensor, form: Payload, error: Tensor, *, seed: int | Tensor | None = None
) -> Tensor:
    """As :func:`mean_payloads`; the new error replaces the old one where it lies.

    Returns:
        The payload.

    Raises:
        KernelError: as :func:`mean_payloads`, or ``error`` is not contiguous.

    >>> form, error = Payload(2), torch.tensor([0.25, 0.0])
    >>> sent = quantize_payload(torch.tensor([1.0, 127.0]), form)[0]
    >>> mean_payloads_(sent[None], form, error)[:2], error
    (tensor([  1, 127], dtype=torch.uint8), tensor([0.2500, 0.0000]))
    """
    undifferentiated("mean_payloads_", INSTEAD, error)
    return _mean_payloads_(received, error, *_flat(form), seed_tensor(seed))


def dequantize_payload(
    payload: Tensor, form: Payload, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What payloads stand for.

    Args:
        payload: ``uint8[form.bytes]``, or a row for each sender.
        form: as they were made.
        dtype: of the result.

    Returns:
        ``[n]`` or ``[senders, n]``.

    Raises:
        KernelError: these are no such payloads.

    >>> form = Payload(3, bits=4, symmetric=False)
    >>> dequantize_payload(quantize_payload(torch.tensor([0.0, 1.0, 5.0]), form)[0], form)
    tensor([0., 1., 5.])
    """
    return _dequantize_payload(payload, *_flat(form), dtype)


def _flat(form: Payload) -> tuple[int, int, int, bool, torch.dtype]:
    """A form as operators take it."""
    return form.n, form.bits, form.group, form.symmetric, form.dtype


def _check(name: str, form: Payload, **tensors: Tensor | None) -> None:
    agree(name, **tensors)
    for label, x in tensors.items():
        if x is not None and (x.shape != (form.n,) or not numbers(x)):
            raise KernelError(
                f"kernels.{name}: {label} is {x.dtype}{list(x.shape)}; expected floating-point "
                f"numbers of 16 bits or more, of shape [{form.n}], as the payload has."
            )
    error = tensors.get("error")
    if error is not None and error.dtype != form.dtype:
        raise KernelError(
            f"kernels.{name}: error is {error.dtype}; expected {form.dtype}, as the payload has."
        )


def _check_received(name: str, received: Tensor, form: Payload, error: Tensor | None) -> None:
    if error is not None:
        _check(name, form, error=error)
    _check_payload(name, received, form, (2,))
    if not received.shape[0]:
        raise KernelError(f"kernels.{name}: no payloads; expected a row for each sender.")


def _check_payload(name: str, payload: Tensor, form: Payload, dims: tuple[int, ...]) -> None:
    fits = payload.dim() in dims and payload.shape[-1] == form.bytes
    if not fits or payload.dtype != torch.uint8:
        shape = f"[senders, {form.bytes}]" if dims == (2,) else f"[{form.bytes}]"
        raise KernelError(
            f"kernels.{name}: payload is {payload.dtype}{list(payload.shape)}; expected "
            f"uint8{shape} for {form}."
        )


def _checked(
    name: str, x: Tensor, error: Tensor | None, form: Payload, seed: Tensor | None
) -> None:
    """``x``, or what was received, with an error, before memory is touched."""
    _check_form(name, form)
    check_seed(name, seed)
    if name.startswith("mean"):
        _check_received(name, x, form, error)
        together(name, received=x, error=error)
    else:
        _check(name, form, x=x, error=error)
    if name.endswith("_"):
        dense(name, error=error)


def _check_form(name: str, form: Payload) -> None:
    if form.n < 0 or not form.dtype.is_floating_point:
        raise KernelError(
            f"kernels.{name}: {form.n} elements with scales in {form.dtype}; expected a number of "
            "them, and a floating-point dtype."
        )


def _check_unpack(payload: Tensor, form: Payload, dtype: torch.dtype) -> None:
    _check_form("dequantize_payload", form)
    _check_payload("dequantize_payload", payload, form, (1, 2))


def _room(x: Tensor, error: Tensor | None, form: Payload, *rest: Any) -> Tensor:
    """A payload to be filled; what no part covers is 0, so equal values are equal bytes."""
    return x.new_zeros(form.bytes, dtype=torch.uint8)


def _left(x: Tensor, error: Tensor | None, form: Payload) -> Tensor:
    return x.new_empty(form.n if error is not None else 0, dtype=form.dtype)


def _rooms(x: Tensor, error: Tensor | None, form: Payload, *rest: Any) -> tuple[Tensor, Tensor]:
    return _room(x, error, form), _left(x, error, form)


def _fill(x: Tensor, error: Tensor | None, new: Tensor | None, form: Payload, seed: Any) -> Tensor:
    """The payload of values, or of the mean of what was received (a row for each sender)."""
    payload = _room(x, error, form)
    if form.n:
        mean = x.dim() == 2
        x, scales, zeros = form.parts(aligned(x)) if mean else (x.contiguous()[None], None, None)
        into, size = form.parts(payload), (1, form.n)
        given = Quantizing(x, size, form.symmetric, scales, zeros, error, *into, new)
        name = "mean_payloads" if mean else "quantize_groups"
        dispatch.run(name, given, bits=form.bits, size=form.group, seed=seed)
    return payload


def _filled(
    x: Tensor, error: Tensor | None, form: Payload, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    left = _left(x, error, form)
    old, new = (None, None) if error is None else (error.contiguous(), left)
    return _fill(x, old, new, form, seed), left


@operator(_rooms, batch=looped, check=partial(_checked, "quantize_payload"))
def _quantize_payload(
    x: Tensor, error: Tensor | None, form: Payload, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _filled(x, error, form, seed)


@operator(_room, check=partial(_checked, "quantize_payload_"))
def _quantize_payload_(x: Tensor, error: Written, form: Payload, seed: Tensor | None) -> Tensor:
    apart("quantize_payload_", x=x, error=error)
    return _fill(x, error, error, form, seed)


@operator(_rooms, batch=looped, check=partial(_checked, "mean_payloads"))
def _mean_payloads(
    received: Tensor, error: Tensor | None, form: Payload, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _filled(received, error, form, seed)


@operator(_room, check=partial(_checked, "mean_payloads_"))
def _mean_payloads_(received: Tensor, error: Written, form: Payload, seed: Tensor | None) -> Tensor:
    received = received.contiguous()
    apart("mean_payloads_", received=received, error=error)
    return _fill(received, error, error, form, seed)


def _expanded(payload: Tensor, form: Payload, dtype: torch.dtype) -> Tensor:
    return payload.new_empty((*payload.shape[:-1], form.n), dtype=dtype)


@operator(_expanded, batch=looped, check=_check_unpack)
def _dequantize_payload(payload: Tensor, form: Payload, into: torch.dtype) -> Tensor:
    out = _expanded(payload, form, into)
    rows = aligned(payload).view(-1, form.bytes) if payload.numel() else ()
    how = {"bits": form.bits, "size": form.group}
    for target, row in zip(out.view(-1, form.n) if out.numel() else (), rows, strict=False):
        dispatch.run("dequantize_groups", *form.parts(row), target[None], **how)
    return out


dispatch.register(
    "mean_payloads",
    quantize_twin,
    "groupwise_triton",
    "W/2 + 0.5 B of 4 bits from W ranks, and 8 B with an error",
    machine=mean_limit,
    **KINDS,
)
