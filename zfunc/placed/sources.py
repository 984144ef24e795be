"""Trees that are in memory, as parts of expressions over trees that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.nodes import NAMESPACE, Lazy, Placed, Tree, opened
from zfunc.placed.layout import Layout
from zfunc.placed.numbers import numbers_of
from zfunc.placed.pieces import assemble, cut_flats, leaves_of
from zfunc.placed.sharded import Sharded, cut
from zfunc.placed.streamed import Deferred, Op, Parts, Streamed, rank_in, registered

__all__ = ["Cut", "Held", "assembled", "source"]


def source(x: Any, guide: Layout) -> Streamed:
    """Any argument of a ``zfunc.tree`` function as a node that streams."""
    if isinstance(x, Lazy):
        x = x.force()
    if isinstance(x, Streamed):
        return x
    if isinstance(x, Sharded):
        return Held(x)
    if isinstance(x, Placed):
        raise PlacementError(
            f"a {type(x).__name__} node meets a tree on disk in one map. Take one of them into "
            "memory first: zf.full(tree)."
        )
    return assembled(guide, opened(x))


class Held(Streamed):
    """A tree that is in memory, among others that are not."""

    def __init__(self, node: Sharded) -> None:
        self._node = node
        self.skeleton = Sharded(node.layout, [x if x is None else x.to("meta") for x in node.flats])
        self.away = any(x is not None and x.device.type == "cuda" for x in node.flats)

    def held(self) -> Sequence[Tensor | None]:
        return self._node.held()

    def sources(self, unit: int) -> list[Any]:
        """The tensors of which a unit is made."""
        return [self._node.flats[i] for i in self.layout.units[unit].flats]

    def part(self, unit: int) -> Sharded:
        """One unit of it."""
        mine = self.layout.units[unit].flats
        flats = [x if i in mine else None for i, x in enumerate(self._node.flats)]
        return Sharded(self.layout, flats)


class Cut(Streamed):
    """This rank's part of a plain tree, cut when it is needed."""

    def __init__(self, layout: Layout, tree: Tree) -> None:
        self._tree = tree
        self.away = self.home.type == "cuda"
        self._near = False
        leaves = leaves_of(layout, tree)
        rank = rank_in(layout)
        flats: list[Tensor | None] = []
        for flat, slots in zip(layout.flats, layout.by_flat, strict=True):
            some = [leaves[slot.index] for slot in slots if leaves[slot.index] is not None]
            low, high = flat.bounds(rank)
            if slots and not some:
                flats.append(None)
                continue
            dtype = torch.as_tensor(some[0]).dtype if some else flat.dtype
            flats.append(torch.empty(high - low, dtype=dtype, device="meta"))
        self.skeleton = Sharded(layout, flats)

    @property
    def home(self) -> torch.device:
        """Where the tree's tensors are."""
        leaves = optree.tree_leaves(self._tree, namespace=NAMESPACE)
        there = (x.device for x in leaves if isinstance(x, Tensor) and x.ndim)
        device = next(there, torch.device("cpu"))
        return torch.get_default_device() if device.type == "meta" else device

    @property
    def on_meta(self) -> bool:
        """Whether the tree has no values (``step.init``)."""
        leaves = optree.tree_leaves(self._tree, namespace=NAMESPACE)
        return any(isinstance(x, Tensor) and x.is_meta for x in leaves)

    def part(self, unit: int) -> Sharded:
        """One unit of it."""
        if not self._near and not self.away:
            self._tree, self._near = numbers_of(self._tree), True
        flats = self.layout.units[unit].flats
        rank = self.group.rank
        return Sharded(self.layout, cut_flats(self.layout, self._tree, rank, only=flats))

    def sources(self, unit: int) -> list[Any]:
        """The tensors of which a unit is made."""
        leaves = leaves_of(self.layout, self._tree)
        return [
            leaves[s.index] for i in self.layout.units[unit].flats for s in self.layout.by_flat[i]
        ]

    def packed(self) -> Tree:
        """A copy in flats."""
        from zfunc.placed.placement import packed

        return packed(self.layout, self._tree)

    def sharded(self) -> Sharded:
        return cut(self.layout, self._tree, self.group.rank, copy=True)


def assembled(layout: Layout, new: Tree) -> Streamed:
    """A tree put together from placed parts and plain leaves, cut by ``layout``.

    Raises:
        PlacementError: it has not the leaves of ``layout``.
    """
    if isinstance(new, Streamed) and (new.layout is layout or new.layout == layout):
        return new
    new = opened(new)
    nodes = optree.tree_leaves(
        new, is_leaf=lambda x: isinstance(x, Placed), none_is_leaf=True, namespace=NAMESPACE
    )
    if not any(isinstance(node, Placed) for node in nodes):
        return Cut(layout, new)
    parts: list[Streamed] = []
    offsets: list[int] = []
    plain: list[Any] = [None] * len(layout.slots)
    at = 0
    for node in nodes:
        if isinstance(node, Placed):
            parts.append(source(node, layout))
            offsets.append(at)
            at += node.num_leaves
        else:
            if at < len(plain):
                plain[at] = node
            at += 1
    if at != len(layout.slots):
        raise PlacementError(
            f"a tree of {at} leaves stands where one of {len(layout.slots)} was expected "
            f"({layout.spec}). A step must keep the structure of its params."
        )

    def do(unit: int, got: Parts) -> list[Sharded]:
        rank = rank_in(layout)
        pieces: dict[int, Tensor] = {}
        for part, start in zip(got, offsets, strict=True):
            pieces.update({start + i: piece for i, piece in part.pieces().items()})
        mine = layout.units[unit].flats
        for i in mine:
            for slot in layout.by_flat[i]:
                if (leaf := plain[slot.index]) is not None:
                    pieces[slot.index] = leaf.reshape(-1)[:0]
            for slot, a, b, offset in layout.segments(i, rank):
                if (leaf := plain[slot.index]) is not None:
                    pieces[slot.index] = leaf.reshape(-1)[offset : offset + b - a]
        flats: list[Tensor | None] = [None] * len(layout.flats)
        for i in mine:
            if all(slot.index in pieces for slot in layout.by_flat[i]):
                flats[i] = assemble(layout, i, pieces, rank)
        return [Sharded(layout, flats)]

    skeleton = Sharded(
        layout,
        [
            torch.empty(b - a, dtype=flat.dtype, device="meta")
            for flat in layout.flats
            for a, b in [flat.bounds(rank_in(layout))]
        ],
    )
    shifts = [-start for start in offsets]
    return Deferred(Op(do, parts, layout, shifts), 0, skeleton)


registered(Held)
registered(Cut)
