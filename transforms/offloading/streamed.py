"""Trees that are not in memory: computed with like others, evaluated later and unit by unit.

``zfunc.tree`` functions on a :class:`Streamed` node give a :class:`Deferred` one, an
expression: what to do with one unit's parts, and of which trees. What is done with a part is
just what ``Sharded`` does with a whole tree: a part *is* a ``Sharded`` node, of which the
flats of all other units are ``None``. So there is one meaning of ``map``, ``merge``, ... and an
elementwise kernel that rounds alike on whole and on cut buffers gives the same bits here.

A node's *skeleton* tells its structure without data: a ``Sharded`` node on ``meta``. It is
made by the same operations, so a tree that does not fit is refused at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import optree
import torch
from torch import Tensor

from zfunc.buffers.numbers import numbers_of
from zfunc.errors import PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import assemble, cut_flats, leaves_of
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import packed
from zfunc.layout.sharded import Sharded, cut
from zfunc.layout.streaming import spans_of_flat
from zfunc.ranks.comm import Group
from zfunc.transforms.offloading import evaluation
from zfunc.trees.nodes import NAMESPACE, Lazy, LeafInfo, Placed, Span, Tree, opened, register

__all__ = [
    "Cut",
    "Deferred",
    "Held",
    "Op",
    "Streamed",
    "assembled",
    "rank_in",
    "registered",
    "same_node",
    "source",
]

T = TypeVar("T", bound=type)
_SERIAL = itertools.count(1)
Parts = Sequence[Sharded]


def rank_in(layout: Layout) -> int:
    """The calling rank's place among those over which a layout is cut."""
    return Sharded(layout, ()).group.rank


class Streamed(Readable):
    """A placed tree of which one unit at a time is in memory.

    Attributes:
        skeleton: structure and layout, on ``meta``.
        computed: whether it is the result of an operation.
        serial: in which order the program put operations off.
        reads: whether its units have to be read.
        away: whether they are in the memory of a device.
        landing: of gradients that are on their way, what to wait for.
        squares: the leaves' sums of squares, if they are known already.
        device: where units are used; they are evaluated on the host.
    """

    streams = True
    resident = False
    computed = False
    serial = 0
    reads: ClassVar[bool] = False
    away = False
    landing: Any = None
    squares: Any = None
    device: torch.device = torch.device("cpu")
    index = 0
    skeleton: Sharded

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.skeleton.layout

    @property
    def group(self) -> Group:
        """The ranks among which the flats are cut."""
        return self.skeleton.group

    @property
    def origin(self) -> Any:
        """What is evaluated: an :class:`Op`, or the node itself."""
        return self

    def __repr__(self) -> str:
        total = sum(slot.numel for slot in self.layout.present)
        return f"{type(self).__name__}({total} elements in {len(self.layout.units)} units)"

    def held(self) -> Sequence[Tensor | None]:
        return ()

    def when(self, unit: int) -> int:
        """As the how manieth a unit is there: those that come first are evaluated first."""
        return 0

    def names(self) -> list[str]:
        return self.skeleton.names()

    def segments(self) -> list[list[tuple[str, int, int]]]:
        """As those of ``Sharded``."""
        return self.skeleton.segments()

    @property
    def num_leaves(self) -> int:
        return len(self.layout.slots)

    # Put off

    def map(self, f: Callable[..., Any], others: Sequence[Any]) -> Deferred:
        return self._over(
            others, lambda row, i, g: row[i].map(g, row), lambda row, i: row[i].map(f, row)
        )

    def map_leaves(self, f: Callable[..., Any], others: Sequence[Any], prefix: str) -> Deferred:
        return self._over(
            others,
            lambda row, i, g: row[i].map(g, row),
            lambda row, i: row[i].map_leaves(f, row, prefix),
        )

    def whole(self, f: Callable[..., Tensor], others: Sequence[Any]) -> Deferred:
        def do(parts: Parts, i: int) -> Sharded:
            there = [evaluation.on(part, self.device) for part in parts]  # a collective
            return evaluation.on(there[i].whole(f, there), torch.device("cpu"))

        return self._over(others, lambda row, i, g: row[i].map(g, row), do)

    def _over(self, others: Sequence[Any], plan: Any, do: Any) -> Deferred:
        """``do(parts, i)``, where argument ``i`` says what it means, as it would be in memory."""
        i = next(k for k, x in enumerate(others) if isinstance(x, Placed))
        row = self._sources(others, i)
        skeleton = plan([node.skeleton for node in row], i, lambda first, *rest: first)
        op = Op(lambda unit, parts: [do(parts, i)], row, skeleton.layout)
        return Deferred(op, 0, skeleton)

    def _sources(self, others: Sequence[Any], i: int) -> list[Streamed]:
        guide = others[i].layout
        return [source(x, guide) for x in others]

    def by_unit(
        self, f: Callable[..., Sequence[Any]], outs: int, others: Sequence[Any]
    ) -> list[Deferred]:
        i = next(k for k, x in enumerate(others) if isinstance(x, Placed))
        row = self._sources(others, i)
        guide = row[0].skeleton
        op = Op(lambda unit, parts: list(f(*parts)), row, guide.layout)
        return [Deferred(op, k, guide) for k in range(outs)]

    def select(self, keep: Callable[[str], bool]) -> Deferred:
        skeleton = self.skeleton.select(keep)
        return Deferred(
            Op(lambda unit, parts: [parts[0].select(keep)], [self], skeleton.layout), 0, skeleton
        )

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

        return Deferred(Op(do, [self], self.layout), 0, skeleton)

    def __getitem__(self, entry: Any) -> Streamed:
        skeleton = self.skeleton[entry]
        entries, children = self.layout.spec.entries(), self.layout.spec.children()
        at = entries.index(entry) if entry in entries else len(entries) + entry
        start = sum(child.num_leaves for child in children[:at])
        op = Op(lambda unit, parts: [parts[0][entry]], [self], skeleton.layout, [start])
        return Deferred(op, 0, skeleton)

    def join(self, params: Tree) -> evaluation.Joined:
        return evaluation.Joined(self, params)

    # Evaluated at once

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tree:
        return evaluation.sums(self, f)

    def full(self) -> Tree:
        return evaluation.full(self)

    def pieces(self) -> dict[int, Tensor]:
        return self.sharded().pieces()

    def reassembled(self, layout: Layout, new: Tree) -> Streamed:
        return assembled(layout, new)

    def sharded(self) -> Sharded:
        """The whole of this rank's part, in memory."""
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
        return evaluation.Evaluated(self, unit) if must else None


