"""SGD with momentum, and Lion: one running mean, no second moments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.engine import primitives
from zfunc.optim import flat, moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import add_decay, decay_rates, map_rates, needs_params, with_mask
from zfunc.optim.moments import wide
from zfunc.optim.paces import held, nothing, own_pace, paced
from zfunc.optim.schedules import Rate, at, started
from zfunc.optim.updates import Moved
from zfunc.trees import tree

__all__ = ["LionState", "SgdState", "lion", "sgd"]

Tree = Any


class SgdState(NamedTuple):
    """``count`` updates so far (0-d int64) and the momentum; ``None`` without it."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    trace: Tree


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False) -> GradientTransformation:
    """``-lr * t`` with ``t = momentum * t + g`` (nesterov: ``g + momentum * t``).

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        momentum: 0 for none, which takes no memory.
        nesterov: look ahead by one step.

    Raises:
        ValueError: ``nesterov`` without momentum.

    Source: Sutskever et al., On the Importance of Initialization and Momentum in
    Deep Learning, 2013, in the form of ``torch.optim.SGD`` and ``optax.sgd``.

    >>> tx = sgd(0.5, momentum=0.9)
    >>> state = tx.init(torch.zeros(1))
    >>> updates, state = tx.update(torch.ones(1), state)
    >>> tx.update(torch.ones(1), state)[0]
    tensor([-0.9500])
    """
    if nesterov and not momentum:
        raise ValueError("sgd(nesterov=True) needs momentum > 0.")

    def init(params: Tree) -> SgdState:
        return SgdState(started(), moments.zeros(params) if momentum else None)

    def update(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        rate, trace = at(lr, state.count), state.trace
        if nesterov or not momentum:
            grads = primitives.reduced(grads)
        step = grads
        if momentum:
            step = trace = primitives.reduced(
                moments.blend(grads, trace, momentum, 1), momentum=True
            )
        if nesterov:
            step = tree.map(lambda g, t: wide(g) + wide(t) * momentum, grads, trace)
        like = trace if momentum else grads
        updates = held(tree.map(lambda u, x: (wide(u) * -rate).to(x.dtype), step, like))
        return updates, SgdState(state.count + 1, trace)

    return GradientTransformation(init, update, checked=True, unfit=None)


class LionState(NamedTuple):
    """``count`` updates so far (0-d int64) and the running mean of gradients."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree


def lion(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Tree | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """``-lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``; then m decays by b2.

    Args:
        lr: a number, a 0-d tensor, or a schedule; 3 to 10 times smaller than AdamW's.
        b1: weight of the mean in the step.
        b2: decay of the mean.
        weight_decay, mask: see :func:`zfunc.optim.adamw`.

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

    >>> tx = lion(0.1)
    >>> tx.update(torch.tensor([3.0, -0.5]), tx.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])
    """
    rates = decay_rates(weight_decay, mask)

    def init(params: Tree) -> LionState:
        return LionState(started(), moments.zeros(params))

    def update(grads: Tree, state: LionState, params: Tree) -> tuple[Tree, LionState]:
        rate, paces, done = at(lr, state.count), paced(rates), None
        if params is not None and b2 > 0 and (isinstance(rate, Tensor) or rate * weight_decay < 1):
            done = flat.lion_step(grads, params, state.mu, decay=paces, lr=rate, b1=b1, b2=b2)
        if done is None:
            return additive(grads, state, params)
        new, mu = done
        f = partial(_retrace, rate=rate, b1=b1, b2=b2)
        updates = Moved(
            new, params, lambda: map_rates(f, paces, new, mu, primitives.reduced(grads))
        )
        return updates, LionState(state.count + 1, mu)

    def additive(grads: Tree, state: LionState, params: Tree) -> tuple[Tree, LionState]:
        needs_params("lion", weight_decay, params)
        rate, grads = at(lr, state.count), primitives.reduced(grads)
        step = tree.map(lambda g, m: torch.sign(_mean(g, m, b1)), grads, state.mu)
        step = add_decay(rates, step, params)
        mu = moments.blend(grads, state.mu, b2, 1 - b2)
        updates = held(tree.map(lambda u, m: (u * -rate).to(m.dtype), step, mu))
        return updates, LionState(state.count + 1, mu)

    return GradientTransformation(
        with_mask(init, "lion", rates), update, additive=additive, checked=True, unfit=None
    )


def _mean(new: Tensor, old: Tensor, decay: float) -> Tensor:
    return wide(old) * decay + wide(new) * (1 - decay)


def _retrace(
    pace: Any, new: Tensor, m: Tensor, g: Tensor, *, rate: Any, b1: float, b2: float
) -> Tensor:
    """The update that led to ``new``: what it started from may have been overwritten."""
    if pace is None:
        return nothing(new)
    decay, _ = own_pace(pace)
    before = (wide(m) - wide(g) * (1 - b2)) / b2
    step = torch.sign(_mean(g, before, b1)) * rate
    old = (wide(new) + step) / (1 - rate * decay)
    return (-step - old * (rate * decay)).to(new.dtype)
