"""How what is each rank's own is averaged: optimizers ask, and a transform says it.

``compress_grads`` leaves gradients of one call local, as :class:`~zfunc.trees.unreduced.Unreduced`
nodes, and gives the running step a :class:`Reduction`. Elsewhere all is averaged already.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from zfunc.trees.memory import current
from zfunc.trees.nodes import Tree

__all__ = [
    "Reduction",
    "compressing",
    "current_reduction",
    "frozen",
    "is_linear",
    "linear_map",
    "reduced",
    "settled",
]

F = TypeVar("F", bound=Callable[..., Any])


class Reduction:
    """How one call of a step averages what its ranks hold each for themselves.

    A transform derives from it, and its ``configure`` sets ``running.reduction``. By default all
    is reduced already.

    Attributes:
        freezes: whether second moments freeze some time, so that optimizers with a rule for
            gradients that are not reduced use it.
        frozen: whether they stay as they are in this call.
        unsettled: whether ``settled`` must be given those before the step.
    """

    freezes: bool = False
    frozen: bool = False
    unsettled: bool = False

    def reduce(self, tree: Tree, momentum: bool = False) -> Tree:
        """See :func:`reduced`."""
        return tree

    def settle(self, old: Tree, new: Tree, decay: float | None = None) -> Tree:
        """See :func:`settled`."""
        return new

    def apart(self, grads: Tree, number: int, decay: float) -> Any:
        """What this rank does by itself in Adam's step, if ranks go their own ways in it.

        Args:
            grads: as Adam was given them.
            number: of this step, from 1.
            decay: of second moments.

        Returns:
            See :class:`zfunc.optim.zero_one_adam.Apart`; ``None`` where all ranks step alike.
        """
        return None

    def join(self, node: Any, params: Any) -> Any:
        """The plain params with the values of a node from all ranks; ``None``: the usual way."""
        return None


def current_reduction() -> Reduction | None:
    """That of the running step, if there is one."""
    running = current()
    return None if running is None else running.reduction


def reduced(tree: Tree, momentum: bool = False) -> Tree:
    """From here on this is the mean over the data axis.

    The identity on what is reduced already; where a transform left gradients
    local, this is where they are averaged, plainly or compressed.

    Args:
        momentum: whether this is momentum as it is, whose few large elements matter most (and not
            in units that make all elements of one size).
    """
    running = current()
    if running is None or running.reduction is None:
        return tree
    return running.reduction.reduce(tree, momentum)


def settled(old: Tree, new: Tree, decay: float | None = None) -> Tree:
    """``new``, or ``old`` once a transform has frozen second moments.

    Args:
        old: second moments before this step; not read before they are frozen.
        new: second moments after it.
        decay: of which running mean they are, where that is known.
    """
    running = current()
    if running is None or running.reduction is None:
        return new
    return running.reduction.settle(old, new, decay)


def frozen() -> bool:
    """Whether second moments stay as they are in this call of a step."""
    mine = current_reduction()
    return mine is not None and mine.frozen


def compressing() -> bool:
    """Whether ``reduced`` or ``settled`` are more than the identity in this call of a step."""
    mine = current_reduction()
    return mine is not None and (mine.frozen or mine.unsettled)


def linear_map(f: F) -> F:
    """Mark ``f`` as linear in gradients, so that it may be applied before they are averaged.

    ``f(mean of g_i) == mean of f(g_i)``, whatever else ``f`` is given alike on all ranks.

    >>> from zfunc.trees.unreduced import Unreduced
    >>> halve = linear_map(lambda g: g * 0.5)
    >>> Unreduced(torch.ones(2)).map(halve, [Unreduced(torch.ones(2))]).value
    tensor([0.5000, 0.5000])
    """

    @functools.wraps(f)
    def marked(*args: Any) -> Any:
        return f(*args)

    marked.__dict__["zfunc_linear"] = True
    return cast(F, marked)


# What users sum gradients with, known without saying.
_LINEAR = (torch.add, torch.sub, torch.neg, operator.add, operator.sub, operator.neg)


def is_linear(f: Callable[..., Any]) -> bool:
    """Whether it may be applied before gradients are averaged."""
    return getattr(f, "zfunc_linear", False) or f in _LINEAR
