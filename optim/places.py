"""Where the elements that a rank has lie in full leaves: for what depends on their positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.layout.counting import counted, counted_partly
from zfunc.layout.splits import Split
from zfunc.optim.base import nodes
from zfunc.ranks.axes import alone
from zfunc.ranks.comm import Group
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import Placed
from zfunc.trees.tree import dotted

__all__ = ["LeafPlace", "Share", "places", "shares"]

Tree = Any


@dataclass(frozen=True)
class LeafPlace:
    """Where a piece lies in its leaf.

    Attributes:
        shape: of the full leaf.
        start: of the piece, in the flattened leaf, or in this rank's part of it.
        split: how the leaf is split over ranks, if it is.
        part: which part of it this rank has.
    """

    shape: tuple[int, ...]
    start: int = 0
    split: Split | None = None
    part: int = 0

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Numbers of the piece's elements in the flattened full leaf, int64 ``[count]``.

        >>> LeafPlace((2, 3), 2).positions(3, torch.device("cpu"))
        tensor([2, 3, 4])
        """
        if self.split is None:
            return torch.arange(self.start, self.start + count, device=device)
        every = torch.arange(math.prod(self.shape), device=device).view(self.shape)
        mine: Tensor = self.split.local(every, self.part)
        return mine.reshape(-1)[self.start : self.start + count]


def places(tree: Tree) -> dict[str, LeafPlace]:
    """By leaf path; also of leaves of which this rank has nothing, whose pieces are empty.

    >>> places({"w": torch.zeros(2, 3)})
    {'w': LeafPlace(shape=(2, 3), start=0, split=None, part=0)}
    """
    found: dict[str, LeafPlace] = {}
    for path, node in nodes(tree):
        if not isinstance(node, Placed):
            found[path] = _of_leaf(node)
            continue
        layout: Any = node.layout  # type: ignore[attr-defined]
        part, rank = layout.parts.rank, node.group.rank  # type: ignore[attr-defined]
        rows = [layout.segments(flat, rank) for flat in range(len(layout.flats))]
        starts = {slot.index: start for row in rows for slot, _, _, start in row}
        held = set(node.names())
        for slot in layout.present:
            if slot.path in held:
                start = starts.get(slot.index, 0)
                found[dotted(path, slot.path)] = LeafPlace(slot.full, start, slot.split, part)
    return found


def _of_leaf(leaf: Tensor) -> LeafPlace:
    mark, shape = part_of(leaf), tuple(leaf.shape)
    if mark is None or mark.split is None:
        return LeafPlace(shape)
    return LeafPlace(mark.split.full(shape), 0, mark.split, mark.group.rank)


@dataclass(frozen=True)
class Share:
    """Elements of a leaf, of which each counts on one rank alone.

    Attributes:
        path: of the leaf.
        place: where they lie, one behind the other, if there are no ``positions``.
        values: 1-D.
        positions: where each of them lies in the flattened full leaf, if they are scattered.
    """

    path: str
    place: LeafPlace
    values: Tensor
    positions: Tensor | None


def shares(tree: Tree) -> Iterator[tuple[Group, list[Share]]]:
    """What counts on this rank, and the ranks that add up; by placed node or plain leaf."""
    for path, node in nodes(tree):
        if isinstance(node, Placed):
            found: Any = node
            yield found.summing, list(_of_node(path, found))
        else:
            mark = part_of(node)
            yield alone() if mark is None else mark.group, [_of_plain(path, node)]


def _of_plain(path: str, leaf: Tensor) -> Share:
    mark, place = part_of(leaf), _of_leaf(leaf)
    if mark is None:
        return Share(path, place, leaf.reshape(-1), None)
    at = None
    if place.split is not None:
        at = mark.counted(place.positions(leaf.numel(), leaf.device).view(leaf.shape)).reshape(-1)
    return Share(path, place, mark.counted(leaf).reshape(-1), at)


def _of_node(path: str, node: Any) -> Iterator[Share]:
    layout, rank, pieces, where = node.layout, node.group.rank, node.pieces(), places(node)
    for flat in range(len(layout.flats)):
        begins = {slot.index: begin for slot, begin, _, _ in layout.segments(flat, rank)}
        whole = [(slot, None) for slot, *_ in counted(layout, flat, rank)]
        for slot, some in [*whole, *counted_partly(layout, flat, rank)]:
            if (x := pieces.get(slot.index)) is None:
                continue
            place, at = where[slot.path], None
            if slot.split is not None:
                at = place.positions(x.numel(), x.device)
            if some is not None and at is not None:  # only of a split leaf some elements count
                mine = some.to(x.device) - begins[slot.index]
                x, at = x[mine], at[mine]
            yield Share(dotted(path, slot.path), place, x, at)
