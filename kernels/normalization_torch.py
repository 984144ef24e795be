"""Twins in plain torch of :mod:`zfunc.kernels.normalization`, and its formula for autograd."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["backward_formula", "backward_twin", "forward_twin", "wide"]


def wide(x: Tensor) -> torch.dtype:
    """The dtype that sums are made in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward_twin(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    s: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    eps: float,
    offset: float,
) -> None:
    """Rows ``[M, N]`` in, rows out.

    ``rstd`` is ``[M]``, ``mean`` (if any) ``[M, 2]``: itself, and what was lost when it was
    rounded, which is as much as the row spreads where the mean is great.
    """
    if residual is not None and s is not None:
        x = torch.add(x, residual, out=s)
    v = x.to(wide(x))
    if mean is not None:
        torch.mean(v, -1, out=mean[:, 0])
        v = v - mean[:, :1]
        torch.mean(v, -1, out=mean[:, 1])
        v.sub_(mean[:, 1:])
    square = torch.linalg.vector_norm(v, dim=-1).square_().div_(v.shape[-1])
    torch.rsqrt(square.add_(eps), out=rstd)
    v = v * rstd[:, None]
    if weight is not None:
        v.mul_(weight.to(v.dtype) + offset if offset else weight.to(v.dtype))
    if bias is not None:
        v.add_(bias)
    y.copy_(v)


def backward_twin(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dw: Tensor | None,
    db: Tensor | None,
    *,
    offset: float,
) -> None:
    """Rows ``[M, N]`` in, ``dx`` like them out, and sums over rows ``[N]``."""
    g, v = grad.to(wide(s)), s.to(wide(s))
    v = (v if mean is None else (v - mean[:, :1]).sub_(mean[:, 1:])) * rstd[:, None]
    if db is not None:
        db.copy_(g.sum(0))
    if weight is not None:
        if dw is not None:
            dw.copy_((g * v).sum(0))
        g = g * (weight.to(g.dtype) + offset)
    shares = (g * v).mean(-1, keepdim=True)
    new = torch.addcmul(g, v, shares, value=-1)
    if mean is not None:
        new.sub_(g.mean(-1, keepdim=True))
    new.mul_(rstd[:, None])
    dx.copy_(new if grad_s is None else new.add_(grad_s))


def backward_formula(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    offset: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as a function that autograd can follow, ``mean`` and ``rstd`` of ``s`` too."""
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
