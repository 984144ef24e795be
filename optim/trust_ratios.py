"""Adam's steps, scaled for each leaf by a trust ratio: how LAMB updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from zfunc.kernels.lamb import lamb_apply_, lamb_hyper, lamb_moments_, lamb_ratios
from zfunc.optim import moments
from zfunc.optim.adaptive import direction
from zfunc.optim.base import UpdateFn, nodes, present
from zfunc.optim.decay import Rates, add_decay, map_rates, needs_params
from zfunc.optim.flat import FlatRows, collected
from zfunc.optim.fused import Piece
from zfunc.optim.paces import Paces
from zfunc.optim.rates import Rate, at, plain, started
from zfunc.optim.updates import Moved
from zfunc.trees import tree
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import NAMESPACE, Placed
from zfunc.trees.squares import wide

__all__ = [
    "LambState",
    "lamb_init",
    "lamb_updates",
    "leaves_of",
    "mean_of_ratios",
    "scaled",
    "trust_ratios",
]

COEFF = 0.9  # how much of its past a mean of trust ratios keeps in a step

Tree = Any
Number = float | Tensor


class LambState(NamedTuple):
    """As :class:`~zfunc.optim.adaptive.AdamState`, and ``ratio``, ``[1, leaves]``: running means
    of trust ratios."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree
    nu: Tree
    ratio: Tensor


def lamb_init(params: Tree) -> LambState:
    """The state of LAMB before its first step."""
    ratio = torch.zeros(1, len(list(present(params))), device=_gpu(params))
    return LambState(started(), moments.zeros(params), moments.zeros(params), ratio)


