"""Trees that are not in memory. What is done with them is deferred, and evaluated unit by unit.

The functions of ``zfunc.tree`` on a :class:`Streamed` node give a :class:`Deferred` node. It is an
expression: it holds what to do with one unit's parts, and of which trees. :mod:`~.evaluation`
computes it.

A node's *skeleton* tells its structure without data: a ``Sharded`` node on ``meta``. The same
operations make it, so a tree that does not fit is refused at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.moves import crossing, on_device
from zfunc.buffers.numbers import numbers_of
from zfunc.errors import PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import assemble, cut_flats, leaves_of
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.sharded import Sharded, cut
from zfunc.layout.streaming import spans_of_flat
from zfunc.transforms.offloading import evaluation
from zfunc.transforms.offloading.evaluation import Evaluable, Expression
from zfunc.transforms.offloading.parts import outline, part_of, part_on, part_on_host, rank_in
from zfunc.transforms.offloading.present import present
from zfunc.trees.marks import any_spent
from zfunc.trees.nodes import (
    NAMESPACE,
    Lazy,
    LeafInfo,
    Placed,
    Span,
    Tree,
    held_in,
    opened,
    register,
)

__all__ = [
    "Deferred",
    "InMemory",
    "LazyShard",
    "Operation",
    "Streamed",
    "assembled",
    "registered",
    "same_node",
    "source",
]

T = TypeVar("T", bound=type)
_SERIAL = itertools.count(1)
Parts = Sequence[Sharded]


class Streamed(Expression):
    """A placed tree of which one unit at a time is in memory."""

    streams = True
    resident = False

    def __repr__(self) -> str:
        total = sum(slot.numel for slot in self.layout.present)
        return f"{type(self).__name__}({total} elements in {len(self.layout.units)} units)"

    def held(self) -> Sequence[Tensor | None]:
        return ()

    def names(self) -> list[str]:
        return self.skeleton.names()

    def segments(self) -> list[list[tuple[str, int, int]]]:
        """As those of ``Sharded``."""
        return self.skeleton.segments()

    @property
    def num_leaves(self) -> int:
        return len(self.layout.slots)

    # Deferred

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Deferred:
        return self._over(others, lambda row, i: row[i].map(f, row))

    def map_leaves(self, f: Callable[..., Any], others: Sequence[Any], prefix: str) -> Deferred:
        return self._over(others, lambda row, i: row[i].map_leaves(f, row, prefix))

    def whole(self, f: Callable[..., Tensor], others: Sequence[Any]) -> Deferred:
        def do(parts: Parts, i: int) -> Sharded:
            there = [part_on(part, self.device) for part in parts]  # a collective
            return part_on_host(there[i].whole(f, there))

        return self._over(others, do)

    def _over(self, others: Sequence[Any], do: Callable[[Parts, int], Sharded]) -> Deferred:
        """``do(parts, i)``, where argument ``i`` guides the others, as it would in memory."""
        i, row = _guided(others)
        skeletons = [node.skeleton for node in row]
        skeleton = skeletons[i].map(lambda first, *rest: first, skeletons)
        return _deferred(lambda unit, parts: [do(parts, i)], row, skeleton)

    def by_unit(
        self, f: Callable[..., Sequence[Any]], outs: int, others: Sequence[Any]
    ) -> list[Deferred]:
        row = _guided(others)[1]
        op = Operation(lambda unit, parts: list(f(*parts)), row, row[0].skeleton)
        return [Deferred(op, k, row[0].skeleton) for k in range(outs)]

    def select(self, keep: Callable[[str], bool]) -> Deferred:
        skeleton = self.skeleton.select(keep)
        return _deferred(lambda unit, parts: [parts[0].select(keep)], [self], skeleton)

    def merge(self, other: Any) -> Streamed:
        return self if other is None else _merge(self, source(other, self.layout))

    def beneath(self, other: Any) -> Streamed:
        return _merge(source(other, self.layout), self)

    def set(self, path: str, value: Any) -> Deferred:
        value = torch.as_tensor(value)
        skeleton = self.skeleton.set(path, value)
        slot = next(slot for slot in self.layout.present if slot.path == path)
        mine = self.layout.unit_of_flat[slot.flat]

        def do(unit: int, parts: Parts) -> list[Sharded]:
            return [parts[0].set(path, value) if unit == mine else parts[0]]

        return _deferred(do, [self], skeleton)

    def __getitem__(self, entry: Any) -> Streamed:
        skeleton = self.skeleton[entry]
        entries, children = self.layout.spec.entries(), self.layout.spec.children()
        at = entries.index(entry) if entry in entries else len(entries) + entry
        start = sum(child.num_leaves for child in children[:at])
        return _deferred(lambda unit, parts: [parts[0][entry]], [self], skeleton, [start])

    def join(self, params: Tree) -> evaluation.LazyJoin:
        return evaluation.LazyJoin(self, params)

    # Evaluated at once

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tree:
        return evaluation.sums(self, f)

    def at_hand(self, number: Tensor) -> Tensor:
        if (there := present()) is not None:
            nodes = [source(tree, self.layout) for tree in there.trees if self._beside(tree)]
            there.bring([node for node in nodes if node.away], self.skeleton, number.device)
        return number.to("cpu")

    def _beside(self, tree: Any) -> bool:
        """Whether a tree of the state is there, and lies in flats as this one does."""
        mine, its = self.layout, tree.layout
        held = (tree.buffers if isinstance(tree, Replicated) else tree.flats) or ()
        return (
            its.slots == mine.slots
            and [x.trainable for x in its.flats] == [x.trainable for x in mine.flats]
            and not any_spent(held)
            and not (isinstance(tree, Replicated) and any_spent(tree.views()))
        )

    def full(self) -> Tree:
        return evaluation.full(self)

    def pieces(self) -> dict[int, Tensor]:
        return self.sharded().pieces()

    def reassembled(self, layout: Layout, new: Tree) -> Streamed:
        return assembled(layout, new)

    def sharded(self) -> Sharded:
        """This rank's part of the tree, in memory."""
        return evaluation.gathered_up(self)

    def sample(self, plain: Tree) -> Sharded:
        return cut(make_layout(plain, world=1), plain, 0)

    # To and from files

    def leaf_infos(self) -> list[LeafInfo]:
        return self.skeleton.leaf_infos()

    def spans(self) -> list[Span]:
        return self.skeleton.spans()

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        ahead: dict[int, Any] = {}
        for k, unit in enumerate(self.layout.units):
            pending = ahead.pop(k, None) or self.fetch(k)
            if k + 1 < len(self.layout.units):
                ahead[k + 1] = self.fetch(k + 1, must=False)
            present = [i for i in unit.flats if self.skeleton.flats[i] is not None]
            for i, local in zip(present, pending.wait(), strict=True):
                for span, a, b in spans_of_flat(self.layout, i, self.group.rank):
                    yield span, local[a:b]

    def fetch(self, unit: int, must: bool = True) -> Any:
        """A ``Pending`` of one unit's flats; None if it would be too early and not ``must``."""
        return evaluation.PendingUnit(self, unit) if must else None


