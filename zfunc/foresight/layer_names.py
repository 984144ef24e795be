"""Which layer an operation belongs to, and whether it is of forward, backward or of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from zfunc.engine.context import RECOMPUTED
from zfunc.engine.hooks import LayerInfo
from zfunc.engine.order import Order
from zfunc.engine.step import Step, Transform

__all__ = ["CurrentLayer", "named"]


class CurrentLayer:
    """Where a program is.

    Backward runs node by node; the number of a node tells which operation of forward made it.

    Attributes:
        layer: the innermost layer that computes in forward, or ``""``.
    """

    def __init__(self) -> None:
        self.layer = ""
        self._layers: dict[int, str] = {}  # by the number of a node

    def begin(self) -> None:
        """Forget nodes of earlier steps."""
        self._layers.clear()

    def here(self) -> tuple[str, str]:
        """The layer and the phase of the operation that is under way."""
        node: Any = torch._C._current_autograd_node()
        again = RECOMPUTED.get() == "again"
        if node is not None and not again:
            return self._layers.get(node._sequence_nr(), ""), "backward"
        if torch.is_grad_enabled() or self.layer:
            self._layers[torch._C._autograd._get_sequence_nr() - 1] = self.layer
        return self.layer, "recomputed" if again else "forward"


@dataclass(frozen=True)
class LayerNames(Transform):
    """A transform that changes nothing: it says which layer computes."""

    position: ClassVar[int] = Order.REMAT + 1  # inside, so that it is told twice

    current: CurrentLayer = field(compare=False)

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        name = info.name if info.stack is None else f"{info.stack}.{info.depth}"

        def run(*xs: Any, **kw: Any) -> Any:
            outer, self.current.layer = self.current.layer, name
            try:
                return call(*xs, **kw)
            finally:
                self.current.layer = outer

        return run


def named(step: Step, current: CurrentLayer) -> Step:
    """A step that tells in which layer it is."""
    transforms = sorted((*step.transforms, LayerNames(current)), key=lambda t: t.position)
    return replace(step, transforms=tuple(transforms))
