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

from zfunc.kernels.frozen import adamw_frozen_, frozen_hyper
from zfunc.layout.replicated import in_box, in_flats
from zfunc.optim.adjacent import joined
from zfunc.optim.decay import Rates
from zfunc.optim.fused import own, stretches_of
from zfunc.optim.moments import growth
from zfunc.optim.schedules import plain
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE
from zfunc.trees.unitwise import streams

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
    units: float | None,
    decay: Rates,
    count: Tensor,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tree, Tree, Tree] | None:
    """Parameters and moments after one step; second moments grow as their correction does.

    Args:
        params: parameters before the step.
        mu: momentum of this step, averaged; in memory that becomes the new momentum's.
        nu: second moments as they were frozen.
        units: the correction of second moments, if ``mu`` is in units of their roots
            (:mod:`zfunc.optim.units`).
        decay: weight decay, of all leaves or by leaf path.
        count: number of this step, from 2; 0-d.

    Returns:
        ``(params, mu, nu)``, or ``None``, with nothing touched, where the general form is needed.
    """
    if streams(params, mu, nu):
        return None
    rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def collect(m: Tensor, p: Tensor, v: Tensor) -> Tensor:
        rows.append((p, m, v))
        return m

    flat = in_flats((mu, params, nu))
    part = tree.map(collect, *flat)
    if any(x.dtype != row[0].dtype or x.dtype.itemsize < 4 for row in rows for x in row):
        return None
    if torch.is_grad_enabled() and any(row[0].requires_grad for row in rows):
        return None
    number, spec = plain(count), optree.tree_structure(part, namespace=NAMESPACE)
    numbers = (
        lr / (1 - b1**number),
        growth(b2, count),
        1 - b2**number if units is None else units,
    )
    most = abs(lr) * reach(b1, b2) if lr else 0.0  # which may be infinite
    p, m, v = zip(*rows, strict=True) if rows else ((), (), ())
    new = [[x.contiguous() for x in column] for column in (own(p), m, own(v))]
    alike: dict[tuple[torch.device, float], list[tuple[Tensor, ...]]] = {}
    for row, stretches in zip(zip(*new, strict=True), stretches_of(decay, part), strict=True):
        for start, stop, rate in stretches:
            piece = tuple(x.view(-1)[start:stop] for x in row)
            alike.setdefault((row[0].device, rate), []).append(piece)
    for (device, rate), pieces in alike.items():
        kept = 1 - lr * rate
        hyper = frozen_hyper(*numbers, most=most, eps=eps, kept=kept, device=device)
        for p_, m_, v_ in joined(pieces):
            adamw_frozen_(p_, m_, v_, hyper, shares=units is not None)
    done = [in_box(params, optree.tree_unflatten(spec, column)) for column in new]
    return done[0], done[1], done[2]
