"""``Sharded``: a tree of which every rank holds its part.

A pytree node whose leaves are this rank's flats (see :mod:`zfunc.layout.layout`), so that
elementwise code works on it unchanged. It can also be read like the tree it stands
for: ``sharded["head"]`` and ``{**sharded}`` give ``Sharded`` parts, and a part that
is a single leaf gathers itself, without gradient, when a torch function meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.uploads import on_device
from zfunc.errors import DonatedStateError, PlacementError
from zfunc.layout.arriving import begun
from zfunc.layout.counting import counted, counted_partly, shares
from zfunc.layout.cutting import make_layout
from zfunc.layout.freezing import freeze
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import (
    assemble,
    assemble_all,
    cut_flats,
    full_around,
    leaves_of,
    pieces_of_parts,
)
from zfunc.layout.readable import Readable
from zfunc.layout.streaming import OfFlats
from zfunc.ranks.axes import alone
from zfunc.ranks.axes import group as group_of
from zfunc.ranks.comm import Group
from zfunc.trees.kinds import kind
from zfunc.trees.marks import carry, gone, spent
from zfunc.trees.memory import current
from zfunc.trees.nodes import Box, Tree, opened, register
from zfunc.trees.squares import Segments, square_sum

__all__ = ["Sharded", "cut", "present", "replaced", "summed"]

TOGETHER = 1 << 16  # elements up to which a CPU squares a flat beside others


class Sharded(OfFlats, Readable):
    """This rank's part of a tree.

    Attributes:
        layout: how the tree is cut.
        flats: one local 1-D tensor for each of the layout's flats; ``None`` where
            the tree has no values (gradients of frozen parameters).
    """

    def __init__(self, layout: Layout, flats: Sequence[Tensor | None]) -> None:
        self.layout = layout
        self.flats = tuple(flats)

    def __repr__(self) -> str:
        total = sum(slot.numel for slot in self.layout.present)
        ranks = f"{self.layout.world} rank{'s' * (self.layout.world > 1)}"
        return f"Sharded({total} elements in {len(self.layout.units)} units over {ranks})"

    @property
    def group(self) -> Group:
        """The ranks among which the flats are cut.

        Raises:
            PlacementError: the current world has another size.
        """
        if self.layout.axis == ():
            return alone()
        group = group_of(self.layout.mesh, self.layout.axis)
        if group.size != self.layout.world:
            raise PlacementError(
                f"this tree was placed on {self.layout.world} ranks of axis "
                f"{self.layout.axis!r}, the current world has {group.size}. `unplace` it in its "
                "own world and `place` the result in this one."
            )
        return group

    def held(self) -> Sequence[Tensor | None]:
        return self.flats

    def names(self) -> list[str]:
        return [slot.path for slot in self.layout.present if self.flats[slot.flat] is not None]

    def segments(self) -> list[list[tuple[str, int, int]]]:
        """For each flat the local pieces of its leaves: ``(path, start, stop)``."""
        rank = self.group.rank
        return [
            [(slot.path, a, b) for slot, a, b, _ in self.layout.segments(i, rank)]
            for i in range(len(self.flats))
        ]

    # Elementwise: every argument is cut like the first one.

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Sharded:
        guide = others[0] if isinstance(others[0], Sharded) else self
        rows = zip(*(guide.like(node) for node in others), strict=True)
        return Sharded(guide.layout, [None if row[0] is None else f(*row) for row in rows])

    def map_leaves(self, f: Callable[..., Any], others: Sequence[Any], prefix: str) -> Sharded:
        guide = others[0] if isinstance(others[0], Sharded) else self
        rows = zip(*(guide.like(node) for node in others), strict=True)
        out = [
            None if row[0] is None else guide._map_pieces(f, i, row, prefix)
            for i, row in enumerate(rows)
        ]
        return Sharded(guide.layout, out)

    def _map_pieces(
        self, f: Callable[..., Any], flat: int, row: Sequence[Any], prefix: str
    ) -> Tensor:
        out: Tensor | None = None
        here = [(slot, a, b) for slot, a, b, _ in self.layout.segments(flat, self.group.rank)]
        nothing = [(slot, 0, 0) for slot in self.layout.by_flat[flat][:1]]
        for slot, a, b in here or nothing:  # the dtype is to be that of other ranks
            piece = f(f"{prefix}.{slot.path}" if prefix else slot.path, *(x[a:b] for x in row))
            if out is None:
                out = torch.zeros(row[0].shape, dtype=piece.dtype, device=piece.device)
            out[a:b] = piece
        return torch.zeros_like(row[0]) if out is None else out

    def like(self, node: Any) -> Sequence[Any]:
        """The local flats of ``node``, a placed or a plain tree, cut as this one is."""
        if isinstance(node, Sharded):
            return node.recut(self.layout).flats
        return self.cut(node).flats

    def cut(self, tree: Tree) -> Sharded:
        """This rank's part of a plain tree of the same structure; 0-d leaves are spread."""
        return cut(self.layout, tree, self.group.rank)

    def sample(self, plain: Tree) -> Sharded:
        return cut(make_layout(plain, world=1), plain, 0)

    def recut(self, layout: Layout) -> Sharded:
        """The same tree restricted to the leaves of ``layout``, cut as that says.

        Raises:
            PlacementError: ``layout`` is no restriction of this tree's.
        """
        if layout is self.layout or layout == self.layout:
            return self
        pieces, rank = self.pieces(), self.group.rank
        mine = {slot.index: slot for slot in self.layout.present}
        if self.layout.axis == () and layout.axis != ():  # all is here, some asked for
            rank, every = layout.ranks.rank, pieces
            pieces = {i: x[:0] for i, x in every.items()}
            for flat in range(len(layout.flats)):
                for slot, a, b, offset in layout.segments(flat, rank):
                    if slot.index in every:
                        pieces[slot.index] = every[slot.index][offset : offset + b - a]
        flats: list[Tensor | None] = []
        for i, slots in enumerate(layout.by_flat):
            known = i < len(self.flats)  # a tree that was placed by itself has its own flats
            if known and not slots and not self.layout.by_flat[i] and self.flats[i] is None:
                flats.append(None)
                continue
            if any(slot.index not in mine for slot in slots):
                raise PlacementError(
                    f"{next(s.path for s in slots if s.index not in mine)} has a value in one tree "
                    "and none in another of the same map. The tree with fewer leaves comes first."
                )
            homes = {mine[slot.index].flat for slot in slots}
            if slots and any(self.flats[home] is None for home in homes):
                flats.append(None)
            elif homes == {i} and self.layout.flats[i] == layout.flats[i]:
                flats.append(self.flats[i])
            else:
                flats.append(assemble(layout, i, pieces, rank))
        return Sharded(layout, flats)

    @property
    def num_leaves(self) -> int:
        return len(self.layout.slots)

    def pieces(self) -> dict[int, Tensor]:
        rank, out = self.group.rank, {}
        for i, local in enumerate(self.flats):
            if local is not None:
                out.update({slot.index: local[:0] for slot in self.layout.by_flat[i]})
                for slot, a, b, _ in self.layout.segments(i, rank):
                    out[slot.index] = local[a:b]
        return out

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        slot = self.layout.slots[index]
        assert slot is not None
        local, rank = self.flats[slot.flat], self.group.rank
        assert local is not None
        rows = [row for row in self.layout.segments(slot.flat, rank) if row[0].index == index]

        def write(value: Tensor) -> None:
            mine = self.layout.own(slot, value)
            for _, a, b, offset in rows:
                local[a:b] = mine.reshape(-1)[offset : offset + b - a]

        return write

    def select(self, keep: Callable[[str], bool]) -> Sharded:
        slots = self.layout.slots
        return self.recut(
            self.layout.select(lambda i: (s := slots[i]) is not None and keep(s.path))
        )

    def merge(self, other: Any) -> Sharded:
        if other is None:
            return self
        theirs = other if isinstance(other, Sharded) else self.cut(other)
        if theirs.layout == self.layout:
            rows = zip(self.flats, theirs.flats, strict=True)
            return Sharded(self.layout, [b if a is None else a for a, b in rows])
        guide = max((self, theirs), key=lambda node: len(node.layout.present))
        pieces, layout = {**theirs.pieces(), **self.pieces()}, guide.layout
        if lost := pieces.keys() - {slot.index for slot in layout.present}:
            name = next(
                s.path for s in (*self.layout.present, *theirs.layout.present) if s.index in lost
            )
            raise PlacementError(
                f"merge has no place for {name}: one of the two trees must be cut like the whole. "
                "Merge parts onto the whole tree (gradients, say), one after the other."
            )
        return Sharded(layout, assemble_all(layout, pieces, self.group.rank))

    # Collectives

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tree:
        if f is square_sum:
            totals, dtypes = (
                self._square_totals(),
                [x if x is None else x.dtype for x in self.flats],
            )
            return _spread(self.layout, totals, dtypes)
        dtypes = [None if x is None else x.dtype for x in self.flats]
        device = next((x.device for x in self.flats if x is not None), None)
        return summed(self.layout, self.summing, self.partial_sums(f), dtypes, device)

    def totals(self, parts: Mapping[str, Tensor], shape: tuple[int, ...] = ()) -> Tree:
        partial = {}
        for i in range(len(self.flats)):
            for slot, share in shares(self.layout, i, self.group.rank):
                if slot.path in parts:
                    part = parts[slot.path]
                    partial[slot.index] = part if share == 1 else part / share
        dtypes = [None if x is None else x.dtype for x in self.flats]
        device = next((x.device for x in self.flats if x is not None), None)
        return summed(self.layout, self.summing, partial, dtypes, device, shape)

    @classmethod
    def square_sums_of(cls, nodes: Sequence[Any]) -> list[Tensor]:
        return [node._square_row() for node in nodes]

    def _square_row(self) -> Tensor:
        """The squares of the norms of the leaves that have values, in leaf order."""
        totals, slots = self._square_totals(), self.layout.slots
        alive = tuple(i for i, s in enumerate(slots) if s and self.flats[s.flat] is not None)
        if len(alive) == len(slots):
            return totals
        return totals.index_select(0, _table(self.layout, alive, totals))

    def _square_totals(self) -> Tensor:
        """The square of each leaf's norm, by leaf index, summed over the ranks."""
        dtypes = [None if x is None else x.dtype for x in self.flats]
        device = next((x.device for x in self.flats if x is not None), None)
        return _across(self.layout, self.summing, self._square_parts(), dtypes, device)

    def _square_parts(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Sums of squares of this rank's pieces: of which leaves, and 1-D what they are."""
        rank, out = self.group.rank, []
        together: dict[Any, list[int]] = {}
        for i, x in enumerate(self.flats):
            if x is None or not counted(self.layout, i, rank):
                continue
            alone = x.numel() > TOGETHER and kind(x.device) == "cpu"
            together.setdefault((x.dtype, x.device, i if alone else -1), []).append(i)
        for some in together.values():
            indices, bounds = self._rows_of(tuple(some), rank)
            flats = [x for i in some if (x := self.flats[i]) is not None]
            out.append((indices, bounds.square_sums(flats)))
        return [*out, *(((i,), square_sum(x)[None]) for i, x in self._partly())]

    def _partly(self) -> Iterator[tuple[int, Tensor]]:
        """Of leaves that count here in part: whose, and these elements."""
        for i, x in enumerate(self.flats):
            for slot, at in () if x is None else counted_partly(self.layout, i, self.group.rank):
                assert x is not None
                yield slot.index, x.index_select(0, on_device(at, x.device))

    def _rows_of(self, flats: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], Segments]:
        """Whose pieces this rank has in some flats, and where."""
        key = ("squares", flats, rank)
        if key not in self.layout._memo:
            rows = [counted(self.layout, i, rank) for i in flats]
            indices = tuple(slot.index for row in rows for slot, *_ in row)
            bounds = tuple(tuple((a, b) for _, a, b, _ in row) for row in rows)
            self.layout._memo[key] = indices, Segments(bounds)
        found: tuple[tuple[int, ...], Segments] = self.layout._memo[key]
        return found

    def partial_sums(self, f: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
        """``f`` of this rank's piece of each leaf, by leaf index; what several ranks hold is taken
        on the first of them only."""
        if f is square_sum:
            parts = self._square_parts()
            return {i: x for row, sums in parts for i, x in zip(row, sums.unbind(), strict=True)}
        out = {i: f(x) for i, x in self._partly()}
        for i, x in enumerate(self.flats):
            for slot, a, b, _ in () if x is None else counted(self.layout, i, self.group.rank):
                assert x is not None
                out[slot.index] = f(x[a:b])
        return out

    def full(self) -> Tree:
        if any(map(spent, self.flats)):
            raise DonatedStateError(gone(""))
        leaves: list[Any] = [None] * len(self.layout.slots)
        for i, slots in enumerate(self.layout.by_flat):
            if (whole := self._gather(i)) is not None:
                for slot, view in zip(slots, self.layout.views(i, whole), strict=True):
                    leaves[slot.index] = leaf = self.layout.complete(slot, view)
                    if not self.layout.flats[i].trainable:
                        freeze(leaf)
        return optree.tree_unflatten(self.layout.spec, leaves)

    def reassembled(self, layout: Layout, new: Tree) -> Sharded:
        rank = self.group.rank
        return Sharded(layout, assemble_all(layout, pieces_of_parts(layout, new, rank), rank))

    def _gather(self, flat: int) -> Tensor | None:
        local, spec = self.flats[flat], self.layout.flats[flat]
        if local is None:
            return None
        group = self.group
        if spec.whole or group.size == 1:
            return local.clone()
        full = torch.empty(spec.length, dtype=local.dtype, device=local.device)
        name = self.layout.units[self.layout.unit_of_flat[flat]].name
        return group.all_gather(full, local, cuts=spec.cuts, label=f"full {name}").wait()

    def join(self, params: Tree | Box) -> Any:
        running = current()
        reduction = None if running is None else running.reduction
        if reduction is not None and (new := reduction.join(self, params)) is not None:
            return new
        layout, group = self.layout, self.group
        bases: list[Tensor | None] = []
        arrivals = {}
        for i, local in enumerate(self.flats):
            spec = layout.flats[i]
            if local is None or group.size == 1 or spec.whole or not layout.by_flat[i]:
                bases.append(local)
                continue
            low, high = spec.bounds(group.rank)
            base = full_around(local, spec.length, low)
            bases.append(base)
            label = f"join {layout.units[layout.unit_of_flat[i]].name}"
            gather = partial(group.all_gather, base, cuts=spec.cuts, label=label)
            arrivals[i] = begun(group, gather(local), partial(gather, base[low:high]))
        if running is None or running.complete or not isinstance(params, Box):
            for arrival in arrivals.values():
                arrival.finish()
            arrivals = {}
        if isinstance(params, Box):
            return params.replaced(layout, bases, arrivals)
        return replaced(layout, bases, params)

    def whole(self, f: Callable[..., Tensor], others: Sequence[Any]) -> Sharded:
        guide = others[0] if isinstance(others[0], Sharded) else self
        nodes = [Sharded(guide.layout, guide.like(node)) for node in others]
        pieces = {}
        for slot in guide.layout.present:
            if guide.flats[slot.flat] is None:
                continue
            pieces[slot.index] = f(*(node.get(slot.path) for node in nodes))
        filled = [pieces.get(slot.index) if slot else None for slot in guide.layout.slots]
        return guide.cut(optree.tree_unflatten(guide.layout.spec, filled))

    def set(self, path: str, value: Any) -> Sharded:
        slot = next((slot for slot in self.layout.present if slot.path == path), None)
        old = self.flats[slot.flat] if slot else None
        if slot is None or old is None:
            raise PlacementError(f"no leaf at {path!r}. `tree.paths` lists them.")
        value = torch.as_tensor(value)
        if tuple(value.shape) != slot.full:
            raise PlacementError(
                f"{path} has shape {slot.full}, the new value {tuple(value.shape)}. "
                "Give the full value, in the leaf's shape."
            )
        new, value = old.clone(), self.layout.own(slot, value)
        for other, a, b, offset in self.layout.segments(slot.flat, self.group.rank):
            if other.index == slot.index:
                new[a:b] = value.reshape(-1)[offset : offset + b - a]
        flats = list(self.flats)
        flats[slot.flat] = new
        return Sharded(self.layout, flats)

    def __getitem__(self, entry: Any) -> Sharded:
        child, selected, used = self.layout.subtree(entry)
        if any(spent(self.flats[i]) for i in used):  # {**params, "head": new} reads it in vain
            return Sharded(child, [self.flats[i] for i in used])
        part = self.recut(selected)
        return Sharded(child, [part.flats[i] for i in used])


register(
    Sharded,
    lambda node: (node.flats, node.layout, tuple(range(len(node.flats)))),
    lambda layout, flats: Sharded(layout, flats),
)


def cut(layout: Layout, tree: Tree, rank: int, copy: bool = False) -> Sharded:
    """``rank``'s part of a whole tree; unless ``copy``, views where that is possible."""
    if isinstance(tree, Box) and not copy and (own := tree.cut(layout, rank)) is not None:
        return Sharded(layout, own)
    return Sharded(layout, cut_flats(layout, opened(tree), rank, copy))


def present(node: Sharded) -> Sharded:
    """The node, of which other ranks' leaves were on ``meta``: all its flats are in one place."""
    here = [x for x in node.flats if x is not None and not x.is_meta]
    if not here or len(here) == len(node.flats):
        return node
    return Sharded(
        node.layout,
        [
            here[0].new_empty(0, dtype=x.dtype) if x is not None and x.is_meta and not len(x) else x
            for x in node.flats
        ],
    )


def replaced(layout: Layout, flats: Sequence[Tensor | None], tree: Tree) -> Tree:
    """A plain tree with views of full flats in place of its leaves, where there are flats."""
    leaves = leaves_of(layout, tree)
    for i, full in enumerate(flats):
        if full is not None:
            for slot, view in zip(layout.by_flat[i], layout.views(i, full), strict=True):
                leaves[slot.index] = carry(view, leaves[slot.index])
    return optree.tree_unflatten(layout.spec, leaves)


def summed(
    layout: Layout,
    group: Group,
    partial: Mapping[int, Tensor],
    dtypes: Sequence[torch.dtype | None],
    device: torch.device | None,
    shape: tuple[int, ...] = (),
) -> Tree:
    """A plain tree of the leaves' sums, from every rank's part of them; a collective.

    Each sum has ``shape``: several of one leaf travel together.
    """
    kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for index, value in partial.items():
        kinds.setdefault((value.device, value.dtype), {})[index] = value
    parts = [(tuple(row), torch.stack(list(row.values()))) for row in kinds.values()]
    return _spread(layout, _across(layout, group, parts, dtypes, device, shape), dtypes)


def _across(
    layout: Layout,
    group: Group,
    parts: Sequence[tuple[tuple[int, ...], Tensor]],
    dtypes: Sequence[torch.dtype | None],
    device: torch.device | None,
    shape: tuple[int, ...] = (),
) -> Tensor:
    """``[leaves, *shape]``: sums over the ranks; from rows of leaf indices with their values.

    Values in host memory go to the device together, and the host does not wait for that.
    """
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    every = tuple(range(len(layout.slots)))
    if group.size == 1 and parts:
        device = parts[0][1].device  # nobody else needs them
    if len(parts) == 1 and parts[0][0] == every:
        totals = on_device(parts[0][1].to(wide), device)
    else:
        totals = torch.zeros(len(every), *shape, dtype=wide, device=device)
        for indices, values in parts:
            totals.index_copy_(
                0, _table(layout, indices, totals), on_device(values.to(wide), device)
            )
    group.all_reduce(totals, label="sums of leaves").wait()
    return totals


def _table(layout: Layout, indices: tuple[int, ...], like: Tensor) -> Tensor:
    """Leaf indices where they are needed, once and for all."""
    key = ("leaves", like.device, indices)
    if key not in layout._memo:
        layout._memo[key] = on_device(torch.tensor(indices, dtype=torch.long), like.device)
    found: Tensor = layout._memo[key]
    return found


def _spread(layout: Layout, totals: Tensor, dtypes: Sequence[torch.dtype | None]) -> Tree:
    """A plain tree of the leaves' rows, ``None`` where they have no values."""
    alive: list[Any] = [None] * len(layout.slots)
    rows = {totals.dtype: totals.unbind()}
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            own = torch.float64 if dtype == torch.float64 else torch.float32
            if own not in rows:
                rows[own] = totals.to(own).unbind()
            for slot in layout.by_flat[i]:
                alive[slot.index] = rows[own][slot.index]
    return optree.tree_unflatten(layout.spec, alive)
