"""Adam and AdamW: steps scaled by running averages of squared gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from zfunc.optim import fused
from zfunc.optim.base import GradientTransformation, UpdateFn
from zfunc.optim.decay import Rates, add_decay, decay_rates, map_rates, needs_params, with_mask
from zfunc.optim.moments import blend, zeros
from zfunc.optim.paces import Pace, held, map_own, nothing, own_count, own_pace, paced
from zfunc.optim.rates import Rate, at, plain, started, symbolic
from zfunc.optim.updates import Moved, moved
from zfunc.trees import tree
from zfunc.trees.squares import wide

__all__ = ["AdamState", "adam", "adam_updates", "adamw", "direction", "retrace", "updates_along"]

Tree = Any
Number = float | Tensor


class AdamState(NamedTuple):
    """``count`` updates so far (0-d int64), mean ``mu`` of gradients, ``nu`` of squares."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    mu: Tree
    nu: Tree


def adam(lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam with bias correction: ``-lr * m̂ / (sqrt(v̂) + eps)``.

    Args:
        lr: a number, a 0-d tensor, or a schedule of the count.
        b1, b2: decay of the running means of gradients and squares.
        eps: keeps the quotient finite.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.

    >>> import torch
    >>> tx = adam(0.1)
    >>> tx.update(torch.tensor([1.0, -2.0]), tx.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])
    """
    return adamw(lr, b1, b2, eps, 0.0)


def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Tree | Callable[[str], bool] | None = None,
    moments: int = 32,
) -> GradientTransformation:
    """Adam with decoupled weight decay: ``-lr * (m̂ / (sqrt(v̂) + eps) + weight_decay * p)``.

    Given the parameters it runs as one fused kernel and returns a ``Moved``. Under
    ``compress_grads`` it is :func:`zfunc.optim.onebit_adam` or :func:`zfunc.optim.zero_one_adam`.

    Args:
        lr, b1, b2, eps: see :func:`adam`.
        weight_decay: multiplied by ``lr``, as in ``torch.optim.AdamW``.
        mask: which leaves decay: a tree of bools (or a prefix), or a predicate on paths; else all.
        moments: bits of each; with 8 the state has two bytes a parameter (``adam_8bit``).

    Raises:
        ValueError: (from ``update``) there is weight decay and no ``params``.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    >>> import torch
    >>> from zfunc.optim.updates import apply_updates
    >>> tx = adamw(0.1, weight_decay=0.5, mask=lambda path: path != "b")
    >>> params = {"b": torch.ones(1), "w": torch.ones(1)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> apply_updates(params, updates)
    {'b': tensor([0.9000]), 'w': tensor([0.8500])}
    """

    if moments != 32:
        from zfunc.optim.adam_8bit import few_bits  # for those alone

        return few_bits(moments, lr, b1, b2, eps, weight_decay, mask)

    def init(params: Tree) -> AdamState:
        return AdamState(started(), zeros(params), zeros(params))

    def unreduced() -> GradientTransformation:
        from zfunc.optim.adam_zero_one import zero_one_adam  # where gradients are compressed alone

        return zero_one_adam(lr, b1, b2, eps, weight_decay, mask)

    rates = decay_rates(weight_decay, mask)
    update, additive = adam_updates(lr, b1, b2, eps, weight_decay, rates)
    return GradientTransformation(
        with_mask(init, "adamw", rates),
        update,
        additive=additive,
        checked=True,
        unfit=None,
        unreduced=unreduced,
    )


def adam_updates(
    lr: Rate, b1: float, b2: float, eps: float, weight_decay: float, rates: Rates
) -> tuple[UpdateFn, UpdateFn]:
    """``update``, fused where it can be, and ``additive`` of AdamW.

    Args:
        rates: the decay of all leaves, or a function from leaf paths to it.
    """
    how: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps}

    def additive(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        needs_params("adamw", weight_decay, params)
        mu = blend(grads, state.mu, b1, 1 - b1)
        nu = blend(grads, state.nu, b2, 1 - b2, square=True)
        after = AdamState(state.count + 1, mu, nu)
        along = partial(direction, **how)
        return updates_along(along, after, at(lr, state.count), rates, params), after

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        rate, count, paces, done = at(lr, state.count), state.count + 1, paced(rates), None

        def otherwise(g: Tree, p: Tree, m: Tree, v: Tree) -> tuple[Tree, Tree, Tree]:
            updates, new = additive(g, AdamState(state.count, m, v), p)
            return moved(p, updates), new.mu, new.nu

        if params is not None and _can_fuse(rate, weight_decay):
            done = fused.step(
                *(grads, params, state.mu, state.nu),
                decay=paces,
                otherwise=otherwise,
                **{"count": count, "lr": rate, **how},
            )
        if done is None:
            return additive(grads, state, params)
        new, mu, nu = done
        f = partial(retrace, along=partial(direction, **how), rate=rate, count=count)
        updates = Moved(new, params, lambda: map_rates(f, paces, new, mu, nu))
        return updates, AdamState(count, mu, nu)

    return update, additive


def updates_along(
    f: Callable[..., Tensor], after: AdamState, rate: Number, rates: Rates, params: Tree
) -> Tree:
    """The updates against ``f(m, v, count=...)`` of the moments after the step."""
    own = map_own(
        lambda missed, m, v: f(m, v, count=own_count(after.count, missed)), after.mu, after.nu
    )
    step = add_decay(rates, own, params)
    return held(tree.map(lambda u, m: (u * -rate).to(m.dtype), step, after.mu))


def _can_fuse(rate: Number, weight_decay: float) -> bool:
    """Whether one kernel may do it, and its updates could still be told afterwards."""
    if isinstance(rate, Tensor):
        return rate.device.type == "cuda" and not symbolic(rate)
    return rate * weight_decay < 1


def direction(m: Tensor, v: Tensor, *, b1: float, b2: float, eps: float, count: Tensor) -> Tensor:
    """``m̂ / (sqrt(v̂) + eps)``, in float32 at least."""
    number = plain(count)
    m_hat = wide(m) / (1 - b1**number)
    v_hat = wide(v) / (1 - b2**number)
    return m_hat / (v_hat.sqrt() + eps)


def retrace(
    pace: Pace | float | None,
    new: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    along: Callable[..., Tensor],
    rate: Number,
    count: Tensor,
) -> Tensor:
    """The update along ``along`` that led to ``new``: what it started from may be overwritten."""
    if pace is None:
        return nothing(new)
    decay, missed = own_pace(pace)
    step = along(m, v, count=own_count(count, missed)) * rate
    old = (wide(new) + step) / (1 - rate * decay)
    return (-step - old * (rate * decay)).to(new.dtype)
