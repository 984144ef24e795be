"""What optimizers are chained from, by optax's names: a direction each, and what scales it.

>>> from zfunc import optim
>>> adam = optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(0.1))
>>> adam.update(torch.tensor([1.0, -2.0]), adam.init(torch.zeros(2)))[0]
tensor([-0.1000,  0.1000])

Each makes one pass over its state and one over the updates, which are in float32 at least.
:func:`zfunc.optim.adamw`, :func:`zfunc.optim.lion` and :func:`zfunc.optim.lamb` do all of it in
one: prefer them where they are what you mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.optim import moments
from zfunc.optim.adaptive import AdamState
from zfunc.optim.base import EmptyState, GradientTransformation
from zfunc.optim.paces import held, map_own, own_count
from zfunc.optim.rates import Rate, plain, started
from zfunc.optim.schedules import scale_by_schedule
from zfunc.optim.sign_descent import LionState
from zfunc.optim.updates import scale as multiplied
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = [
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByStddevState",
    "TraceState",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_stddev",
    "trace",
]

Tree = Any
Number = float | Tensor


def scale(step_size: float) -> GradientTransformation:
    """Multiply updates by a number.

    >>> tx = scale(-0.5)
    >>> tx.update(torch.ones(2), tx.init(torch.ones(2)))[0]
    tensor([-0.5000, -0.5000])
    """
    return GradientTransformation(
        lambda params: EmptyState(),
        lambda grads, state, params: (multiplied(grads, step_size), state),
        checked=True,
        unfit=None,
    )


def scale_by_learning_rate(lr: Rate) -> GradientTransformation:
    """Multiply updates by ``-lr``, so that they descend.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.

    >>> tx = scale_by_learning_rate(0.1)
    >>> tx.update(torch.ones(1), tx.init(torch.ones(1)))[0]
    tensor([-0.1000])
    """
    return scale_by_schedule((lambda count: -lr(count)) if callable(lr) else -lr)


class TraceState(NamedTuple):
    """The sum of past updates, each step weighted less."""

    trace: Tree


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum: ``t = decay * t + u``; nesterov: ``decay * t + u`` of the new ``t``.

    Source: Sutskever et al., On the Importance of Initialization and Momentum in Deep Learning,
    2013, as ``optax.trace``.

    >>> tx = trace(0.9)
    >>> _, state = tx.update(torch.ones(1), tx.init(torch.zeros(1)))
    >>> tx.update(torch.ones(1), state)[0]
    tensor([1.9000])
    """

    def update(grads: Tree, state: TraceState, params: Tree) -> tuple[Tree, TraceState]:
        grads = reduced(grads)
        new = moments.blend(grads, state.trace, decay, 1)

        def ahead(g: Tensor, t: Tensor) -> Tensor:
            return wide(g) + wide(t) * decay

        def along(g: Tensor, t: Tensor) -> Tensor:
            return t.clone()  # the state's own memory is donated with the state

        return held(tree.map(ahead if nesterov else along, grads, new)), TraceState(new)

    return _transformation(lambda params: TraceState(moments.zeros(params)), update)


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    nesterov: bool = False,
) -> GradientTransformation:
    """``m̂ / (sqrt(v̂ + eps_root) + eps)``, Adam's direction.

    Args:
        b1, b2: decay of the running means of gradients and squares.
        eps, eps_root: keep the quotient, and its derivative, finite.
        nesterov: look ahead by one step, which is NAdam.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; Dozat, Incorporating
    Nesterov Momentum into Adam, 2016.

    >>> tx = scale_by_adam()
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """

    def direction(g: Tensor, m: Tensor, v: Tensor, n: Number) -> Tensor:
        root = (wide(v) / (1 - b2**n) + eps_root).sqrt()
        return _mean(g, m, n, b1, nesterov) / (root + eps)

    return _by_moments(b1, b2, direction)


def scale_by_radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam's direction times the rectification of its variance; ``m̂`` as long as that is unknown.

    Args:
        b1, b2, eps, eps_root, nesterov: see :func:`scale_by_adam`.
        threshold: how long the average must be, at least, for its variance to be known.

    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020.

    >>> tx = scale_by_radam()
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([ 3., -2.])
    """
    longest = 2.0 / (1.0 - b2) - 1.0

    def direction(g: Tensor, m: Tensor, v: Tensor, n: Number) -> Tensor:
        mean = _mean(g, m, n, b1, nesterov)
        length = longest - 2 * n * b2**n / (1 - b2**n)
        part = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        root = (wide(v) / (1 - b2**n) + eps_root).sqrt()
        if not isinstance(length, Tensor):
            return mean * part**0.5 / (root + eps) if length >= threshold else mean
        rectified = mean * part.clamp(min=0).sqrt() / (root + eps)
        return torch.where(length >= threshold, rectified, mean)

    return _by_moments(b1, b2, direction)


def _mean(g: Tensor, m: Tensor, n: Number, b1: float, nesterov: bool) -> Tensor:
    """The mean of gradients without the bias of its zero at first."""
    if not nesterov:
        return wide(m) / (1 - b1**n)
    return wide(m) * b1 / (1 - b1 ** (n + 1)) + wide(g) * (1 - b1) / (1 - b1**n)


def _by_moments(
    b1: float, b2: float, direction: Callable[[Tensor, Tensor, Tensor, Number], Tensor]
) -> GradientTransformation:
    """Along ``direction(gradient, mean, mean of squares, number of this update)``."""

    def init(params: Tree) -> AdamState:
        return AdamState(started(), moments.zeros(params), moments.zeros(params))

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        grads, count = reduced(grads), state.count + 1
        mu = moments.blend(grads, state.mu, b1, 1 - b1)
        nu = moments.blend(grads, state.nu, b2, 1 - b2, square=True)

        def one(missed: int, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return direction(g, m, v, plain(own_count(count, missed)))

        return held(map_own(one, grads, mu, nu)), AdamState(count, mu, nu)

    return _transformation(init, update)


class ScaleByRmsState(NamedTuple):
    """``count`` updates so far (0-d int64) and the mean of squares."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    nu: Tree


