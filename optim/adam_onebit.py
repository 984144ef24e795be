"""1-bit Adam: what Adam becomes where ranks average momentum and no gradients.

Second moments learn until they freeze (:func:`zfunc.settled`). What is left of Adam is linear in
the gradients. So each rank takes its own into the momentum, and momentum is what is averaged
(:func:`zfunc.reduced`), in units of the roots of the frozen second moments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from zfunc.optim import frozen
from zfunc.optim.adaptive import AdamState, adam_updates, adamw, direction, retrace, updates_along
from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import decay_rates, map_rates, needs_params
from zfunc.optim.rates import Rate, at, plain
from zfunc.optim.updates import Moved, means
from zfunc.trees.reduction import compressing, reduced, settled
from zfunc.trees.reduction import frozen as is_frozen

__all__ = ["onebit_adam"]

Tree = Any


def onebit_adam(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """:func:`zfunc.optim.adamw` of gradients that are not averaged yet: momentum is.

    ``adam`` and ``adamw`` are this under ``compress_grads(method="onebit")``, and nobody else
    needs it by name. Without ``compress_grads`` it is AdamW. Once second moments are frozen,
    momentum travels in units of their roots, and the direction of an element keeps to the bound
    that Adam's has by itself; neither is in the published algorithm.

    Args:
        lr, b1, b2, eps, weight_decay, mask: see :func:`zfunc.optim.adamw`; no weight decay if
            left out.

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.
        CompositionError: (from ``update``) second moments are frozen before they have begun, or
            ranks are to go their own ways (``compress_grads(method="zero_one")``).

    Source: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021.

    >>> import torch
    >>> tx = onebit_adam(0.1)
    >>> params = torch.zeros(2)
    >>> updates, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(params), params)
    >>> updates.force()
    tensor([-0.1000,  0.1000])
    """
    rates = decay_rates(weight_decay, mask)
    how: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps}
    in_warmup, _ = adam_updates(lr, b1, b2, eps, weight_decay, rates)

    def additive(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        needs_params("adamw", weight_decay, params)
        count, mu = state.count + 1, frozen.first(grads, state.mu, b1)
        after = AdamState(count, mu, frozen.second(grads, state.nu, b2, count))
        return onwards(after, at(lr, state.count), params)

    def onwards(after: AdamState, rate: Any, params: Tree) -> tuple[Tree, AdamState]:
        f = partial(frozen.bounded if is_frozen() else direction, **how)
        return updates_along(f, after, rate, rates, params), after

    def compressed(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        rate, count = at(lr, state.count), state.count + 1
        nu = settled(state.nu, state.nu, b2)
        before = 1 - b2 ** plain(state.count)
        if scaled := frozen.local(grads):
            mu = reduced(frozen.shares(grads, state.mu, state.nu, b1, before))
        else:
            mu = frozen.first(grads, state.mu, b1)
        done = None
        if not isinstance(rate, Tensor) and rate * weight_decay < 1:
            knobs: dict[str, Any] = {"decay": rates, "count": count, "lr": rate, **how}
            done = frozen.step(params, mu, nu, units=before if scaled else None, **knobs)
        if done is None:
            mu = frozen.momentum(mu, state.nu, before) if scaled else mu
            return onwards(AdamState(count, mu, frozen.grown(nu, b2, count)), rate, params)
        new, mu, nu = done
        f = partial(retrace, along=partial(frozen.bounded, **how), rate=rate, count=count)
        updates = Moved(new, params, lambda: map_rates(f, rates, new, mu, nu))
        return updates, AdamState(count, mu, nu)

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        if params is not None and is_frozen():
            return compressed(grads, state, params)
        if compressing():  # second moments are needed as they were before the step
            return additive(grads, state, params)
        updates, new = in_warmup(means(grads), state, params)
        return updates, new._replace(nu=settled(None, new.nu, b2))

    tx = adamw(lr, b1, b2, eps, weight_decay, mask)
    return GradientTransformation(tx._init, update, additive=additive, checked=True, unfit=None)
