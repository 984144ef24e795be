"""Which layer an operation belongs to, and whether it is of forward, backward or of both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from zfunc.engine.context import RECOMPUTED
from zfunc.engine.hooks import LayerInfo, Order
from zfunc.engine.step import Step, Transform

__all__ = ["CurrentLayer", "named"]


class CurrentLayer:
    """Where a program is.

    Backward runs node by node. Nodes are numbered in the order of forward, so the number of one
    tells in which layer it was made.

    Attributes:
        layer: the innermost layer that computes in forward, or ``""``.
    """

    def __init__(self) -> None:
        self.layer = ""
        self._numbers: list[int] = []  # of the first node behind each change of the layer
        self._layers: list[str] = []

    def begin(self) -> None:
        """Forget nodes of earlier steps."""
        self._numbers.clear()
        self._layers.clear()

    def move(self, layer: str) -> str:
        """Go to a layer; returns the one before."""
        before, self.layer = self.layer, layer
        if torch._C._current_autograd_node() is None:  # what is recomputed has nodes of no use
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._layers.append(layer)
        return before

    def here(self) -> tuple[str, str]:
        """The layer and the phase of the operation that is under way."""
        node: Any = torch._C._current_autograd_node()
        again = RECOMPUTED.get() == "again"
        if node is None or again:
            return self.layer, "recomputed" if again else "forward"
        made = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._layers[made] if made >= 0 else "", "backward"


@dataclass(frozen=True, repr=False)
class LayerNames(Transform):
    """A transform that changes nothing: it says which layer computes."""

    name: ClassVar[str] = "observed"
    position: ClassVar[int] = Order.REMAT + 1  # inside, so that it is told twice

    current: CurrentLayer = field(compare=False)

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        name = info.place if info.name.isdigit() else info.name

        def run(*xs: Any, **kw: Any) -> Any:
            outer = self.current.move(name)
            try:
                return call(*xs, **kw)
            finally:
                self.current.move(outer)

        return run


def named(step: Step, current: CurrentLayer) -> Step:
    """A step that tells in which layer it is."""
    transforms = sorted((*step.transforms, LayerNames(current)), key=lambda t: t.position)
    return replace(step, transforms=tuple(transforms))
