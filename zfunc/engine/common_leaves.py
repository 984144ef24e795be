"""Leaves to whose gradients autograd adds, one set for several passes with the same values."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

from zfunc.layout.layout import Layout

__all__ = ["CommonLeaves", "add_into"]


class CommonLeaves:
    """The entered leaves of a unit that passes have in common.

    Attributes:
        leaves: all of them, once a pass has made them.
        sums: the flats whose parts are their gradients now.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.sums: list[Tensor] = []

    @property
    def usable(self) -> bool:
        """Whether another pass may enter them: hooks that somebody has given them are for his."""
        return bool(self.leaves) and not any(x._backward_hooks for x in self.leaves)

    def has(self, leaves: Sequence[Tensor]) -> bool:
        """Whether some leaves of one unit are among these."""
        return any(x is leaves[0] for x in self.leaves)

    def adds_into(self, sums: Sequence[Tensor]) -> bool:
        """Whether gradients are parts of these flats already."""
        return len(sums) == len(self.sums) and all(map(operator.is_, sums, self.sums))


def add_into(
    sums: Sequence[Tensor],
    leaves: Sequence[Tensor],
    layout: Layout,
    flats: Sequence[int],
    common: CommonLeaves | None,
) -> None:
    """Let gradients of a unit's leaves be parts of flats.

    Args:
        sums: the flats, of the unit's indices ``flats``.
        leaves: the trainable ones, in the order of the layout.
        common: what may have them in common with other passes.
    """
    if common is not None and common.has(leaves):
        if common.adds_into(sums):
            return
        common.sums = [*sums]
    for leaf, part in zip(leaves, layout.parts_of(flats, sums), strict=True):
        leaf.grad = part
