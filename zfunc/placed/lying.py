"""Plain leaves that lie in the flats of a layout, and the node that these flats make.

The norm of all leaves together takes a few operations on the flats. Which leaves they are is told
by looking at each once. Nothing here keeps them: they may be gone before anybody asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.placed.layout import Layout
from zfunc.placed.sharded import Sharded
from zfunc.placed.streamed import whole

__all__ = ["Lying"]


@dataclass(frozen=True)
class Lying:
    """The leaves of one tree, by leaf index, and the layout in whose flats they lie."""

    leaves: tuple[weakref.ref[Tensor] | None, ...]
    layout: Layout

    @classmethod
    def of(cls, leaves: Sequence[Tensor | None], layout: Layout) -> Lying:
        """Of a tree's leaves, those without a value included."""
        return cls(tuple([None if x is None else weakref.ref(x) for x in leaves]), layout)

    def under(self, leaves: Sequence[Any]) -> Sharded | None:
        """The flats, whole, if these are the leaves that have values and lie where they did."""
        mine = [None if ref is None else ref() for ref in self.leaves]
        present = [x for x, ref in zip(mine, self.leaves, strict=True) if ref is not None]
        if len(present) != len(leaves) or any(
            x is not y for x, y in zip(present, leaves, strict=True)
        ):
            return None
        flats: list[Tensor | None] = []
        for i, row in enumerate(self.layout.by_flat):
            some = [x for slot in row if (x := mine[slot.index]) is not None]
            flats.append(self.layout.buffer_under(i, some) if some else None)
            if some and flats[i] is None:
                return None
        return Sharded(whole(self.layout), flats)
