"""Momentum in units of the roots of frozen second moments, which is how few bits serve it best.

All elements are then of one size, as a sign with a shared scale takes them to be. (The scaling
coefficients of 1-bit LAMB, Li et al. 2021, do that for each leaf.) An element without a second
moment never had a gradient: its share is 0.

What is left of one step's rounding goes into the next, so units must not grow as frozen second
moments do: their bias is corrected first.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.kernels.frozen import momentum_shares_, roots, shares_hyper, wide
from zfunc.kernels.pieces_torch import element_pieces
from zfunc.layout.replicated import in_box, in_flats
from zfunc.layout.sharded import Sharded
from zfunc.layout.unreduced import Unreduced, linear_map
from zfunc.optim.adjacent import joined
from zfunc.optim.fused import own
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed, opened

__all__ = ["local", "momentum", "shares"]

Tree = Any


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
    if not isinstance(flat, Sharded):
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
