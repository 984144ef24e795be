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

import torch
from torch import Tensor

from zfunc.comm import Group
from zfunc.errors import PlacementError
from zfunc.nodes import LeafInfo, Placed, Span, Tree, register
from zfunc.placed.layout import Layout
from zfunc.placed.readable import Readable
from zfunc.placed.sharded import Sharded
from zfunc.placed.streaming import spans_of_flat

__all__ = ["Deferred", "Op", "Streamed", "rank_in", "registered", "same_node"]

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
        reads: whether its units have to be read.
        away: whether they are in the memory of a device.
        landing: of gradients that are on their way, what to wait for.
        squares: the leaves' sums of squares, if they are known already.
        device: where units are used; they are evaluated on the host.
    """

    streams = True
    resident = False
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
        return [sources.source(x, guide) for x in others]

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
        return self if other is None else _merge(self, sources.source(other, self.layout))

    def beneath(self, other: Any) -> Streamed:
        return _merge(sources.source(other, self.layout), self)

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

    def sharded(self) -> Sharded:
        """The whole of this rank's part, in memory."""
        return evaluation.gathered_up(self)

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

# What follows needs the classes above.
from zfunc.placed import evaluation, sources  # noqa: E402
