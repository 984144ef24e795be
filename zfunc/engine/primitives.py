"""The primitives a step is written with; transforms see a step only through these.

On plain parameters, outside a step, each does the obvious thing. A running step
(see :mod:`zfunc.engine.step`) gives them their meaning under its transforms.
``layer``, ``scan`` and ``enter`` are among them, and stand in :mod:`zfunc.engine.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.engine import context
from zfunc.engine.hooks import LayerInfo
from zfunc.trees.nodes import Lazy, Tree, register

__all__ = [
    "Mean",
    "Ref",
    "compressing",
    "frozen",
    "missed",
    "own_step",
    "reduced",
    "settled",
]


@dataclass(frozen=True)
class Mean:
    """A mean that stays exact when it is taken over uneven parts.

    A loss may return ``Mean(total, count)``: the mean over ranks and microbatches
    is then sum(total) / sum(count), however many tokens each of them has.

    Attributes:
        total: the sum over this rank's elements, 0-d and differentiable.
        count: how many elements; a number or a 0-d tensor without gradient.
    """

    total: Tensor
    count: Tensor | float

    def value(self) -> Tensor:
        """total / count of this rank alone."""
        return self.total / self.count


register(
    Mean,
    lambda mean: ((mean.total, mean.count), None, ("total", "count")),
    lambda _, children: Mean(*children),
)


class Ref(Lazy):
    """A layer's parameters that have not entered the computation yet.

    :func:`zfunc.layer` lets them enter, uses them and lets them go again. Reading one
    directly (``ref["w"]``, iterating, flattening) is right too: ``force`` gives the entered
    tensors, differentiable. But then the gathered memory lives until backward has passed.
    """

    differentiated = False
    """Whether gradients of these parameters are asked for."""

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """``fn(params, *xs, **kw)`` with the parameters entered for this call only."""
        raise NotImplementedError

    def told(self, info: LayerInfo) -> LayerInfo:
        """``info`` with what the reference knows of the layer."""
        return info

    def __getitem__(self, key: Any) -> Any:
        return self.force()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.force(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.force())

    def __len__(self) -> int:
        return len(self.force())


def reduced(tree: Tree, momentum: bool = False) -> Tree:
    """From here on this is the mean over the data axis.

    The identity on what is reduced already; where a transform left gradients
    local, this is where they are averaged, plainly or compressed.

    Args:
        momentum: whether this is momentum as it is, whose few large elements matter most (and not
            in units that make all elements of one size).
    """
    running = context.current()
    for transform in running.transforms if running else ():
        tree = transform.reduce(tree, momentum=True) if momentum else transform.reduce(tree)
    return tree


def settled(old: Tree, new: Tree, decay: float | None = None) -> Tree:
    """``new``, or ``old`` once a transform has frozen second moments.

    Args:
        old: second moments before this step; not read before they are frozen.
        new: second moments after it.
        decay: of which running mean they are, where that is known.
    """
    running = context.current()
    for transform in running.transforms if running else ():
        new = transform.settle(old, new, decay)
    return new


def own_step(grads: Tree, params: Tree, mu: Tree, nu: Tree, **how: Any) -> Any:
    """Adam's step, where a transform takes it: one whose ranks go their own ways for a while.

    Args:
        grads: as Adam was given them.
        params, mu, nu: plain trees; means of gradients and of squares before the step.
        how: ``lr``, ``b1``, ``b2``, ``eps``; ``decay``, a number or a function of leaf paths;
            ``count``, the number of this step, from 1.

    Returns:
        ``(params, mu, nu, updates)``, the last a function that gives what was added to the
        parameters; or ``None``, with nothing touched: then Adam takes it.
    """
    running = context.current()
    for transform in running.transforms if running else ():
        done = transform.own_step(grads, params, mu, nu, **how)
        if done is not None:
            return done
    return None


def frozen() -> bool:
    """Whether second moments stay as they are in this call of a step."""
    running = context.current()
    return running is not None and running.frozen


def missed() -> Mapping[str, int] | None:
    """Which leaves the running update is for, and how many updates each of them has missed.

    Returns:
        The number by dotted leaf path; a leaf that is not in it keeps its value and its moments.
        ``None`` where all leaves always take part.
    """
    running = context.current()
    return None if running is None else running.missed


def compressing() -> bool:
    """Whether ``reduced`` or ``settled`` may be more than the identity."""
    running = context.current()
    return running is not None and (running.frozen or running.unsettled)
