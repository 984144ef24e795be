"""Gradient clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.optim.base import EmptyState, GradientTransformation
from zfunc.optim.rates import plain, symbolic
from zfunc.optim.updates import Scaled, scale
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.unitwise import known_norm

__all__ = ["clip", "clip_by_global_norm"]

Tree = Any


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scale the gradients down to the norm ``max_norm`` if theirs is larger.

    The norm is that of all leaves on all ranks: a collective on placed trees. A
    NaN in it reaches every gradient, as in optax. Gradients within the norm are
    passed on as they are.

    Raises:
        ValueError: ``max_norm`` is not positive.

    Source: Pascanu et al., On the Difficulty of Training Recurrent Neural
    Networks, 2013.

    >>> tx = clip_by_global_norm(1.0)
    >>> tx.update({"w": torch.tensor([3.0, 4.0])}, EmptyState())[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; a norm to clip to is positive.")

    def lazily(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        norm = known_norm(grads)
        # NaN is not within the norm, and spreads through the factor.
        factor = plain(torch.where(norm <= max_norm, 1.0, max_norm / norm))
        if isinstance(factor, Tensor):  # on a GPU whoever comes next multiplies on its way
            return scale(grads, factor) if symbolic(factor) else Scaled(grads, factor), state
        return (grads if factor == 1.0 else Scaled(grads, factor)), state

    def update(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        updates, state = lazily(grads, state, params)
        return (updates.force() if isinstance(updates, Scaled) else updates), state

    return GradientTransformation(
        lambda params: EmptyState(), update, additive=lazily, checked=True, unfit=None
    )


def clip(max_delta: float) -> GradientTransformation:
    """Each element brought into ``[-max_delta, max_delta]``; a NaN stays one.

    Raises:
        ValueError: ``max_delta`` is not positive.

    >>> tx = clip(1.0)
    >>> tx.update({"w": torch.tensor([3.0, -0.5])}, EmptyState())[0]
    {'w': tensor([ 1.0000, -0.5000])}
    """
    if not max_delta > 0:
        raise ValueError(f"max_delta is {max_delta}; what elements are clipped to is positive.")

    def update(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        return tree.map(lambda g: g.clamp(-max_delta, max_delta), reduced(grads)), state

    return GradientTransformation(lambda params: EmptyState(), update, checked=True, unfit=None)
