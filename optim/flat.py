"""Lion and LAMB in the kernels of :mod:`zfunc.kernels`, where there are such for the tensors.

That is on a GPU: plain torch operations pass over memory a dozen times, the kernels once (LAMB
twice). On a CPU, and for what is traced, differentiated or compressed, the callers go on with
plain operations, which give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from zfunc.engine import primitives
from zfunc.kernels.dispatch import choose
from zfunc.kernels.lamb import lamb_apply_, lamb_hyper, lamb_moments_, lamb_ratios
from zfunc.kernels.lion import lion_flat_, lion_hyper
from zfunc.layout.replicated import in_box, in_flats
from zfunc.optim.base import nodes
from zfunc.optim.buffers import Launch, Stretch, parted, runs
from zfunc.optim.fused import Piece, own, pieces_of
from zfunc.optim.paces import Paces, own_pace
from zfunc.optim.schedules import symbolic
from zfunc.optim.updates import Scaled
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed
from zfunc.trees.unitwise import streams

__all__ = ["lamb_step", "lion_step"]

Tree = Any
Number = float | Tensor


@dataclass(frozen=True)
class _Buffers:
    """What a kernel is to step through: gradients, what they are multiplied by, and the rest."""

    grads: list[Tensor]
    factor: Number
    state: list[tuple[Tensor, ...]]  # parameters and moments of each buffer
    part: Tree  # parameters, placed as the gradients are
    pieces: list[tuple[int, list[Piece]]]  # of each buffer its length, and what of which leaf it is
    boxes: tuple[Tree, ...]  # what parameters and moments were before

    def renewed(self) -> list[list[Tensor]]:
        """Memory for the new parameters and moments, with the old ones in it."""
        return [own(column) for column in zip(*self.state, strict=True)]

    def stretches(self, decay: Paces) -> list[list[Stretch]]:
        """Of each buffer, what stretches of it decay by how much."""
        if not callable(decay):
            return [[(0, length, decay)] for length, _ in self.pieces]
        return [
            list(runs([(a, decay(path)) for path, a, _ in pieces], length))
            for length, pieces in self.pieces
        ]

    def trees(self, columns: list[list[Tensor]]) -> list[Tree]:
        spec = optree.tree_structure(self.part, namespace=NAMESPACE)
        new = [optree.tree_unflatten(spec, column) for column in columns]
        return [in_box(old, x) for old, x in zip(self.boxes, new, strict=True)]


def lion_step(
    grads: Tree, params: Tree, mu: Tree, *, decay: Paces, lr: Number, b1: float, b2: float
) -> tuple[Tree, Tree] | None:
    """One step of Lion in memory of its own (that of the arguments where it is donated).

    Args:
        grads: gradients, or a ``Scaled`` of them; everything is placed as they are.
        params, mu: parameters and momentum, of one dtype.
        decay: weight decay, of all leaves or by leaf path; see :mod:`zfunc.optim.paces`.
        lr, b1, b2: see :func:`zfunc.optim.lion`.

    Returns:
        ``(params, mu)``, or ``None``, with nothing touched, where there is no kernel.
    """
    found = _collected("lion_flat", lr, grads, params, mu)
    if found is None:
        return None
    with torch.no_grad():
        stretches = found.stretches(decay)
        new = found.renewed()
        groups: dict[tuple[torch.device, Any, torch.dtype], Launch] = {}
        for g, p, m, pieces in zip(found.grads, *new, stretches, strict=True):
            for part, rate in parted((p, g, m), pieces):
                if rate is not None:  # else these leaves rest
                    groups.setdefault((p.device, rate, p.dtype), Launch()).add(part)
        made: dict[tuple[torch.device, Any], Tensor] = {}
        for (device, rate, _), group in groups.items():
            if (device, rate) not in made:
                decay = own_pace(rate).decay
                made[device, rate] = lion_hyper(
                    lr, b1=b1, b2=b2, weight_decay=decay, factor=found.factor, device=device
                )
            for row in group.stage():
                param, grad, mean = (x.view(-1) for x in row)
                lion_flat_(grad, param, mean, made[device, rate])
            group.unstage()
    params, mu = found.trees(new)
    return params, mu


def lamb_step(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Paces,
    lr: Number,
    steady: Callable[[Tree], tuple[Tree, Tensor]],
    **how: Any,
) -> tuple[Tree, Tree, Tree, Tree, Tensor] | None:
    """One step of LAMB, as :func:`lion_step`.

    Each pass is one launch for the leaves of a buffer that decay alike. In between, the squares
    of both norms of all leaves of a placed tree are summed over the ranks in one collective.

    Args:
        grads, params, mu, nu: as there, and second moments.
        decay, lr: as there.
        steady: from the trust ratios of this step to those that are used, and their mean.
        how: ``count``, ``b1``, ``b2`` and ``eps`` of :func:`lamb_hyper`.

    Returns:
        ``(params, mu, nu, ratios, mean)``, or ``None``.
    """
    found = _collected("lamb_moments", lr, grads, params, mu, nu)
    if found is None:
        return None
    with torch.no_grad():
        new = found.renewed()
        runs = list(_runs(found, new, partial(lamb_hyper, lr, **how), decay))
        squares: dict[str, Tensor] = {}
        for run in runs:
            param, one, two = run.state
            both = lamb_moments_(run.grad, param, one, two, run.spans, run.hyper)
            squares.update(zip(run.paths, both.unbind(), strict=True))
        ratios, mean = steady(_ratios(found.part, squares))
        known = dict(nodes(ratios))
        for run in runs:
            param, one, two = run.state
            ratio = torch.stack([known[path].to(param.device) for path in run.paths])
            lamb_apply_(param, one, two, run.spans, ratio, run.hyper)
    params, mu, nu = found.trees(new)
    return params, mu, nu, ratios, mean


class _Run(NamedTuple):
    """Leaves of one buffer that decay alike: where they lie, and what they are stepped with."""

    grad: Tensor
    state: list[Tensor]
    paths: list[str]
    spans: list[tuple[int, int]]
    hyper: Tensor


def _runs(
    found: _Buffers, new: list[list[Tensor]], hyper: Callable[..., Tensor], decay: Paces
) -> Iterator[_Run]:
    made: dict[tuple[torch.device, float], Tensor] = {}
    for g, *state, (_, pieces) in zip(found.grads, *new, found.pieces, strict=True):
        alike: dict[float, list[Piece]] = {}
        for piece in pieces:
            rate = decay(piece[0]) if callable(decay) else decay
            alike.setdefault(rate, []).append(piece)
        for rate, same in alike.items():
            key = (g.device, rate)
            if key not in made:
                made[key] = hyper(factor=found.factor, weight_decay=rate, device=g.device)
            paths, spans = [path for path, *_ in same], [(a, b) for _, a, b in same]
            yield _Run(g.view(-1), [x.view(-1) for x in state], paths, spans, made[key])


def _ratios(part: Tree, squares: dict[str, Tensor]) -> Tree:
    """Trust ratios of full leaves: a plain tree, as ``tree.leaf_norms`` gives one."""
    totals = []
    for path, node in nodes(part):
        if isinstance(node, Placed):
            names = {name: tree.dotted(path, name) for name in node.names()}
            inner = {name: squares[key] for name, key in names.items() if key in squares}
            totals.append(node.totals(inner, shape=(2,)))
        else:
            totals.append(squares[path])
    spec = optree.tree_structure(part, is_leaf=_is_placed, namespace=NAMESPACE)
    both, plain = optree.tree_flatten(optree.tree_unflatten(spec, totals), namespace=NAMESPACE)
    if not both:
        return optree.tree_unflatten(plain, [])
    table = torch.stack([x.to(both[0]) for x in both])
    return optree.tree_unflatten(plain, lamb_ratios(table).unbind())


def _is_placed(node: Any) -> bool:
    return isinstance(node, Placed)


def _collected(name: str, lr: Number, grads: Tree, *state: Tree) -> _Buffers | None:
    """The buffers, if the dispatch has a kernel for all of them; nothing is touched."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    if primitives.compressing() or primitives.frozen():
        return None
    if isinstance(lr, Tensor) and (lr.device.type != "cuda" or symbolic(lr)):
        return None
    factor: Number = 1.0
    if isinstance(grads, Scaled):
        grads, factor = grads.grads, grads.factor
    if streams(grads, *state):
        return None
    trees = in_flats((primitives.reduced(grads), *state))
    rows: list[tuple[Tensor, ...]] = []

    def collect(*row: Tensor) -> Tensor:
        rows.append(row)
        return row[1]

    part = tree.map(collect, *trees)
    if not rows or not all(_fits(name, row) for row in rows):
        return None
    # Now: the leaves of memory that is donated will have no length.
    pieces = list(pieces_of(part))
    grads = [g.contiguous() for g, *_ in rows]
    return _Buffers(grads, factor, [row[1:] for row in rows], part, pieces, state)


def _fits(name: str, row: tuple[Tensor, ...]) -> bool:
    grad, first = row[:2]
    tracked = torch.is_grad_enabled()
    return (
        all(
            type(x) in (Tensor, torch.nn.Parameter)
            and x.layout == torch.strided
            and x.shape == grad.shape
            and x.device == grad.device
            and not (tracked and x.requires_grad)
            for x in row
        )
        and all(x.dtype == first.dtype and x.is_contiguous() for x in row[1:])
        and choose(name, *row).route == "triton"
    )