def lamb_updates(
    lr: Rate, b1: float, b2: float, eps: float, rates: Rates
) -> tuple[UpdateFn, UpdateFn]:
    """``update`` and ``additive`` of LAMB.

    Args:
        rates: weight decay, of all leaves or by leaf path.
    """

    def update(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        needs_params("lamb", True, params)
        rate, count = at(lr, state.count), state.count + 1
        how: dict[str, Any] = {"count": count, "b1": b1, "b2": b2, "eps": eps}
        done = _fused(grads, params, state.mu, state.nu, decay=rates, lr=rate, **how)
        if done is None:
            return additive(grads, state, params)
        new, mu, nu, ratios = done
        mean = mean_of_ratios(ratios, state.mu, state.ratio, count)
        f = partial(_retrace, rate=rate, **how)
        updates = Moved(new, params, lambda: map_rates(f, rates, new, mu, nu, ratios))
        return updates, LambState(count, mu, nu, mean)

    def additive(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        needs_params("lamb", True, params)
        count = state.count + 1
        mu = moments.blend(grads, state.mu, b1, 1 - b1)
        nu = moments.blend(grads, state.nu, b2, 1 - b2, square=True)
        f = partial(direction, b1=b1, b2=b2, eps=eps, count=count)
        step = add_decay(rates, tree.map(f, mu, nu), params)
        ratios = trust_ratios(step, params)
        mean = mean_of_ratios(ratios, state.mu, state.ratio, count)
        return scaled(step, ratios, at(lr, state.count), mu), LambState(count, mu, nu, mean)

    return update, additive


def trust_ratios(step: Tree, params: Tree) -> Tree:
    """``|p| / |u|`` of each full leaf: a plain tree."""
    return tree.map(_trust, tree.leaf_norms(step), tree.leaf_norms(params))


def _trust(step: Tensor, param: Tensor) -> Tensor:
    return torch.where((step > 0) & (param > 0), param / step, torch.ones_like(step))


def scaled(step: Tree, ratios: Tree, rate: Number, like: Tree) -> Tree:
    """The updates, in the dtypes of ``like``."""
    return tree.map(lambda u, r, m: (u * (r * -rate)).to(m.dtype), step, ratios, like)


def _gpu(params: Tree) -> torch.device | None:
    """Where parameters on a GPU are: trust ratios stay there, and nobody waits for them."""
    held = [y for _, x in nodes(params) for y in (x.held() if isinstance(x, Placed) else [x])]
    devices = [x.device for x in held if isinstance(x, Tensor)]
    return next((device for device in devices if kind(device) == "cuda"), None)


def _retrace(
    decay: float, new: Tensor, m: Tensor, v: Tensor, ratio: Tensor, *, rate: Number, **how: Any
) -> Tensor:
    """The update that led to ``new``: what it started from may have been overwritten."""
    gain = ratio * rate
    step = direction(m, v, **how) * gain
    old = (wide(new) + step) / (1 - gain * decay)
    return (-step - old * (gain * decay)).to(new.dtype)


def leaves_of(ratios: Tree, mu: Tree, number: int) -> tuple[list[Any], list[int], Any]:
    """The trust ratios, ``None`` where a leaf has no gradient, which of them are those of the
    ``number`` leaves that ``init`` saw and made ``mu`` for, and their structure.

    Raises:
        ValueError: there are others.
    """
    leaves, spec = optree.tree_flatten(ratios, none_is_leaf=True, namespace=NAMESPACE)
    having = list(range(len(leaves)))
    if len(leaves) != number:
        seen = set(present(mu))
        having = [i for i, path in enumerate(spec.paths()) if tree.dotted(*path) in seen]
    if len(having) != number:
        raise ValueError(
            f"optim.lamb keeps {number} trust ratios, one for each leaf of the params that "
            f"init saw; this step has {len(having)} leaves. Give it gradients of the same "
            "structure, None where a parameter has none."
        )
    return leaves, having, spec


def mean_of_ratios(ratios: Tree, mu: Tree, mean: Tensor, count: Tensor) -> Tensor:
    """The running mean of trust ratios, ``[1, leaves]``."""
    every, having, _ = leaves_of(ratios, mu, mean.shape[1])
    leaves = [every[i] for i in having]
    n = plain(count)
    gain = (1 - COEFF) / (1 - COEFF**n)  # so that the zero at first does not count
    new, present = mean, [x for x in leaves if x is not None]
    if present:
        # Together to where the mean is: the host waits for a GPU once at most, not for each leaf.
        rows = [x.to(present[0].device, mean.dtype) for x in present]
        found = iter(torch.stack(rows).to(mean.device))
        old = zip(mean[0], leaves, strict=True)
        new = torch.stack([m if x is None else next(found) for m, x in old])[None]
    return torch.where(mean == 0, new, mean + (new - mean) * gain)  # nor that of a late leaf


def _fused(
    grads: Tree,
    params: Tree,
    mu: Tree,
    nu: Tree,
    *,
    decay: Paces,
    lr: Number,
    **how: Any,
) -> tuple[Tree, Tree, Tree, Tree] | None:
    """One step of LAMB in memory of its own (that of the arguments where it is donated).

    Each pass is one launch for the leaves of a buffer that decay alike. In between, the squares
    of both norms of all leaves of a placed tree are summed over the ranks in one collective.

    Args:
        grads: gradients, or a ``Scaled`` of them; everything is placed as they are.
        params, mu, nu: parameters and moments, of one dtype.
        decay: weight decay, of all leaves or by leaf path.
        lr: see :func:`zfunc.optim.lamb`.
        how: ``count``, ``b1``, ``b2`` and ``eps`` of :func:`lamb_hyper`.

    Returns:
        ``(params, mu, nu, ratios)``, or ``None``, with nothing touched, where there is no
        kernel.
    """
    found = collected("lamb_moments", lr, grads, params, mu, nu)
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
        ratios = _ratios(found.part, squares)
        known = dict(nodes(ratios))
        for run in runs:
            param, one, two = run.state
            ratio = torch.stack([known[path].to(param.device) for path in run.paths])
            lamb_apply_(param, one, two, run.spans, ratio, run.hyper)
    params, mu, nu = found.trees(new)
    return params, mu, nu, ratios


class _Alike(NamedTuple):
    """Leaves of one buffer that decay alike: where they lie, and what they are stepped with."""

    grad: Tensor
    state: list[Tensor]
    paths: list[str]
    spans: list[tuple[int, int]]
    hyper: Tensor


def _runs(
    found: FlatRows, new: list[list[Tensor]], hyper: Callable[..., Tensor], decay: Paces
) -> Iterator[_Alike]:
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
            yield _Alike(g.view(-1), [x.view(-1) for x in state], paths, spans, made[key])


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
