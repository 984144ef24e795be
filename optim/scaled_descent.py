"""Optimizers that are a scaled direction and a rate: RMSprop, Adagrad, NAdam, RAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfunc.optim.base import GradientTransformation
from zfunc.optim.combining import chain
from zfunc.optim.decay import add_decayed_weights
from zfunc.optim.rates import Rate
from zfunc.optim.scaling import (
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_radam,
    scale_by_rms,
    scale_by_rss,
    scale_by_stddev,
    trace,
)

__all__ = ["adagrad", "nadam", "nadamw", "radam", "rmsprop"]


def rmsprop(
    lr: Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSprop: ``-lr * g / sqrt(v + eps)``, with momentum behind the rate.

    ``torch.optim.RMSprop(alpha=0.99)`` is ``rmsprop(decay=0.99, eps_in_sqrt=False)``.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        decay, eps, initial_scale, eps_in_sqrt, bias_correction: see
            :func:`zfunc.optim.scale_by_rms`.
        centered: divide by the standard deviation: :func:`zfunc.optim.scale_by_stddev`.
        momentum, nesterov: see :func:`zfunc.optim.trace`; ``None`` for none.

    Source: Hinton, Neural Networks for Machine Learning, lecture 6e, 2012; Graves, Generating
    Sequences With Recurrent Neural Networks, 2013.

    >>> import torch
    >>> tx = rmsprop(0.1, decay=0.75)
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([-0.2000,  0.2000])
    """
    by = scale_by_stddev if centered else scale_by_rms
    scaled = by(decay, eps, initial_scale, eps_in_sqrt, bias_correction)
    after = [] if momentum is None else [trace(momentum, nesterov)]
    return chain(scaled, scale_by_learning_rate(lr), *after)


def adagrad(
    lr: Rate, initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> GradientTransformation:
    """Adagrad: ``-lr * g / sqrt(s + eps)``, with ``s`` the sum of all squares.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        initial_accumulator_value: what the sum starts from.
        eps: keeps the quotient finite.

    Source: Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization, 2011.

    >>> import torch
    >>> tx = adagrad(0.1, initial_accumulator_value=0.0)
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(lr))


def nadam(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0
) -> GradientTransformation:
    """Adam that looks ahead by one step.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        b1, b2, eps, eps_root: see :func:`zfunc.optim.scale_by_adam`.

    Source: Dozat, Incorporating Nesterov Momentum into Adam, 2016, as ``optax.nadam``: without
    torch's schedule of ``b1``.

    >>> import torch
    >>> tx = nadam(0.1)
    >>> tx.update(torch.tensor([3.0]), tx.init(torch.zeros(1)))[0]
    tensor([-0.1474])
    """
    return chain(scale_by_adam(b1, b2, eps, eps_root, True), scale_by_learning_rate(lr))


def nadamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[str], bool] | None = None,
) -> GradientTransformation:
    """:func:`nadam` with decoupled weight decay.

    Args:
        weight_decay, mask: see :func:`zfunc.optim.adamw`.

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.

    >>> import torch
    >>> tx = nadamw(0.1, weight_decay=0.5)
    >>> params = torch.ones(1)
    >>> tx.update(torch.tensor([3.0]), tx.init(params), params)[0]
    tensor([-0.1974])
    """
    along = scale_by_adam(b1, b2, eps, eps_root, True)
    return chain(along, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(lr))


def radam(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam that is plain momentum until it knows the variance of its rate.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        b1, b2, eps, eps_root, threshold, nesterov: see :func:`zfunc.optim.scale_by_radam`.

    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020.

    >>> import torch
    >>> tx = radam(0.1)
    >>> tx.update(torch.tensor([3.0]), tx.init(torch.zeros(1)))[0]
    tensor([-0.3000])
    """
    along = scale_by_radam(b1, b2, eps, eps_root, threshold, nesterov)
    return chain(along, scale_by_learning_rate(lr))
