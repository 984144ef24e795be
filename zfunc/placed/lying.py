"""Plain leaves that lie in the flats of a layout, and the node that holds these flats.

What is computed of all leaves together, their norm or an elementwise update, takes a few
operations on the flats. Which leaves they are is told by looking at each once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.nodes import Placed

__all__ = ["Lying"]


@dataclass(frozen=True)
class Lying:
    """The leaves of one tree, in leaf order, where they lie, and the flats that they fill."""

    leaves: tuple[weakref.ref[Tensor], ...]
    places: tuple[int, ...]
    node: Placed

    @classmethod
    def of(cls, leaves: Sequence[Tensor | None], node: Placed) -> Lying:
        """Of a tree's leaves, in leaf order."""
        present = [x for x in leaves if x is not None]
        refs = tuple([weakref.ref(x) for x in present])
        return cls(refs, tuple([x.data_ptr() for x in present]), node)

    def under(self, leaves: Sequence[Any]) -> Placed | None:
        """The node, if these are the leaves and lie where they did."""
        if len(leaves) != len(self.leaves):
            return None
        if any(ref() is not x for ref, x in zip(self.leaves, leaves, strict=True)):
            return None
        moved = any(x.data_ptr() != at for x, at in zip(leaves, self.places, strict=True))
        return None if moved else self.node
