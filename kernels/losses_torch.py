"""Twins in plain torch of :mod:`zfunc.kernels.losses`, and its formula for autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.kernels.operators import wide
from zfunc.kernels.pieces_torch import row_pieces

__all__ = ["Terms", "backward_formula", "backward_twin", "forward_twin", "grad_twin"]


class Terms(NamedTuple):
    """Which target is left out, how much is spread over all classes, the weight of the z-loss."""

    ignore: int
    smoothing: float
    z: float


def forward_twin(
    logits: Tensor, target: Tensor, losses: Tensor, total: Tensor, *, terms: Terms
) -> None:
    """Rows ``[M, V]``; ``total`` is ``[M, 2]``: the greatest logit, the sum relative to it."""
    ignore, smoothing, z = terms
    for part, goals, to, sums in row_pieces(logits, target, losses, total):
        x = part.to(wide(logits))
        top = x.amax(-1)
        exps = (x - top[:, None]).exp_().sum(-1)
        sums.copy_(torch.stack([top, exps], -1))
        counts = goals != ignore
        at = x.gather(-1, goals.where(counts, 0)[:, None])[:, 0]
        logs = exps.log_()
        # Differences of logits, not of sums: great logits have no room for a small loss's digits.
        anchor = at.masked_fill(at == -torch.inf, 0.0)
        loss = logs + (top - anchor) - (1 - smoothing) * (at - anchor)
        if smoothing:
            loss -= smoothing * (x - anchor[:, None]).mean(-1)
        if z:
            loss += z * (logs + top).square()
        to.copy_(loss.where(counts, 0.0))


def backward_twin(
    grad: Tensor, logits: Tensor, target: Tensor, total: Tensor, new: Tensor, *, terms: Terms
) -> None:
    """Rows ``[M, V]``, ``total`` ``[M, 2]``, the rest ``[M]``; ``new`` may be ``logits``."""
    ignore, smoothing, z = terms
    for part, g, goals, sums, to in row_pieces(logits, grad, target, total, new):
        top, exps = sums.unbind(-1)
        lift = 1 + 2 * z * (top + exps.log()) if z else torch.ones_like(exps)
        room = to if to.dtype == sums.dtype else torch.empty_like(part, dtype=sums.dtype)
        x = torch.sub(part, top[:, None], out=room)
        x.exp_().mul_((lift / exps)[:, None])
        if smoothing:
            x.sub_(smoothing / x.shape[-1])
        counts = goals != ignore
        at = goals.where(counts, 0)[:, None]
        x.scatter_add_(-1, at, torch.full_like(at, smoothing - 1, dtype=x.dtype))
        x.mul_(g[:, None]).masked_fill_(~counts[:, None], 0.0)
        if x is not to:
            to.copy_(x)


def grad_twin(
    logits: Tensor, target: Tensor, scale: Tensor, losses: Tensor, *, terms: Terms
) -> None:
    """Losses ``[M]``, and ``logits`` ``[M, V]`` made into ``scale`` times their gradient."""
    total = losses.new_empty((len(losses), 2))
    forward_twin(logits, target, losses, total, terms=terms)
    backward_twin(scale.expand_as(losses), logits, target, total, logits, terms=terms)


def backward_formula(
    grad: Tensor, logits: Tensor, target: Tensor, total: Tensor, *terms: Any
) -> Tensor:
    """The gradient as a function that autograd can follow, ``total`` of the logits too."""
    ignore, smoothing, z = terms
    x = logits.to(wide(logits))
    counts = (target != ignore)[..., None]
    at = target[..., None].where(counts, 0)
    one = torch.arange(x.shape[-1], device=x.device) == at
    new = torch.softmax(x, -1)
    if z:
        new = new * (1 + 2 * z * torch.logsumexp(x, -1, keepdim=True))
    new = torch.where(one, new - (1 - smoothing), new) - smoothing / x.shape[-1]
    return (new * grad[..., None]).where(counts, 0.0).to(logits.dtype)
