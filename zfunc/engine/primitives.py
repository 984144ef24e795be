"""``Mean``, exact over uneven parts, and ``Ref``, parameters that have not entered yet."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.engine.hooks import LayerInfo
from zfunc.trees.nodes import Lazy, register

__all__ = ["CALLED", "Mean", "Ref"]

CALLED: ContextVar[Any] = ContextVar("zfunc_called", default=None)
"""What is called in a user's function's place where layers are elsewhere; False: it itself."""


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

    layout: Any = None
    """The ``Layout`` that they are leaves of, if any; ``span`` is which ``Layer`` of it."""

    span: Any = None

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """``fn(params, *xs, **kw)`` with the parameters entered for this call only."""
        raise NotImplementedError

    def told(self, index: int, name: str) -> LayerInfo:
        """What hooks are told of the layer in a call, with what the reference knows of it."""
        return LayerInfo(index, name)

    def __getattr__(self, name: str) -> Any:  # parameters may be called `_w`
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.force(), name)
