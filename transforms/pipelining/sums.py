"""Gradients of several microbatches, summed where they are until the last one has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zfunc.engine.hooks import Order, Pending
from zfunc.engine.unit_info import Ready, UnitInfo
from zfunc.transforms.accumulation import UnitSums

__all__ = ["SumsOfPass"]

Key = tuple[int, int]


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

    def take(self, unit: UnitInfo) -> list[Tensor] | None:
        return self._of(unit).take(unit)

    def leave(self, value: Pending, unit: UnitInfo) -> Pending | None:
        sums = self._of(unit)
        sums.add(unit.key, value)
        if self.holding or (sums is self.root and self.layers is not None):
            return None
        return Ready(sums.kept.pop(unit.key))

    def _of(self, unit: UnitInfo) -> UnitSums:
        outside = self.layers is None or unit.layout.layer_of_unit[unit.index] < 0
        return self.root if outside or self.layers is None else self.layers
