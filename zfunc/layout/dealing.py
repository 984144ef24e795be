"""Work on full leaves, each done on one rank: pieces travel there, and of the result come back.

What needs a whole matrix (Muon) costs more than the elementwise rest of an optimizer, so ranks
share it. Leaves are dealt out by cost. A leaf's pieces go first to the rank that has it among those
over which flats are cut, then, if leaves are split, to the one that has it among those; results
take the same way back. Each way is one exchange for all leaves of a dtype, and a rank sends and
receives about as much as it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc.layout.pieces import assemble_all
from zfunc.layout.sharded import Sharded
from zfunc.layout.splits import Split
from zfunc.ranks.axes import alone
from zfunc.ranks.comm import Group
from zfunc.trees.marks import part_of

__all__ = ["dealt", "dealt_leaves", "dealt_out"]

Cost = Callable[[tuple[int, ...]], float]
Work = Callable[[Tensor], Tensor]
Span = tuple[int, int]


def dealt_out(costs: Sequence[float], able: Sequence[Iterable[int]]) -> list[int]:
    """Whose each piece of work is: the longest first, each to the rank that has least so far.

    Args:
        costs: of each piece.
        able: the ranks that may have it.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies, 1969: where every rank may have
    all, none has more than 4/3 of what the best way gives the fullest.

    >>> dealt_out([3.0, 1.0, 1.0, 2.0], [range(2)] * 4)
    [0, 1, 0, 1]
    """
    owners, load = [0] * len(costs), dict[int, float]()
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(able[i], key=lambda rank: (load.get(rank, 0.0), rank))
        load[owners[i]] = load.get(owners[i], 0.0) + costs[i]
    return owners


def dealt(node: Sharded, work: Work, cost: Cost) -> Sharded:
    """``work`` of every full leaf, each on one of the ranks that share the tree; a collective.

    Args:
        node: the leaves.
        work: from a full leaf to one of its shape.
        cost: of ``work``, by the shape of the full leaf.

    Returns:
        The results, cut as ``node`` is.
    """
    layout, ranks, parts = node.layout, node.group, node.layout.parts
    slots = [slot for slot in layout.present if node.flats[slot.flat] is not None]
    bounds = [[flat.bounds(rank) for rank in range(ranks.size)] for flat in layout.flats]
    able = [
        [rank for rank, (start, stop) in enumerate(row) if start < stop] or [0] for row in bounds
    ]
    leaves = [_Dealt(s.index, s.shape, s.split, layout.flats[s.flat].whole) for s in slots]
    spans = [{s.index: (0, 0) for s in slots} for _ in range(ranks.size)]
    for flat in {slot.flat for slot in slots}:
        for rank, held in enumerate(spans):
            for slot, a, b, offset in layout.segments(flat, rank):
                held[slot.index] = (offset, offset + b - a)
    every = _Deal(ranks, parts, spans)
    out = every.done(leaves, [able[s.flat] for s in slots], node.pieces(), work, cost)
    return Sharded(layout, assemble_all(layout, out, ranks.rank))


def dealt_leaves(leaves: Sequence[Tensor], work: Work, cost: Cost, copies: Group) -> list[Tensor]:
    """``work`` of every leaf, each on one of ``copies``, which all have the same; a collective.

    Leaves that are split over ranks (``zf.split``) are parts of the full ones of which it is done.
    """
    marks = [part_of(x) for x in leaves]
    parts = next((mark.group for mark in marks if mark is not None), alone())
    rows = [
        _Dealt(i, tuple(x.shape), None if mark is None else mark.split, True)
        for i, (x, mark) in enumerate(zip(leaves, marks, strict=True))
    ]
    spans = [{i: (0, x.numel()) for i, x in enumerate(leaves)}] * copies.size
    able = [range(copies.size)] * len(leaves)
    pieces = dict(enumerate(leaves))
    found = _Deal(copies, parts, spans).done(rows, able, pieces, work, cost)
    return [found[i].view(x.shape) for i, x in enumerate(leaves)]


@dataclass(frozen=True)
class _Dealt:
    """A leaf: its index, this rank's part of it, and whether all ranks hold all of that part."""

    index: int
    shape: tuple[int, ...]
    split: Split | None
    whole: bool

    @property
    def full(self) -> tuple[int, ...]:
        return self.shape if self.split is None else self.split.full(self.shape)

    def numel(self, part: int) -> int:
        shape = self.shape if self.split is None else self.split.shape(self.full, part)
        return torch.Size(shape).numel()

    def part(self, full: Tensor, part: int) -> Tensor:
        found: Tensor = full if self.split is None else self.split.local(full, part)
        return found.reshape(-1)


