"""Lookahead: now and then back to where a slower walker is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.optim import moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.decay import needs_params
from zfunc.optim.rates import plain, started
from zfunc.optim.updates import moved
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["LookaheadState", "lookahead"]

Tree = Any


class LookaheadState(NamedTuple):
    """The inner state, how many steps ago both were together (0-d int64), the slow parameters."""

    fast_state: Any
    steps_since_sync: Tensor
    slow: Tree


def lookahead(
    tx: GradientTransformation, sync_period: int, slow_step_size: float
) -> GradientTransformation:
    """``tx``, whose parameters go back to slow ones every few steps.

    Slow parameters go a part of the way to the fast ones, and these start again from there:
    ``slow += slow_step_size * (fast - slow)``. Those of the step are the fast ones; the slow ones
    are in the state, where optax has a pair of both in the parameters' place.

    Args:
        tx: the optimizer of the fast parameters.
        sync_period: how many of its steps make one slow step.
        slow_step_size: which part of the way that goes.

    Raises:
        ValueError: ``sync_period`` is below 1; (from ``update``) no ``params``.

    Source: Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019.

    >>> from zfunc import optim
    >>> tx = lookahead(optim.sgd(1.0), sync_period=2, slow_step_size=0.5)
    >>> params = torch.zeros(1)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update(torch.ones(1), state, params)
    ...     params = optim.apply_updates(params, updates)
    >>> params
    tensor([-1.])
    """
    if sync_period < 1:
        raise ValueError(f"sync_period is {sync_period}; fast parameters make one step at least.")

    def init(params: Tree) -> LookaheadState:
        return LookaheadState(tx.init(params), started(), tree.map(torch.clone, params))

    def update(grads: Tree, state: LookaheadState, params: Tree) -> tuple[Tree, LookaheadState]:
        needs_params("lookahead", True, params)
        updates, fast = tx.additive(grads, state.fast_state, params)
        updates, count = reduced(updates), state.steps_since_sync + 1
        now = plain((count % sync_period) == 0)  # waits for nothing: counts are on the host
        if isinstance(now, float) and not now:
            return updates, LookaheadState(fast, count, state.slow)
        part = slow_step_size * now
        slow = moments.blend(moved(params, updates), state.slow, 1 - part, part)

        def back(u: Tensor, s: Tensor, p: Tensor) -> Tensor:
            home = (wide(s) - wide(p)).to(u.dtype)
            return home if isinstance(now, float) else torch.where(now != 0, home, u)

        return tree.map(back, updates, slow, params), LookaheadState(
            fast, count % sync_period, slow
        )

    return GradientTransformation(init, update, checked=True, unfit="lookahead")
