"""LAMB: Adam's steps, scaled for each leaf by a trust ratio."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import decay_rates, with_mask
from zfunc.optim.lamb_onebit import onebit_lamb
from zfunc.optim.rates import Rate
from zfunc.optim.trust_ratios import lamb_init, lamb_updates

__all__ = ["lamb"]

Tree = Any


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
    corrected, as in ``optax.lamb``; the ratio is not bounded. Under ``compress_grads`` it is
    :func:`zfunc.optim.onebit_lamb`.

    Args:
        lr, b1, b2, eps, weight_decay, mask: see :func:`zfunc.optim.adamw`.

    Raises:
        ValueError: (from ``update``) no ``params``.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT
    in 76 minutes, 2020.

    >>> import torch
    >>> tx = lamb(0.1)
    >>> params = torch.tensor([3.0, 4.0])
    >>> updates, state = tx.update(torch.tensor([1.0, 1.0]), tx.init(params), params)
    >>> updates
    tensor([-0.3536, -0.3536])
    """
    rates = decay_rates(weight_decay, mask)
    update, additive = lamb_updates(lr, b1, b2, eps, rates)
    return GradientTransformation(
        with_mask(lamb_init, "lamb", rates),
        update,
        additive=additive,
        checked=True,
        unfit="lamb",
        unreduced=partial(onebit_lamb, lr, b1, b2, eps, weight_decay, mask),
    )
