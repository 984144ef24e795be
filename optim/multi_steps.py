"""One update of an optimizer for the mean of several gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.optim import moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.paces import nothing
from zfunc.optim.rates import started, symbolic
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["MultiSteps", "MultiStepsState"]

Tree = Any


class MultiStepsState(NamedTuple):
    """How many gradients of this update there are, how many updates there were (0-d int64 both),
    the state of the inner transformation, and the mean of gradients so far."""

    mini_step: Tensor
    gradient_step: Tensor
    inner_opt_state: Any
    acc_grads: Tree


def MultiSteps(  # optax's name
    tx: GradientTransformation, every_k: int | Callable[[int], int], use_grad_mean: bool = True
) -> GradientTransformation:
    """``tx`` once for every few gradients, with their mean; nothing moves in between.

    :func:`zfunc.accumulate` does the same within one step, and sends gradients once. This is for
    batches that come one at a time.

    Args:
        tx: what takes the mean.
        every_k: of how many gradients, or a function from the number of updates to it.
        use_grad_mean: take their mean; else their sum.

    Raises:
        ValueError: a number below 1.
        CompositionError: (from ``update``) it is traced; which step it is decides what runs.

    >>> from zfunc import optim
    >>> tx = MultiSteps(optim.sgd(1.0), every_k=2)
    >>> first, state = tx.update(torch.tensor([1.0]), tx.init(torch.zeros(1)))
    >>> second, state = tx.update(torch.tensor([3.0]), state)
    >>> first.abs(), second
    (tensor([0.]), tensor([-2.]))
    """
    number = every_k if callable(every_k) else lambda update: every_k
    if number(0) < 1:
        raise ValueError(f"every_k is {number(0)}; an update takes one gradient at least.")

    def init(params: Tree) -> MultiStepsState:
        return MultiStepsState(started(), started(), tx.init(params), moments.zeros(params))

    def run(
        grads: Tree, state: MultiStepsState, params: Tree, additive: bool
    ) -> tuple[Tree, MultiStepsState]:
        if symbolic(state.mini_step):
            raise CompositionError(
                "MultiSteps cannot be traced: which step it is decides what runs. Use "
                "zf.accumulate, which has all gradients of an update in one step."
            )
        mini, done, inner, acc = state
        n = int(mini)
        acc = tree.map(partial(_added, n=n if use_grad_mean else 0), reduced(grads), acc)
        if n + 1 < number(int(done)):
            return tree.map(nothing, grads), MultiStepsState(mini + 1, done, inner, acc)
        updates, inner = (tx.additive if additive else tx.update)(acc, inner, params)
        after = MultiStepsState(
            torch.zeros_like(mini), done + 1, inner, tree.map(torch.zeros_like, acc)
        )
        return updates, after

    return GradientTransformation(
        init,
        partial(run, additive=False),
        additive=partial(run, additive=True),
        checked=True,
        unfit="MultiSteps",
    )


def _added(g: Tensor, a: Tensor, n: int) -> Tensor:
    """The mean of one gradient more, in the memory of the old one where that is donated."""
    old = wide(a)
    return (old + (wide(g) - old) / (n + 1) if n else old + wide(g)).to(a.dtype)
