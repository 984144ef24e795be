"""Exponential moving averages, of updates in a chain or of parameters in a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from zfunc.optim import moments
from zfunc.optim.base import GradientTransformation
from zfunc.optim.paces import held, map_own, own_count
from zfunc.optim.rates import plain, started
from zfunc.trees.reduction import reduced
from zfunc.trees.squares import wide

__all__ = ["EmaState", "ema"]

Tree = Any


class EmaState(NamedTuple):
    """``count`` values so far (0-d int64) and their average, not debiased."""

    count: Tensor  # type: ignore[assignment]  # optax's name; `tuple.count` is not missed
    ema: Tree


def ema(decay: float, debias: bool = True) -> GradientTransformation:
    """The average of everything it was given: ``a = decay * a + (1 - decay) * x``.

    In a chain it smooths updates. In a step it averages parameters, placed ones
    too: give it the new parameters in place of gradients, and keep its state::

        params = optim.apply_updates(state["params"], updates)
        average, ema_state = average_of.update(params, state["ema"])

    Args:
        decay: the weight of the past.
        debias: divide by ``1 - decay**count``, so that the zero it starts from
            does not count.

    Returns:
        A transformation whose updates are the average, in the dtypes of its input.

    >>> import torch
    >>> tx = ema(0.9)
    >>> average, state = tx.update({"w": torch.ones(1)}, tx.init({"w": torch.zeros(1)}))
    >>> average, state.ema
    ({'w': tensor([1.])}, {'w': tensor([0.1000])})
    """

    def init(params: Tree) -> EmaState:
        return EmaState(started(), moments.zeros(params))

    def update(values: Tree, state: EmaState, params: Tree) -> tuple[Tree, EmaState]:
        count = state.count + 1
        values = reduced(values)
        mean = moments.blend(values, state.ema, decay, 1 - decay)

        def seen(missed: int) -> float | Tensor:
            return 1 - decay ** plain(own_count(count, missed)) if debias else 1.0

        common = seen(0)

        def unbiased(missed: int, a: Tensor, x: Tensor) -> Tensor:
            return (wide(a) / (seen(missed) if missed else common)).to(x.dtype)

        return held(map_own(unbiased, mean, values)), EmaState(count, mean)

    return GradientTransformation(init, update, checked=True, unfit=None)
