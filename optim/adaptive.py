"""Adam, AdamW and LAMB: steps scaled by running averages of squared gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from zfunc.engine import primitives
from zfunc.optim import flat, frozen, fused, moments, units
from zfunc.optim.base import GradientTransformation, nodes
from zfunc.optim.decay import add_decay, decay_rates, map_rates, needs_params, with_mask
from zfunc.optim.moments import wide
from zfunc.optim.paces import Pace, held, map_own, nothing, own_count, own_pace, paced, remembering
from zfunc.optim.schedules import Rate, at, plain, started, symbolic
from zfunc.optim.updates import Moved, moved
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed

__all__ = ["AdamState", "LambState", "adam", "adamw", "lamb"]

COEFF = 0.9  # how much of its past a mean of trust ratios keeps in a step

Tree = Any
Number = float | Tensor


class AdamState(NamedTuple):
    """``count`` updates so far (0-d int64), mean ``mu`` of gradients, ``nu`` of squares."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree
    nu: Tree


class LambState(NamedTuple):
    """As :class:`AdamState`, and ``ratio``, ``[1, leaves]``: running means of trust ratios."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree
    nu: Tree
    ratio: Tensor


def adam(lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam with bias correction: ``-lr * m̂ / (sqrt(v̂) + eps)``.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        b1, b2: decay of the running means of gradients and squares.
        eps: keeps the quotient finite.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.

    >>> tx = adam(0.1)
    >>> params = torch.zeros(2)
    >>> updates, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(params))
    >>> updates
    tensor([-0.1000,  0.1000])
    """
    return _adam(lr, b1, b2, eps, 0.0, None)


def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """Adam with decoupled weight decay: ``-lr * (m̂ / (sqrt(v̂) + eps) + weight_decay * p)``.

    Given the parameters it runs as one fused kernel and returns a ``Moved``.

    Args:
        lr, b1, b2, eps: see :func:`adam`.
        weight_decay: multiplied by ``lr``, as in ``torch.optim.AdamW``.
        mask: which leaves decay: a tree of bools (or a prefix), or a predicate on
            leaf paths. All of them if left out.

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    >>> from zfunc.optim.updates import apply_updates
    >>> tx = adamw(0.1, weight_decay=0.5, mask=lambda path: path != "b")
    >>> params = {"b": torch.ones(1), "w": torch.ones(1)}
    >>> grads = {"b": torch.ones(1), "w": torch.ones(1)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> apply_updates(params, updates)
    {'b': tensor([0.9000]), 'w': tensor([0.8500])}
    """
    return _adam(lr, b1, b2, eps, weight_decay, mask)


def _init(params: Tree) -> AdamState:
    return AdamState(started(), moments.zeros(params), moments.zeros(params))


