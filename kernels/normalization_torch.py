"""Twins in plain torch of :mod:`zfunc.kernels.normalization`, and its formula for autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.kernels.operators import wide
from zfunc.kernels.pieces_torch import row_pieces
from zfunc.trees.kinds import kind

__all__ = [
    "Form",
    "NormGradients",
    "Normed",
    "Rows",
    "Saved",
    "backward_formula",
    "backward_twin",
    "forward_twin",
    "wide",
]

NEAR = 2.0  # standard deviations
NormGradients = tuple[Tensor, Tensor | None, Tensor | None]  # of rows, weight and bias


class Form(NamedTuple):
    """What is added to squares and to weights; whether the mean is taken off."""

    eps: float
    offset: float
    center: bool


class Rows(NamedTuple):
    """Rows ``[M, N]`` that are normalised, and for each column a number of any floating dtype."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Normed(NamedTuple):
    """What comes out: rows, their sums with the residual, and statistics for the backward.

    ``rstd`` is ``[M]``, ``mean`` (if any) ``[M, 2]``: itself, and what was lost when it was
    rounded, which is as much as the row spreads where the mean is great.
    """

    y: Tensor
    s: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Saved(NamedTuple):
    """What the backward reads of the forward: ``s`` are the rows that were normalised."""

    s: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def forward_twin(rows: Rows, out: Normed, *, form: Form) -> None:
    """Rows in, rows out."""
    x, residual, weight, bias = rows
    y, s, mean, rstd = out
    kind = wide(x)
    gain = None if weight is None else weight.to(kind)
    if gain is not None and form.offset:
        gain = gain + form.offset
    base = None if bias is None else bias.to(kind)
    for part, r, to, sums, means, scales in row_pieces(x, residual, y, s, mean, rstd):
        if r is not None:
            part = torch.add(part, r, out=sums)
        v = part.to(kind)
        if means is None:
            square = torch.linalg.vector_norm(v, dim=-1).square_().div_(v.shape[-1])
            torch.rsqrt(square.add_(form.eps), out=scales)
            v = torch.mul(v, scales[:, None], out=to if to.dtype == kind else None)
            v = v if gain is None else v.mul_(gain)
        else:
            how = (v.shape[-1:], gain, base, form.eps)
            new, first, scale = torch.native_layer_norm(v, *how)
            rest = torch.zeros_like(first)
            if not _around_zero(first, scale):
                first = v.mean(-1, keepdim=True)
                new, rest, scale = torch.native_layer_norm(v - first, *how)
            v, means[:, :1], means[:, 1:], scales[:] = new, first, rest, scale[:, 0]
        if v is not to:
            to.copy_(v)


def backward_twin(
    grad: Tensor, grad_s: Tensor | None, saved: Saved, out: NormGradients, *, form: Form
) -> None:
    """Rows in, their gradients and sums over rows out."""
    s, weight, _, mean, rstd = saved
    dx, dw, db = out
    kind = wide(s)
    gain = None if weight is None else weight.to(kind) + form.offset
    totals = [None if x is None else torch.zeros_like(x, dtype=kind) for x in (dw, db)]
    for go, more, part, means, scales, to in row_pieces(grad, grad_s, s, mean, rstd, dx):
        pull = _rms_pull if means is None else _layer_pull
        new, *sums = pull(go.to(kind), part.to(kind), gain, means, scales[:, None], totals)
        to.copy_(new if more is None else new.add_(more))
        for total, some in zip(totals, sums, strict=True):
            if total is not None and some is not None:
                total += some
    for target, total in zip((dw, db), totals, strict=True):
        if target is not None and total is not None:
            target.copy_(total)


def _rms_pull(
    g: Tensor, v: Tensor, gain: Tensor | None, mean: None, scale: Tensor, wanted: list[Any]
) -> tuple[Tensor, Tensor | None, None]:
    """Gradients of a row and of the weight, whose gradient is wanted where ``wanted[0]`` is."""
    v = v * scale
    shares = g * v
    dw = None if wanted[0] is None else shares.sum(0)
    if gain is not None:
        g, shares = g * gain, shares.mul_(gain)
    new = torch.addcmul(g, v, shares.mean(-1, keepdim=True), value=-1)
    return new.mul_(scale), dw, None


def _layer_pull(
    g: Tensor, v: Tensor, gain: Tensor | None, mean: Tensor, scale: Tensor, wanted: list[Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Likewise, and of the bias; by torch's kernel, on rows that lie around zero."""
    mask = [True, *(x is not None for x in wanted)]
    first, rest = mean[:, :1], mean[:, 1:]
    if _around_zero(first, scale):
        rest = first + rest
    else:
        v = v - first
    base = wanted[1]  # any bias does: only that there is one matters
    found: tuple[Tensor, Tensor | None, Tensor | None]
    found = torch.ops.aten.native_layer_norm_backward(
        g, v, v.shape[-1:], rest.contiguous(), scale, gain, base, mask
    )
    return found


def _around_zero(mean: Tensor, scale: Tensor) -> bool:
    """Whether rows spread as far as they lie from zero, or nearly so.

    Torch's kernel then keeps the digits of a row less its mean; further out they are taken before.
    Where looking makes the host wait they always are.
    """
    return kind(mean.device) == "cpu" and bool((mean.abs() * scale).amax() <= NEAR)


def backward_formula(
    grad: Tensor, grad_s: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as a function that autograd can follow, ``mean`` and ``rstd`` of ``s`` too."""
    s, weight, bias, _, _, eps, offset, center = rest
    g, v = grad.to(wide(s)), s.to(wide(s))
    if center:
        v = v - v.mean(-1, keepdim=True)
        v = v - v.mean(-1, keepdim=True)
    scale = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    v = v * scale
    rows = tuple(range(g.dim() - 1))
    dw, db = s.new_empty(0), s.new_empty(0)
    if bias is not None:
        db = (g.sum(rows) if rows else g).to(bias.dtype)
    if weight is not None:
        dw = ((g * v).sum(rows) if rows else g * v).to(weight.dtype)
        g = g * (weight.to(g.dtype) + offset)
    new = g - v * (g * v).mean(-1, keepdim=True)
    if center:
        new = new - g.mean(-1, keepdim=True)
    new = (new * scale).to(s.dtype)
    return new if grad_s is None else new + grad_s, dw, db