def _merge(a: Streamed, b: Streamed) -> Streamed:
    skeleton = a.skeleton.merge(b.skeleton)
    return Deferred(
        Op(lambda unit, parts: [parts[0].merge(parts[1])], [a, b], skeleton.layout), 0, skeleton
    )


class Op:
    """A function of one unit's parts, put off.

    Args:
        do: ``do(unit, parts) -> parts``, of one unit of ``layout``.
        sources: the trees whose parts it gets.
        layout: that of the results; its units are counted.
        shifts: for each source by how much its leaf indices differ from those of ``layout``.
    """

    computed = True
    reads = away = False
    landing = squares = None

    def __init__(
        self,
        do: Callable[[int, Parts], Sequence[Sharded]],
        sources: Sequence[Streamed],
        layout: Layout,
        shifts: Sequence[int] | None = None,
    ) -> None:
        self.do, self.sources, self.layout = do, tuple(sources), layout
        self.serial = next(_SERIAL)
        self._units = [
            _matching(layout, node.layout, shift)
            for node, shift in zip(sources, shifts or [0] * len(sources), strict=True)
        ]

    def when(self, unit: int) -> int:
        return 0

    def run(self, unit: int, parts: Parts) -> list[Sharded]:
        """The results of one unit, and ``None`` for all others."""
        return [_alone(part, unit) for part in self.do(unit, parts)]

    def needs(self, unit: int) -> list[list[int]]:
        """For each source the units of it of which a unit here is made."""
        return [units[unit] for units in self._units]


def _alone(part: Sharded, unit: int) -> Sharded:
    layout = part.layout
    flats: list[Tensor | None] = [None] * len(layout.flats)
    for i in layout.units[unit].flats:
        x = part.flats[i]
        empty = x is None and not layout.by_flat[i]
        flats[i] = torch.zeros(0, dtype=layout.flats[i].dtype) if empty else x
    return Sharded(layout, flats)


def _matching(layout: Layout, other: Layout, shift: int) -> list[list[int]]:
    """For each unit of a layout the units of another that hold its leaves."""
    if shift == 0 and layout.units == other.units:  # the same cut, perhaps of fewer leaves
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
    """One of the results of an :class:`Op`."""

    def __init__(self, op: Op, index: int, skeleton: Sharded) -> None:
        self.skeleton, self._op, self.index = skeleton, op, index
        tokens = {id(t): t for node in op.sources for t in node.held() if t is not None}
        self._tokens = tuple(tokens.values())
        used = (node.device for node in op.sources if node.device.type != "cpu")
        self.device = next(used, self.device)

    @property
    def origin(self) -> Op:
        return self._op

    def held(self) -> Sequence[Tensor | None]:
        return self._tokens


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