def scale_by_rms(
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """``g / sqrt(v + eps)``, with ``v`` the running mean of squares.

    Args:
        decay: weight of the past in the mean.
        eps: keeps the quotient finite; in the root, as in optax, or behind it, as in torch.
        initial_scale: what the mean starts from.
        bias_correction: divide the mean by ``1 - decay**count``.

    Source: Hinton, Neural Networks for Machine Learning, lecture 6e, 2012.

    >>> tx = scale_by_rms(eps_in_sqrt=False, bias_correction=True)
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """

    def init(params: Tree) -> ScaleByRmsState:
        return ScaleByRmsState(started(), _full(params, initial_scale))

    def update(grads: Tree, state: ScaleByRmsState, params: Tree) -> tuple[Tree, ScaleByRmsState]:
        grads, count = reduced(grads), state.count + 1
        nu = moments.blend(grads, state.nu, decay, 1 - decay, square=True)

        def one(missed: int, g: Tensor, v: Tensor) -> Tensor:
            known = _known(count, missed, decay) if bias_correction else 1.0
            return wide(g) / _root(wide(v) / known, eps, eps_in_sqrt)

        return held(map_own(one, grads, nu)), ScaleByRmsState(count, nu)

    return _transformation(init, update)


class ScaleByStddevState(NamedTuple):
    """``count`` updates so far (0-d int64), the mean of gradients and that of squares."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree
    nu: Tree


def scale_by_stddev(
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """``g / sqrt(v - m² + eps)``: as :func:`scale_by_rms`, around the running mean of gradients.

    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013.

    >>> tx = scale_by_stddev(0.5)
    >>> tx.update(torch.tensor([3.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([ 2., -2.])
    """

    def init(params: Tree) -> ScaleByStddevState:
        return ScaleByStddevState(started(), moments.zeros(params), _full(params, initial_scale))

    def update(
        grads: Tree, state: ScaleByStddevState, params: Tree
    ) -> tuple[Tree, ScaleByStddevState]:
        grads, count = reduced(grads), state.count + 1
        mu = moments.blend(grads, state.mu, decay, 1 - decay)
        nu = moments.blend(grads, state.nu, decay, 1 - decay, square=True)

        def one(missed: int, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            known = _known(count, missed, decay) if bias_correction else 1.0
            mean = wide(m) / known
            spread = (wide(v) / known - mean * mean).clamp(min=0)  # below it by rounding alone
            return wide(g) / _root(spread, eps, eps_in_sqrt)

        return held(map_own(one, grads, mu, nu)), ScaleByStddevState(count, mu, nu)

    return _transformation(init, update)


class ScaleByRssState(NamedTuple):
    """The sum of the squares of all gradients."""

    sum_of_squares: Tree


def scale_by_rss(
    initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> GradientTransformation:
    """``g / sqrt(s + eps)``, with ``s`` the sum of all squares; 0 where ``s`` is.

    Source: Duchi et al., Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization, 2011.

    >>> tx = scale_by_rss(initial_accumulator_value=0.0)
    >>> tx.update(torch.tensor([3.0, 0.0]), tx.init(torch.zeros(2)))[0]
    tensor([1., 0.])
    """

    def one(g: Tensor, s: Tensor) -> Tensor:
        whole = wide(s)
        return torch.where(whole > 0, wide(g) / (whole + eps).sqrt(), 0.0)

    def update(grads: Tree, state: ScaleByRssState, params: Tree) -> tuple[Tree, ScaleByRssState]:
        grads = reduced(grads)
        squares = moments.blend(grads, state.sum_of_squares, 1, 1, square=True)
        return held(tree.map(one, grads, squares)), ScaleByRssState(squares)

    def init(params: Tree) -> ScaleByRssState:
        return ScaleByRssState(_full(params, initial_accumulator_value))

    return _transformation(init, update)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    """``sign(b1 * m + (1 - b1) * g)``; then ``m`` decays by ``b2``.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

    >>> tx = scale_by_lion()
    >>> tx.update(torch.tensor([3.0, -0.5]), tx.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])
    """

    def sign(g: Tensor, m: Tensor) -> Tensor:
        return torch.sign(wide(m) * b1 + wide(g) * (1 - b1))

    def update(grads: Tree, state: LionState, params: Tree) -> tuple[Tree, LionState]:
        grads = reduced(grads)
        step = held(tree.map(sign, grads, state.mu))
        return step, LionState(state.count + 1, moments.blend(grads, state.mu, b2, 1 - b2))

    return _transformation(lambda params: LionState(started(), moments.zeros(params)), update)


def _known(count: Tensor, missed: int, decay: float) -> Number:
    """How much of a mean does not come from where it started."""
    return 1 - decay ** plain(own_count(count, missed))


def _root(squares: Tensor, eps: float, inside: bool) -> Tensor:
    return (squares + eps).sqrt() if inside else squares.sqrt() + eps


def _full(params: Tree, value: float) -> Tree:
    return tree.map(lambda p: torch.full_like(p, value), params)


def _transformation(init: Callable[[Tree], Any], update: Any) -> GradientTransformation:
    return GradientTransformation(init, update, checked=True, unfit=None)