def _guided(others: Sequence[Any]) -> tuple[int, list[Streamed]]:
    """Which argument of a map decides the layout, and all arguments as streamed nodes."""
    i = next(k for k, x in enumerate(others) if isinstance(x, Placed))
    return i, [source(x, others[i].layout) for x in others]


def _merge(a: Streamed, b: Streamed) -> Streamed:
    skeleton = a.skeleton.merge(b.skeleton)
    merged = _deferred(lambda unit, parts: [parts[0].merge(parts[1])], [a, b], skeleton)
    merged.origin.computes = False
    return merged


class Operation(Evaluable):
    """A function of one unit's parts that has been deferred.

    Args:
        do: ``do(unit, parts) -> parts``, of one unit of ``layout``.
        sources: the trees whose parts it gets.
        skeleton: that of the results; its units are counted.
        shifts: for each source by how much its leaf indices differ from those of ``layout``.
    """

    computed = True
    computes = True  # or what one source lacks is taken over from the other

    def __init__(
        self,
        do: Callable[[int, Parts], Sequence[Sharded]],
        sources: Sequence[Streamed],
        skeleton: Sharded,
        shifts: Sequence[int] | None = None,
    ) -> None:
        self.do, self.sources = do, tuple(sources)
        self.skeleton, layout = skeleton, skeleton.layout
        self.serial = next(_SERIAL)
        self._units = [
            _matching(layout, node.layout, shift)
            for node, shift in zip(sources, shifts or [0] * len(sources), strict=True)
        ]

    def run(self, unit: int, parts: Parts) -> list[Sharded]:
        """The results of one unit, and ``None`` for all others."""
        return [_alone(part, unit) for part in self.do(unit, parts)]

    def needs(self, unit: int) -> list[list[int]]:
        """For each source the units of it of which a unit here is made."""
        return [units[unit] for units in self._units]


def _alone(part: Sharded, unit: int) -> Sharded:
    layout, flats = part.layout, {}
    for i in layout.units[unit].flats:
        x = part.flats[i]
        empty = x is None and not layout.by_flat[i]
        flats[i] = torch.zeros(0, dtype=layout.flats[i].dtype) if empty else x
    return part_of(layout, flats)


def _matching(layout: Layout, other: Layout, shift: int) -> list[list[int]]:
    """For each unit of a layout the units of another that hold its leaves."""
    if shift == 0 and layout.units == other.units:  # the same units, perhaps of fewer leaves
        return [[k] for k in range(len(layout.units))]
    rows: list[list[int]] = [[] for _ in layout.units]
    for slot in layout.present:
        index = slot.index + shift
        there = other.slots[index] if 0 <= index < len(other.slots) else None
        if there is not None:
            row, unit = rows[layout.unit_of_flat[slot.flat]], other.unit_of_flat[there.flat]
            if unit not in row:
                row.append(unit)
    return rows


