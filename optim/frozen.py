"""Adam and LAMB once second moments are frozen: moments, directions, and AdamW in one walk.

Momentum is in units of the roots of frozen second moments then, which is how few bits serve it
best: all elements are of one size, as a sign with a shared scale takes them to be. (The scaling
coefficients of 1-bit LAMB, Li et al. 2021, do that for each leaf.) An element without a second
moment never had a gradient: its share is 0. What is left of one step's rounding goes into the
next, so units must not grow as frozen second moments do: their bias is corrected first.

Compressed steps are worth most where networks are slow and models small, and there the passes of
the general form (moments, direction, decay, update, sum, each over all leaves) take longer than
what is sent. So there is :func:`step`: one walk over the tree, in place where memory is donated.
Elementwise multiplications, divisions, roots and sums alone: each is rounded alike however a tree
is cut.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.kernels.frozen import (
    adamw_frozen_,
    frozen_hyper,
    momentum_shares_,
    roots,
    shares_hyper,
)
from zfunc.kernels.pieces_torch import element_pieces
from zfunc.optim.adaptive import direction
from zfunc.optim.adjacent import joined
from zfunc.optim.decay import Rates
from zfunc.optim.fused import own, stretches_of
from zfunc.optim.moments import blend
from zfunc.optim.rates import plain
from zfunc.trees import tree
from zfunc.trees.boxes import in_box, in_flats
from zfunc.trees.nodes import NAMESPACE, Placed, opened
from zfunc.trees.reduction import compressing, frozen, linear_map, reduced, settled
from zfunc.trees.squares import wide
from zfunc.trees.unitwise import streams
from zfunc.trees.unreduced import Unreduced

__all__ = [
    "bounded",
    "check_begun",
    "first",
    "grown",
    "growth",
    "local",
    "momentum",
    "reach",
    "second",
    "shares",
    "step",
]

LEAPS = 16  # in which moments of 16 bits double, once they are frozen

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


def bounded(m: Tensor, v: Tensor, *, b1: float, b2: float, **how: Any) -> Tensor:
    """Adam's direction with frozen second moments.

    An element that never had a gradient has none, even where its mean is not quite zero: one bit
    cannot encode a zero. And one whose gradients have grown since keeps to what Adam allows it
    (:func:`reach`).
    """
    most = reach(b1, b2)
    step = direction(m, v, b1=b1, b2=b2, **how)
    return torch.where(v > 0, step.clamp(-most, most), 0.0)


def first(
    grads: Tree, mu: Tree, decay: float, nu: Tree = None, correction: float | Tensor = 1.0
) -> Tree:
    """The running mean of the gradients, averaged over ranks where it is not yet.

    Args:
        nu, correction: frozen second moments, and the correction of their bias.
    """
    if nu is None or not local(grads):
        return reduced(blend(grads, mu, decay, 1 - decay), momentum=True)
    mine = shares(grads, mu, nu, decay, correction)
    return momentum(reduced(mine), nu, correction)


def local(grads: Tree) -> bool:
    """Whether a tree holds gradients that are a rank's own."""
    found = optree.tree_leaves(
        grads, is_leaf=lambda node: isinstance(node, Unreduced), namespace=NAMESPACE
    )
    return any(isinstance(node, Unreduced) and not node.done for node in found)


