"""1-bit LAMB: what LAMB becomes where ranks average momentum and no gradients.

As 1-bit Adam (:mod:`zfunc.optim.adam_onebit`). The norm of one compressed step says little, so
trust ratios are then means over recent steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
from torch import Tensor

from zfunc.optim import frozen
from zfunc.optim.adaptive import direction
from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import add_decay, decay_rates, needs_params, with_mask
from zfunc.optim.rates import Rate, at, plain
from zfunc.optim.trust_ratios import (
    LambState,
    lamb_init,
    lamb_updates,
    leaves_of,
    mean_of_ratios,
    scaled,
    trust_ratios,
)
from zfunc.optim.updates import means
from zfunc.trees import tree
from zfunc.trees.reduction import compressing, settled
from zfunc.trees.reduction import frozen as is_frozen

__all__ = ["onebit_lamb"]

Tree = Any


def onebit_lamb(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """:func:`zfunc.optim.lamb` of gradients that are not averaged yet: momentum is.

    ``lamb`` is this under ``compress_grads(method="onebit")``, and nobody else needs it by name.
    Without ``compress_grads`` it is LAMB. Once second moments are frozen, momentum travels in
    units of their roots, the direction of an element keeps to the bound that Adam's has by itself,
    and each leaf's ratio is its mean over recent steps. (The published algorithm instead scales
    whole leaves, and freezes and clamps their ratios.)

    Args:
        lr, b1, b2, eps, weight_decay, mask: see :func:`zfunc.optim.adamw`; no weight decay if
            left out.

    Raises:
        ValueError: (from ``update``) no ``params``.
        CompositionError: (from ``update``) second moments are frozen before they have begun.

    Source: Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
    LAMB's Convergence Speed, 2021.

    >>> import torch
    >>> tx = onebit_lamb(0.1)
    >>> params = torch.tensor([3.0, 4.0])
    >>> updates, state = tx.update(torch.tensor([1.0, 1.0]), tx.init(params), params)
    >>> updates
    tensor([-0.3536, -0.3536])
    """
    rates = decay_rates(weight_decay, mask)
    in_warmup, _ = lamb_updates(lr, b1, b2, eps, rates)

    def update(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        if compressing():
            return additive(grads, state, params)
        updates, new = in_warmup(means(grads), state, params)
        return updates, new._replace(nu=settled(None, new.nu, b2))

    def additive(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        needs_params("lamb", True, params)
        count, still = state.count + 1, is_frozen()
        before = 1 - b2 ** plain(state.count)
        mu = frozen.first(grads, state.mu, b1, state.nu if still else None, before)
        nu = frozen.second(grads, state.nu, b2, count)
        f = partial(frozen.bounded if still else direction, b1=b1, b2=b2, eps=eps, count=count)
        step = add_decay(rates, tree.map(f, mu, nu), params)
        ratios = trust_ratios(step, params)
        mean = mean_of_ratios(ratios, state.mu, state.ratio, count)
        used = _steady(ratios, state.mu, mean) if still else ratios
        return scaled(step, used, at(lr, state.count), mu), LambState(count, mu, nu, mean)

    init = with_mask(lamb_init, "lamb", rates)
    return GradientTransformation(init, update, additive=additive, checked=True, unfit="lamb")


def _steady(ratios: Tree, mu: Tree, mean: Tensor) -> Tree:
    """Means in the place of ratios."""
    used, having, spec = leaves_of(ratios, mu, mean.shape[1])
    for i, r in zip(having, mean[0], strict=True):
        used[i] = None if used[i] is None else r.to(used[i])
    return optree.tree_unflatten(spec, used)