def _adam(
    lr: Rate, b1: float, b2: float, eps: float, weight_decay: float, mask: Any
) -> GradientTransformation:
    rates = decay_rates(weight_decay, mask)

    def additive(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        needs_params("adamw", weight_decay, params)
        count = state.count + 1
        mu, nu = moments.first(grads, state.mu, b1), moments.second(grads, state.nu, b2, count)
        return onwards(mu, nu, state, params)

    def onwards(mu: Tree, nu: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        count = state.count + 1
        f = partial(_direction, b1=b1, b2=b2, eps=eps, masked=primitives.frozen())
        own = map_own(lambda missed, m, v: f(m, v, count=own_count(count, missed)), mu, nu)
        step = add_decay(rates, own, params)
        rate = at(lr, state.count)
        updates = held(tree.map(lambda u, m: (u * -rate).to(m.dtype), step, mu))
        return updates, AdamState(count, mu, nu)

    def compressed(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        rate, count = at(lr, state.count), state.count + 1
        nu = primitives.settled(state.nu, state.nu, b2)
        before = 1 - b2 ** plain(state.count)
        if scaled := units.local(grads):
            mu = primitives.reduced(units.shares(grads, state.mu, state.nu, b1, before))
        else:
            mu = moments.first(grads, state.mu, b1)
        done = None
        if not isinstance(rate, Tensor) and rate * weight_decay < 1:
            how: dict[str, Any] = {"decay": rates, "count": count, "lr": rate}
            how |= {"b1": b1, "b2": b2, "eps": eps}
            done = frozen.step(params, mu, nu, units=before if scaled else None, **how)
        if done is None:
            mu = units.momentum(mu, state.nu, before) if scaled else mu
            return onwards(mu, moments.second(grads, state.nu, b2, count), state, params)
        new, mu, nu = done
        f = partial(_retrace, rate=rate, b1=b1, b2=b2, eps=eps, count=count, masked=True)
        updates = Moved(new, params, lambda: map_rates(f, rates, new, mu, nu))
        return updates, AdamState(count, mu, nu)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        rate, count, paces = at(lr, state.count), state.count + 1, paced(rates)
        if params is not None:
            how = {"decay": rates, "count": count, "lr": rate, "b1": b1, "b2": b2, "eps": eps}
            own = primitives.own_step(grads, params, state.mu, state.nu, **how)
            if own is not None:
                new, mu, nu, updates = own
                return Moved(new, params, updates), AdamState(count, mu, nu)
            if primitives.frozen():
                return compressed(grads, state, params)
        done = None

        def otherwise(g: Tree, p: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
            updates, new = additive(g, AdamState(state.count, m, v), p)
            return moved(p, updates), new.mu, new.nu

        if params is not None and _can_fuse(rate, weight_decay):
            how = {"count": count, "lr": rate, "b1": b1, "b2": b2, "eps": eps}
            done = fused.step(
                *(grads, params, state.mu, state.nu),
                decay=paces,
                otherwise=remembering(otherwise),
                **how,
            )
        if done is None:
            return additive(grads, state, params)
        new, mu, nu = done
        nu = primitives.settled(None, nu, b2)
        f = partial(_retrace, rate=rate, b1=b1, b2=b2, eps=eps, count=count)
        updates = Moved(new, params, lambda: map_rates(f, paces, new, mu, nu))
        return updates, AdamState(count, mu, nu)

    init = with_mask(_init, "adamw", rates)
    return GradientTransformation(init, update, additive=additive, checked=True, unfit=None)


def _can_fuse(rate: Number, weight_decay: float) -> bool:
    """Whether one kernel may do it, and its updates could still be told afterwards."""
    if primitives.compressing():
        return False
    if isinstance(rate, Tensor):
        return rate.device.type == "cuda" and not symbolic(rate)
    return rate * weight_decay < 1


def _direction(
    m: Tensor, v: Tensor, *, b1: float, b2: float, eps: float, count: Tensor, masked: bool = False
) -> Tensor:
    """``m̂ / (sqrt(v̂) + eps)``, in float32 at least.

    ``masked``: second moments are frozen. Then an element that never had a gradient has no
    direction, even where its mean is not quite zero: one bit cannot encode a zero. And one whose
    gradients have grown since keeps to what Adam allows it (:func:`~zfunc.optim.frozen.reach`).
    """
    number = plain(count)
    m_hat = wide(m) / (1 - b1**number)
    v_hat = wide(v) / (1 - b2**number)
    step = m_hat / (v_hat.sqrt() + eps)
    if not masked:
        return step
    most = frozen.reach(b1, b2)
    return torch.where(v > 0, step.clamp(-most, most), 0.0)


def _retrace(
    pace: Pace | float | None,
    new: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    rate: Number,
    count: Tensor,
    **how: Any,
) -> Tensor:
    """The update that led to ``new``: what it started from may have been overwritten."""
    if pace is None:
        return nothing(new)
    decay, missed = own_pace(pace)
    step = _direction(m, v, count=own_count(count, missed), **how) * rate
    old = (wide(new) + step) / (1 - rate * decay)
    return (-step - old * (rate * decay)).to(new.dtype)


def lamb(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """LAMB: ``-lr * r * u`` with ``u = m̂ / (sqrt(v̂) + eps) + weight_decay * p``.

    The trust ratio ``r = |p| / |u|`` is taken over each full leaf (on placed trees
    two small collectives), and is 1 where either norm is 0. The means are bias
    corrected, as in ``optax.lamb``; the ratio is not bounded. Under ``compress_grads``,
    once second moments are frozen, momentum travels in units of their roots, the direction of an
    element keeps to the bound that Adam's has by itself, and each leaf's ratio is its mean over
    recent steps. (1-bit LAMB, Li et al. 2021, instead scales whole leaves, and freezes and clamps
    their ratios.)

    Args:
        lr, b1, b2, eps, weight_decay, mask: see :func:`adamw`.

    Raises:
        ValueError: (from ``update``) no ``params``.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT
    in 76 minutes, 2020.

    >>> tx = lamb(0.1)
    >>> params = torch.tensor([3.0, 4.0])
    >>> updates, state = tx.update(torch.tensor([1.0, 1.0]), tx.init(params), params)
    >>> updates
    tensor([-0.3536, -0.3536])
    """
    rates = decay_rates(weight_decay, mask)

    def init(params: Tree) -> LambState:
        leaves = sum(len(x.names()) if isinstance(x, Placed) else 1 for _, x in nodes(params))
        return LambState(*_init(params), torch.zeros(1, leaves, device=_gpu(params)))

    def update(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        needs_params("lamb", True, params)
        rate, count = at(lr, state.count), state.count + 1
        how: dict[str, Any] = {"count": count, "b1": b1, "b2": b2, "eps": eps}
        done = flat.lamb_step(
            *(grads, params, state.mu, state.nu),
            decay=rates,
            lr=rate,
            steady=lambda ratios: _steady(ratios, state.ratio, count),
            **how,
        )
        if done is None:
            return additive(grads, state, params)
        new, mu, nu, ratios, mean = done
        f = partial(_lamb_retrace, rate=rate, **how)
        updates = Moved(new, params, lambda: map_rates(f, rates, new, mu, nu, ratios))
        return updates, LambState(count, mu, nu, mean)

    def additive(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        needs_params("lamb", True, params)
        rate, count = at(lr, state.count), state.count + 1
        before = 1 - b2 ** plain(state.count)
        known = state.nu if primitives.frozen() else None
        mu = moments.first(grads, state.mu, b1, known, before)
        nu = moments.second(grads, state.nu, b2, count)
        f = partial(_direction, b1=b1, b2=b2, eps=eps, count=count, masked=primitives.frozen())
        step = add_decay(rates, tree.map(f, mu, nu), params)
        ratios = tree.map(_trust, tree.leaf_norms(step), tree.leaf_norms(params))
        ratios, mean = _steady(ratios, state.ratio, count)
        updates = tree.map(lambda u, r, m: (u * (r * -rate)).to(m.dtype), step, ratios, mu)
        return updates, LambState(count, mu, nu, mean)

    return GradientTransformation(
        with_mask(init, "lamb", rates), update, additive=additive, checked=True, unfit="lamb"
    )


def _gpu(params: Tree) -> torch.device | None:
    """Where parameters on a GPU are: trust ratios stay there, and nobody waits for them."""
    held = [y for _, x in nodes(params) for y in (x.held() if isinstance(x, Placed) else [x])]
    return next((x.device for x in held if isinstance(x, Tensor) and x.is_cuda), None)


def _lamb_retrace(
    decay: float, new: Tensor, m: Tensor, v: Tensor, ratio: Tensor, *, rate: Number, **how: Any
) -> Tensor:
    """As :func:`_retrace`."""
    gain = ratio * rate
    step = _direction(m, v, **how) * gain
    old = (wide(new) + step) / (1 - gain * decay)
    return (-step - old * (gain * decay)).to(new.dtype)


def _steady(ratios: Tree, mean: Tensor, count: Tensor) -> tuple[Tree, Tensor]:
    """The trust ratios to use, and their running mean.

    Once second moments are frozen it is the mean that is used: the norm of one compressed
    step says little.
    """
    leaves, spec = optree.tree_flatten(ratios, none_is_leaf=True, namespace=NAMESPACE)
    if len(leaves) != mean.shape[1]:  # parameters that are None themselves have no ratio
        leaves, spec = optree.tree_flatten(ratios, namespace=NAMESPACE)
    if len(leaves) != mean.shape[1]:
        raise ValueError(
            f"optim.lamb keeps {mean.shape[1]} trust ratios, one for each leaf of the params that "
            f"init saw; this step has {len(leaves)} leaves. Give it gradients of the same "
            "structure, None where a parameter has none."
        )
    n = plain(count)  # on a GPU in as many digits as on the host
    n = n.double() if isinstance(n, Tensor) else n
    gain = (1 - COEFF) / (1 - COEFF**n)  # so that the zero at first does not count
    new, present = mean, [x for x in leaves if x is not None]
    if present:
        # Together to where the mean is: the host waits for a GPU once at most, not for each leaf.
        rows = [x.to(present[0].device, mean.dtype) for x in present]
        found = iter(torch.stack(rows).to(mean.device))
        old = zip(mean[0], leaves, strict=True)
        new = torch.stack([m if x is None else next(found) for m, x in old])[None]
    mean = torch.where(mean == 0, new, mean + (new - mean) * gain)  # nor that of a late leaf
    if not primitives.frozen():
        return ratios, mean
    used = [None if x is None else r.to(x) for r, x in zip(mean[0], leaves, strict=True)]
    return optree.tree_unflatten(spec, used), mean


def _trust(step: Tensor, param: Tensor) -> Tensor:
    return torch.where((step > 0) & (param > 0), param / step, torch.ones_like(step))