def shares(grads: Tree, mu: Tree, nu: Tree, decay: float, correction: float | Tensor) -> Tree:
    """The running mean of gradients, in units; in the memory of ``mu`` where that is donated.

    Args:
        grads: gradients, perhaps ``Unreduced``: the result is as they are.
        mu: the mean before this step.
        nu: second moments as they were frozen.
        decay: of the mean.
        correction: of the bias of ``nu``.
    """
    nodes, spec = optree.tree_flatten(
        opened(grads),
        is_leaf=lambda x: isinstance(x, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    values = [x.value if isinstance(x, Unreduced) else x for x in nodes]
    flat, mean, squares = in_flats((optree.tree_unflatten(spec, values), mu, nu))
    if not isinstance(flat, Placed):
        return _shares(grads, mu, nu, decay, correction)
    new = in_box(mu, _shares(flat, mean, squares, decay, correction)).leaves
    rows = zip(nodes, new, strict=True)
    return optree.tree_unflatten(
        spec, [x.like(y) if isinstance(x, Unreduced) else y for x, y in rows]
    )


def _shares(grads: Tree, mu: Tree, nu: Tree, decay: float, correction: float | Tensor) -> Tree:
    rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def collect(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        rows.append((m, g, v))
        return m

    part = tree.map(linear_map(collect), grads, mu, nu)
    m, g, v = zip(*rows, strict=True) if rows else ((), (), ())
    new = [x.contiguous() for x in own(m)]
    flat = [[x.contiguous() for x in column] for column in (g, v)]
    knobs: dict[torch.device, Tensor] = {}
    for m_, g_, v_ in joined(list(zip(new, *flat, strict=True))):
        if m_.device not in knobs:
            knobs[m_.device] = shares_hyper(decay, correction, m_.device)
        momentum_shares_(g_, m_, v_, knobs[m_.device])
    return optree.tree_unflatten(optree.tree_structure(part, namespace=NAMESPACE), new)


def momentum(shares: Tree, nu: Tree, correction: float | Tensor) -> Tree:
    """What shares stand for, in their memory, which must be the caller's."""
    rows: list[tuple[Tensor, Tensor]] = []

    def collect(x: Tensor, v: Tensor) -> Tensor:
        out = x.contiguous()
        rows.append((out, v.contiguous()))
        return out

    out = tree.map(collect, shares, nu)
    for row in joined(rows):
        for x, v in element_pieces(*(column[None] for column in row)):
            x.copy_(wide(x).mul_(roots(v, correction)))
    return out


def second(grads: Tree, nu: Tree, decay: float, count: Tensor) -> Tree:
    """The running mean of their squares, unless a transform has frozen it.

    A frozen one stays what it was *after* its bias is corrected: it grows as the mean of
    equal squares would, by ``(1 - decay**count) / (1 - decay**(count - 1))``.

    Args:
        count: the number of this step, from 1; 0-d.
    """
    if frozen():
        return grown(settled(nu, nu, decay), decay, count)
    kept = tree.map(torch.clone, nu) if compressing() else None
    new = blend(reduced(grads), nu, decay, 1 - decay, square=True)
    return settled(kept, new, decay)


def grown(nu: Tree, decay: float, count: Tensor) -> Tree:
    """Frozen second moments after step ``count``; see :func:`second`."""
    return tree.map(lambda v: (wide(v) * growth(decay, count, v.dtype)).to(v.dtype), nu)


def growth(decay: float, count: Tensor, dtype: torch.dtype = torch.float32) -> float | Tensor:
    """By how much a running mean of equal numbers that starts from 0 grows in this step.

    Args:
        dtype: of the mean. In 16 bits a growth of a fraction of a per cent would be rounded away
            in every step; there it comes in leaps of ``2**(1/16)``, so that the mean is at most
            4.4 % from where it should be, and its root 2.2 %.

    Raises:
        CompositionError: it is the first, from nothing.

    >>> count = torch.tensor(100)
    >>> growth(0.999, count), growth(0.999, count, torch.bfloat16)
    (1.0096..., 1.0)
    """
    number = plain(count)
    if isinstance(number, Tensor):
        both = torch.stack([1 - decay**number, (1 - decay ** (number - 1)).clamp_min(1e-38)])
        if dtype.itemsize < 4:
            both = torch.exp2((both.log2() * LEAPS).floor() / LEAPS)
        return torch.where(number > 1, both[0] / both[1], 1.0)
    check_begun(number)
    now, before = 1 - decay**number, 1 - decay ** (number - 1)
    if dtype.itemsize < 4:
        return 2.0 ** ((_leap(now) - _leap(before)) / LEAPS)
    return now / before


def _leap(correction: float) -> int:
    return math.floor(math.log2(correction) * LEAPS)


def check_begun(number: float) -> None:
    """Raise ``CompositionError`` where moments are frozen in step ``number`` 1."""
    if number <= 1:
        raise CompositionError(
            "compress_grads freezes second moments in the first step of an optimizer, before "
            "anything has gone into them. Give it a freeze_step of 1 at least; it counts from the "
            "step of the state that it places, so with a new optimizer let that begin at 0: "
            "state.replace(step=torch.tensor(0))."
        )


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
            (:func:`shares`).
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
