"""``Estimated``: cut gradients that stand for others, and know the norms of those.

What compression makes of a gradient carries the errors of earlier steps, so it is longer than
the gradient. Clipping must not see that: it would shorten every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
from torch import Tensor

from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.trees.nodes import Tree, register
from zfunc.trees.squares import square_sum, wide_dtype

__all__ = ["Estimated"]


class Estimated(Sharded):
    """A ``Sharded`` whose norms are given. Whatever is computed from it is an ordinary one.

    Attributes:
        squares: the square of each leaf's norm by leaf index, 1-D, the same on all ranks.
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor | None], squares: Tensor) -> None:
        super().__init__(layout, flats)
        self.squares = squares

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tree:
        if f is not square_sum:
            return super().sums(f)
        leaves: list[Tensor | None] = [None] * len(self.layout.slots)
        squares = self.squares.unbind()
        for slot in self.layout.present:
            if (flat := self.flats[slot.flat]) is not None:
                leaves[slot.index] = squares[slot.index].to(wide_dtype(flat))
        return optree.tree_unflatten(self.layout.spec, leaves)

    def _square_totals(self) -> Tensor:
        return self.squares


register(
    Estimated,
    lambda node: (node.flats, node.layout, tuple(range(len(node.flats)))),
    lambda layout, flats: Sharded(layout, flats),
)
