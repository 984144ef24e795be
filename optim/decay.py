"""Weight decay: of every leaf alike, or of those that a mask chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zfunc.optim.base import EmptyState, GradientTransformation, by_path
from zfunc.optim.choices import judged
from zfunc.optim.paces import Paces, held
from zfunc.trees import tree
from zfunc.trees.reduction import linear_map
from zfunc.trees.squares import wide

__all__ = [
    "Rates",
    "add_decay",
    "add_decayed_weights",
    "decay_rates",
    "map_rates",
    "needs_params",
    "with_mask",
]

Tree = Any
Rates = Callable[[str], float] | float


def decay_rates(weight_decay: float, mask: Tree | Callable[[str], bool] | None) -> Rates:
    """The decay of all leaves, or a function from leaf paths to it."""
    if mask is None or not weight_decay:
        return weight_decay
    chosen = by_path(mask)
    return lambda path: weight_decay if chosen(path) else 0.0


def with_mask(init: Callable[[Tree], Any], name: str, rates: Rates) -> Callable[[Tree], Any]:
    """``init``, which says so if a mask leaves no leaf to decay."""
    return judged(init, {f"{name}: the mask chooses": rates}) if callable(rates) else init


def map_rates(f: Callable[..., Tensor], rates: Paces, *trees: Tree) -> Tree:
    """``f(rate, leaf, ...)`` of corresponding leaves, elementwise."""
    if callable(rates):
        return tree.map_leaves(linear_map(lambda path, *xs: f(rates(path), *xs)), *trees)
    return tree.map(linear_map(lambda *xs: f(rates, *xs)), *trees)


def add_decay(rates: Rates, updates: Tree, params: Tree | None) -> Tree:
    """``updates + rate * params``."""
    if rates == 0.0:
        return updates
    return map_rates(_add_decay, rates, updates, params)


def _add_decay(rate: float, update: Tensor, param: Tensor) -> Tensor:
    return (update + wide(param) * rate).to(update.dtype) if rate else update


def needs_params(name: str, needed: object, params: Tree | None) -> None:
    """Raise ``ValueError`` where an update cannot do without the parameters."""
    if needed and params is None:
        raise ValueError(
            f"{name} needs the parameters: call tx.update(grads, opt_state, params), not "
            "tx.update(grads, opt_state)."
        )


def add_decayed_weights(
    weight_decay: float, mask: Tree | Callable[[str], bool] | None = None
) -> GradientTransformation:
    """``updates + weight_decay * params``.

    Args:
        weight_decay: how much of the parameter is added.
        mask: which leaves: a tree of bools (or a prefix), or a predicate on leaf
            paths. All of them if left out.

    Raises:
        ValueError: (from ``update``) no ``params``.

    >>> import torch
    >>> tx = add_decayed_weights(0.1)
    >>> tx.update(torch.ones(1), tx.init(torch.ones(1)), torch.ones(1))[0]
    tensor([1.1000])
    """
    rates = decay_rates(weight_decay, mask)

    def update(grads: Tree, state: EmptyState, params: Tree) -> tuple[Tree, EmptyState]:
        needs_params("add_decayed_weights", weight_decay, params)
        return held(add_decay(rates, grads, params)), state

    init = with_mask(lambda params: EmptyState(), "add_decayed_weights", rates)
    return GradientTransformation(init, update, checked=True, unfit=None)