@dataclass(frozen=True)
class _Deal:
    """The ranks that share work: those over which flats are cut, times those that have parts.

    Attributes:
        ranks: they have pieces of the same parts.
        parts: they have parts of the same leaves.
        spans: of each of ``ranks``, by leaf index, which elements of the part it holds.
    """

    ranks: Group
    parts: Group
    spans: Sequence[Mapping[int, Span]]

    def done(
        self,
        leaves: Sequence[_Dealt],
        able: Sequence[Iterable[int]],
        pieces: Mapping[int, Tensor],
        work: Work,
        cost: Cost,
    ) -> dict[int, Tensor]:
        """This rank's pieces of the results, by leaf index."""
        width, kinds = self.parts.size, defaultdict[tuple[object, object], list[_Dealt]](list)
        may = [[rank * width + part for rank in row for part in range(width)] for row in able]
        owners = dict(
            zip(
                [leaf.index for leaf in leaves],
                dealt_out([cost(leaf.full) for leaf in leaves], may),
                strict=True,
            )
        )
        for leaf in leaves:
            kinds[pieces[leaf.index].dtype, pieces[leaf.index].device].append(leaf)
        out: dict[int, Tensor] = {}
        for row in kinds.values():
            none = pieces[row[0].index].new_empty(0)
            by_rank = [[x for x in row if owners[x.index] // width == r] for r in self._all]
            mine = self._to_owner(by_rank, pieces, none)
            by_part = [
                [x for x in by_rank[self.ranks.rank] if owners[x.index] % width == k]
                for k in range(width)
            ]
            full = self._to_one_part(by_part, mine, none)
            results = {i: work(x) for i, x in full.items()}
            back = self._to_parts(by_part, results, none)
            out |= self._to_holders(by_rank, back, none)
        return out

    @property
    def _all(self) -> range:
        return range(self.ranks.size)

    # Among the ranks over which flats are cut

    def _to_owner(
        self, owned: Sequence[Sequence[_Dealt]], pieces: Mapping[int, Tensor], none: Tensor
    ) -> dict[int, Tensor]:
        """This rank's parts of the leaves that it or a rank with other parts of them owns."""

        def asked(owner: int, holder: int) -> list[_Dealt]:
            return [x for x in owned[owner] if owner == holder or not x.whole]

        here = self.ranks.rank
        sent = [[pieces[x.index] for x in asked(rank, here)] for rank in self._all]
        coming = [asked(here, rank) for rank in self._all]
        sizes = [[self._held(x, rank) for x in row] for rank, row in enumerate(coming)]
        if all(x.whole for row in owned for x in row):
            return {x.index: pieces[x.index].view(x.shape) for x in owned[here]}
        came = _exchanged(self.ranks, sent, sizes, "leaves to their owners", none)
        found: dict[int, list[Tensor]] = defaultdict(list)
        for row, arrived in zip(coming, came, strict=True):
            for leaf, piece in zip(row, arrived, strict=True):
                found[leaf.index].append(piece)
        return {x.index: torch.cat(found[x.index]).view(x.shape) for x in owned[here]}

    def _held(self, leaf: _Dealt, rank: int) -> int:
        start, stop = self.spans[rank][leaf.index]
        return stop - start

    def _to_holders(
        self, owned: Sequence[Sequence[_Dealt]], mine: Mapping[int, Tensor], none: Tensor
    ) -> dict[int, Tensor]:
        """Of each result this rank's piece, from its owner."""
        here = self.ranks.rank
        sent = [
            [mine[x.index].reshape(-1)[slice(*spans[x.index])] for x in owned[here]]
            for spans in self.spans
        ]
        sizes = [[self._held(x, here) for x in row] for row in owned]
        came = _exchanged(self.ranks, sent, sizes, "results to their holders", none)
        return _by_index(owned, came)

    # Among the ranks over which leaves are split

    def _to_one_part(
        self, owned: Sequence[Sequence[_Dealt]], mine: Mapping[int, Tensor], none: Tensor
    ) -> dict[int, Tensor]:
        """The full leaves that this rank owns."""
        own = owned[self.parts.rank]
        split = [x for x in own if x.split is not None]
        sent = [[mine[x.index] for x in row if x.split is not None] for row in owned]
        sizes = [[x.numel(part) for x in split] for part in range(self.parts.size)]
        came = _exchanged(self.parts, sent, sizes, "parts to their owners", none)
        full = {x.index: mine[x.index] for x in own}
        for at, leaf in enumerate(split):
            assert leaf.split is not None
            shapes = [leaf.split.shape(leaf.full, part) for part in range(self.parts.size)]
            rows = [row[at].view(shape) for row, shape in zip(came, shapes, strict=True)]
            full[leaf.index] = leaf.split.joined(rows)
        return full

    def _to_parts(
        self, owned: Sequence[Sequence[_Dealt]], results: Mapping[int, Tensor], none: Tensor
    ) -> dict[int, Tensor]:
        """This rank's parts of the results of all ranks that have parts of the same leaves."""
        here, own = self.parts.rank, owned[self.parts.rank]
        sent = [[x.part(results[x.index], part) for x in own] for part in range(self.parts.size)]
        sizes = [[x.numel(here) for x in row] for row in owned]
        return _by_index(owned, _exchanged(self.parts, sent, sizes, "results to parts", none))


def _by_index(
    rows: Sequence[Sequence[_Dealt]], tensors: Sequence[Sequence[Tensor]]
) -> dict[int, Tensor]:
    pairs = zip(rows, tensors, strict=True)
    return {leaf.index: x for row, xs in pairs for leaf, x in zip(row, xs, strict=True)}


def _exchanged(
    ranks: Group,
    pieces: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    label: str,
    none: Tensor,
) -> list[list[Tensor]]:
    """``pieces[r]`` sent to rank r; from each rank what it has sent, in pieces of ``sizes``."""
    if ranks.size == 1:
        return [[x.reshape(-1) for x in pieces[0]]]
    chunks = [torch.cat([x.reshape(-1) for x in row]) if row else none for row in pieces]
    came = ranks.all_to_all(chunks, sizes=[sum(row) for row in sizes], label=label).wait()
    return [list(x.split(list(row))) for x, row in zip(came, sizes, strict=True)]
