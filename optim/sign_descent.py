"""Lion: one running mean, of which the signs alone are steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.kernels.lion import lion_flat_, lion_hyper
from zfunc.optim import moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.buffers import Launch, parted
from zfunc.optim.decay import add_decay, decay_rates, map_rates, needs_params, with_mask
from zfunc.optim.flat import collected
from zfunc.optim.paces import Paces, held, nothing, own_pace, paced
from zfunc.optim.rates import Rate, at, started
from zfunc.optim.updates import Moved, means
from zfunc.trees import tree
from zfunc.trees.reduction import compressing, reduced
from zfunc.trees.squares import wide

__all__ = ["LionState", "lion"]

Tree = Any
Number = float | Tensor


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
        if params is not None and b2 > 0 and _can_fuse(rate, weight_decay):
            done = lion_step(means(grads), params, state.mu, decay=paces, lr=rate, b1=b1, b2=b2)
        if done is None:
            return additive(grads, state, params)
        new, mu = done
        f = partial(_retrace, rate=rate, b1=b1, b2=b2)
        updates = Moved(new, params, lambda: map_rates(f, paces, new, mu, reduced(grads)))
        return updates, LionState(state.count + 1, mu)

    def additive(grads: Tree, state: LionState, params: Tree) -> tuple[Tree, LionState]:
        needs_params("lion", weight_decay, params)
        rate, grads = at(lr, state.count), reduced(grads)
        step = tree.map(lambda g, m: torch.sign(_mean(g, m, b1)), grads, state.mu)
        step = add_decay(rates, step, params)
        mu = moments.blend(grads, state.mu, b2, 1 - b2)
        updates = held(tree.map(lambda u, m: (u * -rate).to(m.dtype), step, mu))
        return updates, LionState(state.count + 1, mu)

    return GradientTransformation(
        with_mask(init, "lion", rates), update, additive=additive, checked=True, unfit=None
    )


def _can_fuse(rate: Number, weight_decay: float) -> bool:
    """Whether one kernel may do it, and its updates could still be told afterwards."""
    return not compressing() and (isinstance(rate, Tensor) or rate * weight_decay < 1)


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
    found = collected("lion_flat", lr, grads, params, mu)
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
