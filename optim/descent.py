"""SGD, with or without momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from zfunc.optim import moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.paces import held
from zfunc.optim.rates import Rate, at, started
from zfunc.trees import tree
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["SgdState", "sgd"]

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

    >>> import torch
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
            grads = reduced(grads)
        step = grads
        if momentum:
            step = trace = reduced(moments.blend(grads, trace, momentum, 1), momentum=True)
        if nesterov:
            step = tree.map(lambda g, t: wide(g) + wide(t) * momentum, grads, trace)
        like = trace if momentum else grads
        updates = held(tree.map(lambda u, x: (wide(u) * -rate).to(x.dtype), step, like))
        return updates, SgdState(state.count + 1, trace)

    return GradientTransformation(init, update, checked=True, unfit=None)