class Deferred(Streamed):
    """One of the results of an :class:`Operation`."""

    def __init__(self, op: Operation, index: int, skeleton: Sharded) -> None:
        self.skeleton, self._op, self.index = skeleton, op, index
        tokens = {id(t): t for node in op.sources for t in node.held() if t is not None}
        self._tokens = tuple(tokens.values())
        used = (node.device for node in op.sources if node.device.type != "cpu")
        self.device = next(used, self.device)

    @property
    def origin(self) -> Operation:
        return self._op

    def held(self) -> Sequence[Tensor | None]:
        return self._tokens


def _deferred(
    do: Callable[[int, Parts], Sequence[Sharded]],
    sources: Sequence[Streamed],
    skeleton: Sharded,
    shifts: Sequence[int] | None = None,
) -> Deferred:
    return Deferred(Operation(do, sources, skeleton, shifts), 0, skeleton)


def same_node(node: Streamed, children: Sequence[Any]) -> Streamed:
    """The node again, unless somebody computed with what stands for its data.

    Raises:
        PlacementError: by an ordinary pytree function, which cannot reach the disk.
    """
    for old, new in zip(node.held(), children, strict=True):
        if isinstance(new, Tensor) and new is not old:
            raise PlacementError(
                f"{node!r} is not in memory, and a function that maps tensors one by one cannot "
                "reach it. Use zf.tree.map and its kin, or zf.full(tree)."
            )
    return node


def registered(kind: T) -> T:
    """Make a kind of streamed node a pytree node, with its tokens as children."""
    return register(
        kind,
        lambda node: (tuple(node.held()), node, tuple(range(len(node.held())))),
        same_node,
    )


registered(Deferred)


# Trees that are in memory, as parts of expressions over trees that are not


def source(x: Any, guide: Layout) -> Streamed:
    """Any argument of a ``zfunc.tree`` function as a streamed node."""
    if isinstance(x, Lazy):
        x = x.force()
    if isinstance(x, Streamed):
        return x
    if isinstance(x, Sharded):
        return InMemory(x)
    if isinstance(x, Placed):
        raise PlacementError(
            f"a {type(x).__name__} node meets a tree on disk in one map. Take one of them into "
            "memory first: zf.full(tree)."
        )
    return assembled(guide, opened(x))


class InMemory(Streamed):
    """A tree that is in memory, among others that are not."""

    def __init__(self, node: Sharded) -> None:
        self._node = node
        self.skeleton = Sharded(node.layout, [x if x is None else _empty(x) for x in node.flats])
        self.away = any(x is not None and on_device(x) for x in node.flats)

    def held(self) -> Sequence[Tensor | None]:
        return self._node.held()

    def sources(self, unit: int) -> list[Any]:
        """The tensors of which a unit is made."""
        return [self._node.flats[i] for i in self.layout.units[unit].flats]

    def part(self, unit: int) -> Sharded:
        """One unit, where it is."""
        mine = self.layout.units[unit].flats
        return part_of(self.layout, dict(zip(mine, self.sources(unit), strict=True)))


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")  # its memory is not looked at


class LazyShard(Streamed):
    """This rank's part of a plain tree, made from it when it is needed."""

    def __init__(self, layout: Layout, tree: Tree) -> None:
        self._tree = tree
        foreseen = crossing() is not None and any(map(on_device, held_in(tree)))
        self.away = foreseen or self.home.type == "cuda"
        self._near = False
        leaves = leaves_of(layout, tree)
        dtypes: list[torch.dtype | None] = []
        for flat, slots in zip(layout.flats, layout.by_flat, strict=True):
            there = [x for slot in slots if (x := leaves[slot.index]) is not None]
            missing = None if slots else flat.dtype
            dtypes.append(torch.as_tensor(there[0]).dtype if there else missing)
        self.skeleton = outline(layout, dtypes, rank_in(layout))

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

    def in_memory(self) -> Any:
        """The tree as it would be without offload."""
        return packed(self.layout, self._tree) if self.layout.axis == () else self.sharded()

    def sharded(self) -> Sharded:
        return cut(self.layout, self._tree, self.group.rank, copy=True)


def assembled(layout: Layout, new: Tree) -> Streamed:
    """A tree put together from placed parts and plain leaves, sharded by ``layout``.

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
        return LazyShard(layout, new)
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
        complete = [i for i in mine if all(slot.index in pieces for slot in layout.by_flat[i])]
        return [part_of(layout, {i: assemble(layout, i, pieces, rank) for i in complete})]

    skeleton = outline(layout, [flat.dtype for flat in layout.flats], rank_in(layout))
    return _deferred(do, parts, skeleton, [-start for start in offsets])


registered(InMemory)
registered(LazyShard)
