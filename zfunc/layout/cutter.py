"""``Cutter``: takes this rank's parts of full leaves, one by one.

Each part says of what it is a part. Leaves may be read, and rounded to few bits, one after the
other, and nobody ever holds all of the full tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.splits import Encoded, Part, Split, mark

__all__ = ["Cutter"]


@dataclass(frozen=True)
class Cutter:
    """How leaves are split, by their path.

    Attributes:
        splits: those that are; others every rank has whole.
        whole: what is said of a leaf that is whole.
    """

    splits: Mapping[str, Split]
    whole: Part

    @property
    def rank(self) -> int:
        """Which part is this rank's."""
        return self.whole.group.rank

    def part(self, path: str) -> Part:
        """What is said of a leaf."""
        return Part(self.splits.get(path), self.whole.mesh, self.whole.axis, self.whole.plan)

    def marked(self, path: str, own: Any) -> Any:
        """A leaf of which this rank's part was taken, with what is said of it."""
        return mark(own, self.part(path))

    def local(self, path: str, leaf: Any, copy: bool = False) -> Any:
        """This rank's part of a full leaf, which has the leaf's own marks, too.

        Args:
            path: of the leaf.
            leaf: a tensor, in low bits or not.
            copy: whether it must have memory of its own.

        Raises:
            PlacementError: ranks would have parts of what shares a scale.
        """
        split = self.splits.get(path)
        if isinstance(leaf, Encoded):
            own = self._encoded(path, leaf, split)
        else:
            own = leaf.view_as(leaf) if split is None else split.local(leaf, self.rank)
            own = own.clone() if copy and own._is_view() else own
        if isinstance(leaf, Tensor):
            marks = {k: v for k, v in leaf.__dict__.items() if k.startswith("_zfunc")}
            own.__dict__.update(marks)
        return self.marked(path, own)

    def _encoded(self, path: str, leaf: Any, split: Split | None) -> Any:
        if split is None:
            return leaf.clone()
        check_borders(path, split, leaf.grain(split.dim))
        return split.local(leaf, self.rank)


def check_borders(path: str, split: Split, grain: int) -> None:
    """Raise ``PlacementError`` if a split divides a group of weights that share a scale."""
    borders = {x for runs in split.runs for run in runs for x in run} - {0, split.size}
    odd = sorted(x for x in borders if x % grain)
    if not odd:
        return
    fitting = math.gcd(grain, *borders)
    finer = f"{fitting}, which fits these borders, or None" if fitting > 1 else "None"
    raise PlacementError(
        f"{path} has a scale for each {grain} of its {split.size} inputs, and {split.ways} ranks "
        f"split them at {odd[0]}: two ranks would have parts of one group. Take group_size="
        f"{finer} (a scale for each row), fewer ranks along the axis, "
        f"or another include=. Where rules say how leaves are split: zf.Cut(..., grain={grain}) "
        "for this leaf and for its columns."
    )
