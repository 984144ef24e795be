"""The primitives a step is written with; transforms see a step only through these.

On plain parameters, outside a step, each does the obvious thing. A running step
(see :mod:`zfunc.engine.step`) gives them their meaning under its transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.engine import context
from zfunc.trees.nodes import Box, Lazy, Placed, Tree, register

__all__ = [
    "Mean",
    "Ref",
    "compressing",
    "enter",
    "frozen",
    "layer",
    "missed",
    "own_step",
    "reduced",
    "scan",
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

    :func:`layer` lets them enter, uses them and lets them go again. Reading one
    directly (``ref["w"]``, iterating, flattening) is right too, but then the
    gathered memory lives until backward has passed.
    """

    differentiated = False
    """Whether gradients of these parameters are asked for."""

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """``fn(params, *xs, **kw)`` with the parameters entered for this call only."""
        raise NotImplementedError

    def resolve(self) -> Tree:
        """The plain subtree of entered tensors, differentiable."""
        raise NotImplementedError

    def told(self, info: context.LayerInfo) -> context.LayerInfo:
        """``info`` with what the reference knows of the layer."""
        return info

    def force(self) -> Tree:
        return self.resolve()

    def __getitem__(self, key: Any) -> Any:
        return self.resolve()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.resolve())

    def __len__(self) -> int:
        return len(self.resolve())


def enter(params: Tree) -> Tree:
    """Let placed parameters enter without gradients; plain trees pass through.

    Returns:
        A tree of the same shape: real tensors outside ``Layers``, a :class:`Ref`
        for each layer. For teachers, discriminators, averages.
    """
    if isinstance(params, Placed):
        return _ENTER[-1](params)
    return params.tree if isinstance(params, Box) else params


_ENTER: list[Callable[[Placed], Any]] = []


def on_enter(how: Callable[[Placed], Any]) -> None:
    """Say how placed parameters enter; called once, by :mod:`zfunc.engine.passes`."""
    _ENTER.append(how)


def layer(fn: Callable[..., Any], params: Tree, *xs: Any, **kw: Any) -> Any:
    """``fn(params, *xs, **kw)``: one layer, the place where transforms act on it.

    Args:
        fn: a function of the layer's parameters and inputs.
        params: the layer's parameters, plain or as the step hands them over.

    >>> layer(lambda p, x: p["w"] * x, {"w": 2}, 3)
    6
    """
    running = context.current()
    if running is None:
        return _compute(fn, params, xs, kw)
    index = running.layer_calls
    scope = running.next_scope()
    inner = fn if scope is None else _scoped(fn, scope)
    if not running.around:
        return _compute(inner, params, xs, kw)

    def call(*xs: Any, **kw: Any) -> Any:
        return _compute(inner, params, xs, kw)

    info = context.LayerInfo(index, getattr(fn, "zfunc_name", str(index)))
    if isinstance(params, Ref):
        info = params.told(info)
    for transform in running.around:
        call = transform.layer(call, info)
    return call(*xs, **kw)


def _compute(fn: Callable[..., Any], params: Tree, xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    params = enter(params)
    if isinstance(params, Ref):
        return params.call(fn, xs, kw)
    return fn(params, *xs, **kw)


def _scoped(fn: Callable[..., Any], scope: AbstractContextManager[Any]) -> Callable[..., Any]:
    """``fn`` with torch's random functions deciding by a layer's key alone."""

    def call(*xs: Any, **kw: Any) -> Any:
        with scope:
            return fn(*xs, **kw)

    return call


def scan(fn: Callable[[Any, Any], Any], layers: Tree, x: Any) -> Any:
    """``x = fn(layers[i], x)`` for every layer in order.

    >>> from zfunc.trees.tree import Layers
    >>> scan(lambda p, x: p["w"] * x, Layers([{"w": 2}, {"w": 5}]), 3)
    30
    """
    for params in enter(layers):
        x = layer(fn, params, x)
    return x


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
    return running is not None and (
        running.frozen
        or running.unsettled
        or any(transform.compresses for transform in running.transforms)
    )
