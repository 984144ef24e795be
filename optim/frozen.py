"""AdamW once second moments are frozen: one walk over the tree, in place where memory is donated.

Compressed steps are worth most where networks are slow and models small, and there the passes of
the general form (moments, direction, decay, update, sum, each over all leaves) take longer than
what is sent. Elementwise multiplications, divisions, roots and sums alone: each is rounded alike
however a tree is cut.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc import tree
from zfunc.nodes import NAMESPACE
from zfunc.optim.decay import Rates
from zfunc.optim.fused import own, stretches_of
from zfunc.optim.moments import CHUNK, growth
from zfunc.optim.schedules import plain
from zfunc.placed.unitwise import streams

__all__ = ["reach", "step"]

Tree = Any


def reach(b1: float, b2: float) -> float:
    """The most that Adam's direction ``m / sqrt(v)`` can be, whatever the gradients.

    By Cauchy and Schwarz, for means of the same gradients:
    ``(1 - b1) / sqrt((1 - b2) (1 - b1**2 / b2))``.
    Where second moments are frozen nothing else holds an element whose gradients grow, and in LAMB
    a few such elements make up the norm that all others share.

    >>> round(reach(0.9, 0.999), 3), round(reach(0.9, 0.95), 3)
    (7.27, 1.165)
    """
    room = (1 - b2) * (1 - b1 * b1 / b2) if b2 > b1 * b1 else 0.0
    return (1 - b1) / room**0.5 if room > 0 else math.inf


def step(
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Rates,
    count: Tensor,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tree, Tree] | None:
    """Parameters after one step, and the frozen second moments, grown as their correction does.

    Args:
        params: parameters before the step.
        mu: momentum of this step, averaged.
        nu: second moments as they were frozen.
        decay: weight decay, of all leaves or by leaf path.
        count: number of this step, from 2; 0-d.

    Returns:
        ``(params, nu)``, or ``None``, with nothing touched, where the general form is needed.
    """
    if streams(params, mu, nu) or (torch.is_grad_enabled() and _tracked(params)):
        return None
    rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def collect(m: Tensor, p: Tensor, v: Tensor) -> Tensor:
        rows.append((p, m, v))
        return m

    part = tree.map(collect, mu, params, nu)
    if any(x.dtype != row[0].dtype or x.dtype.itemsize < 4 for row in rows for x in row):
        return None
    number, spec = plain(count), optree.tree_structure(part, namespace=NAMESPACE)
    how = {
        "grown": growth(b2, count),
        "rate": lr / (1 - b1**number),
        "most": lr * reach(b1, b2),
        "correction": 1 - b2**number,
        "eps": eps,
    }
    p, m, v = zip(*rows, strict=True) if rows else ((), (), ())
    new = [[x.contiguous() for x in own(column)] for column in (p, v)]
    for p_, m_, v_, stretches in zip(new[0], m, new[1], stretches_of(decay, part), strict=True):
        flat = [x.view(-1) for x in (p_, m_.contiguous(), v_)]
        for start, stop, rate in stretches:
            for a in range(start, stop, CHUNK):
                _chunk(*(x[a : min(a + CHUNK, stop)] for x in flat), kept=1 - lr * rate, **how)
    return optree.tree_unflatten(spec, new[0]), optree.tree_unflatten(spec, new[1])


def _tracked(params: Tree) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree.leaves(params))


def _chunk(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    grown: float,
    rate: float,
    most: float,
    correction: float,
    eps: float,
    kept: float,
) -> None:
    """An element whose second moment is 0 never had a gradient: it has no direction."""
    v.mul_(grown)
    size = (v / correction).sqrt_().add_(eps)
    move = (m * rate).div_(size).clamp_(-most, most).masked_fill_(v == 0, 0.0)
    if kept != 1:
        p.mul_(kept)
    p.sub_(move)
