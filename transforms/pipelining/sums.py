"""Gradients of several microbatches, summed where they are until the last one has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zfunc.engine.hooks import Pending
from zfunc.engine.order import Order
from zfunc.engine.unit_info import Ready, UnitInfo

__all__ = ["SumsOfPass", "UnitSums"]

Key = tuple[int, int]


class UnitSums:
    """Sums by unit.

    Attributes:
        kept: full flats of the gradients that have come.
    """

    def __init__(self) -> None:
        self.kept: dict[Key, list[Tensor]] = {}
        self._own: set[Key] = set()  # whose flats are nobody else's memory

    def add(self, key: Key, new: list[Tensor]) -> None:
        """Add the gradients of one microbatch."""
        old = self.kept.get(key)
        if old is None:
            self.kept[key] = new
            return
        own = key in self._own
        self.kept[key] = [a.add_(b) if own else a + b for a, b in zip(old, new, strict=True)]
        self._own.add(key)


class SumsOfPass:
    """What one pass adds (a :class:`zfunc.engine.hooks.Collector`).

    Gradients of layers leave with the last microbatch of their chunk. Those of units outside of
    layers, which several chunks may use, stay until a pass of their own.

    Args:
        root: sums of what is outside of layers.
        layers: sums of the layers of the pass's chunk; ``None`` in the pass in which those outside
            leave.
        last: whether no other microbatch comes behind this one in this chunk.
    """

    position: int = Order.ACCUMULATE

    def __init__(self, root: UnitSums, layers: UnitSums | None = None, last: bool = True) -> None:
        self.root, self.layers, self.holding = root, layers, not last

    @property
    def waiting(self) -> Mapping[Key, Any]:
        """The units that leave in this pass, of which other ones had gradients."""
        leaving = self.root if self.layers is None else self.layers
        return {} if self.holding else leaving.kept

    def leave(self, value: Pending, unit: UnitInfo) -> Pending | None:
        outside = self.layers is None or unit.layout.layer_of_unit[unit.index] < 0
        sums = self.root if outside else self.layers
        assert sums is not None
        sums.add(unit.key, value.wait())
        if self.holding or (outside and self.layers is not None):
            return None
        return Ready(sums.kept.pop(unit.key))
