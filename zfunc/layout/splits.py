"""How a leaf is split along one of its dimensions: which indices each rank of an axis has.

A :class:`Cut` is a user's rule, a :class:`Split` the table that follows from it, or from a module
that was probed: runs of indices for each rank. Fused weights take several runs, uneven heads runs
of several lengths, and key and value heads that are fewer than ranks stand on several of them. A
leaf that is stored as bytes (:class:`Encoded`) says itself what a part of it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from zfunc.buffers.uploads import on_device
from zfunc.errors import PlacementError
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group, even_cuts
from zfunc.ranks.meshes import Mesh

__all__ = ["Cut", "Encoded", "Encoding", "Part", "Runs", "Split", "Strided", "mark"]

Runs = tuple[tuple[int, int], ...]


class Encoding(Protocol):
    """What an encoded leaf is apart from its data: a static value, hashable."""

    shape: Any

    @property
    def bytes(self) -> int:
        """How many bytes it is stored in."""

    def read(self, data: Tensor) -> Any:
        """The leaf whose bytes lie in ``data``, 1-D uint8."""

    def resized(self, dim: int, size: int) -> Encoding:
        """That of a leaf with another size along a dimension."""


class Encoded:
    """A leaf that is cut and sent as the bytes that it is stored in (a low-bit tensor)."""

    def to_bytes(self) -> Tensor:
        """All that it holds, 1-D uint8."""
        raise NotImplementedError

    @property
    def code(self) -> Any:
        """An :class:`Encoding`."""
        raise NotImplementedError

    def grain(self, dim: int) -> int:
        """Of how many indices of a dimension a part must have all or none; 1 where any will do."""
        raise NotImplementedError

    def taken(self, dim: int, runs: Runs) -> Self:
        """Some indices of a dimension, in memory of their own; at borders that :meth:`grain` has.

        Args:
            dim: of the leaf that it stands for, counted from 0.
            runs: ``(start, stop)`` of indices, rising.
        """
        raise NotImplementedError

    def joined(self, parts: Sequence[Self], dim: int, runs: Sequence[Runs]) -> Self:
        """The leaf of which ``parts`` are the ones that :meth:`taken` gave for each of ``runs``."""
        raise NotImplementedError

    def summand(self, x: Tensor, ranks: Group) -> Tensor:
        """``x W^T``, where ranks have parts of what is summed over: this rank's summand.

        Inputs are prepared as for the whole product, about which ranks may have to agree.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Strided:
    """Of a flattened leaf, seen as rows, those elements that lie in some runs of each row.

    They are counted row by row, run by run: that numbering is what starts and stops beside a
    ``Strided`` mean.

    Attributes:
        length: elements of a row of the full leaf.
        runs: ``(start, stop)`` within a row, rising and apart.
        first: the element of the full leaf at which its first row begins.

    >>> rows = Strided(length=6, runs=((0, 2), (4, 5)))
    >>> list(rows.intervals(1, 6))
    [(1, 2), (4, 5), (6, 8), (10, 11)]
    """

    length: int
    runs: tuple[tuple[int, int], ...]
    first: int = 0

    @cached_property
    def width(self) -> int:
        """How many elements of each row are among them."""
        return sum(stop - start for start, stop in self.runs)

    def intervals(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where elements ``start`` to ``stop`` of them lie in the full leaf, as runs in order."""
        while start < stop:
            row, at = divmod(start, self.width)
            base = self.first + row * self.length
            for low, high in self.runs:
                size = high - low
                if at < size and start < stop:
                    taken = min(size - at, stop - start)
                    yield base + low + at, base + low + at + taken
                    start += taken
                    at = 0
                else:
                    at = max(0, at - size)


@dataclass(frozen=True)
class Split:
    """Which indices of a leaf's dimension ``dim``, which has ``size``, each rank has.

    >>> Split.of(0, [[0, 1, 4], [2, 3, 4]])
    Split(dim=0, size=5, runs=(((0, 2), (4, 5)), ((2, 5),)))
    """

    dim: int
    size: int
    runs: tuple[Runs, ...]

    @classmethod
    def of(cls, dim: int, indices: Sequence[Iterable[int]]) -> Split:
        """The table of the ranks' indices, of which together they have all."""
        rows = [sorted(set(row)) for row in indices]
        return cls(dim, max(row[-1] for row in rows if row) + 1, tuple(map(_runs, rows)))

    @property
    def ways(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    def width(self, rank: int) -> int:
        """How many indices a rank has."""
        return sum(stop - start for start, stop in self.runs[rank])

    def full(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the full leaf, from that of a part."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def shape(self, full: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's part, from that of the full leaf."""
        return (*full[: self.dim], self.width(rank), *full[self.dim + 1 :])

    def rows(self, shape: Sequence[int], rank: int, first: int = 0) -> Strided:
        """Which elements of the flattened full leaf a rank has, from the shape of any part."""
        inner = math.prod(shape[self.dim + 1 :])
        runs = tuple((start * inner, stop * inner) for start, stop in self.runs[rank])
        return Strided(self.size * inner, runs, first)

    def local(self, x: Any, rank: int) -> Any:
        """A rank's part of a full leaf; a view where that is one run."""
        runs = self.runs[rank] or ((0, 0),)
        if isinstance(x, Encoded):
            return x.taken(self.dim, runs)
        parts = [x.narrow(self.dim, start, stop - start) for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def indices(self, rank: int) -> list[int]:
        """A rank's indices, rising."""
        return [i for start, stop in self.runs[rank] for i in range(start, stop)]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each index the ranks that have it."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for rank in range(self.ways):
            for i in self.indices(rank):
                found[i].append(rank)
        return tuple(map(tuple, found))

    @cached_property
    def shared(self) -> bool:
        """Whether some indices stand on several ranks."""
        return sum(map(self.width, range(self.ways))) > self.size

    def owned(self, rank: int) -> list[int]:
        """Positions in a rank's part of the indices that no rank before it has."""
        return [at for at, i in enumerate(self.indices(rank)) if self.holders[i][0] == rank]

    def gathered(self, x: Any, ranks: Group, label: str) -> Any:
        """The full leaf from every rank's part; a collective."""
        if isinstance(x, Encoded):
            return self._gathered_bytes(x, ranks, label)
        outer, inner = math.prod(x.shape[: self.dim]), math.prod(x.shape[self.dim + 1 :])
        widths = [self.width(rank) for rank in range(self.ways)]
        ends = [0]
        for width in widths:
            ends.append(ends[-1] + outer * width * inner)
        every = x.new_empty(ends[-1])
        mine = x.detach().contiguous().view(-1)
        ranks.all_gather(every, mine, cuts=ends, label=label).wait()
        shapes = [self.shape(self.full(x.shape), rank) for rank in range(self.ways)]
        return self.joined(
            [every[a:b].view(s) for (a, b), s in zip(pairwise(ends), shapes, strict=True)]
        )

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The full leaf from all parts."""
        full = parts[0].new_empty(self.full(parts[0].shape))
        for part, runs in zip(parts, self.runs, strict=True):
            at = 0
            for low, high in runs:
                target = full.narrow(self.dim, low, high - low)
                target.copy_(part.narrow(self.dim, at, high - low))
                at += high - low
        return full

    def _gathered_bytes(self, x: Encoded, ranks: Group, label: str) -> Encoded:
        codes = [x.code.resized(self.dim, self.width(rank)) for rank in range(self.ways)]
        mine, ends = x.to_bytes(), [0, *accumulate(code.bytes for code in codes)]
        every = torch.empty(ends[-1], dtype=torch.uint8, device=mine.device)
        ranks.all_gather(every, mine, cuts=ends, label=label).wait()
        rows = zip(codes, pairwise(ends), strict=True)
        return x.joined([code.read(every[a:b]) for code, (a, b) in rows], self.dim, self.runs)


def _runs(indices: Sequence[int]) -> Runs:
    found: list[list[int]] = []
    for i in indices:
        if found and found[-1][1] == i:
            found[-1][1] += 1
        else:
            found.append([i, i + 1])
    return tuple((start, stop) for start, stop in found)


@dataclass(frozen=True)
class Cut:
    """A rule for leaves: along which dimension they are cut over the ranks of an axis.

    Attributes:
        dim: the dimension; -1 is the last one.
        parts: how many pieces lie side by side along it, each of which is cut: 3 for queries,
            keys and values in one weight.
        by: of how many equal, indivisible blocks each of them is made, heads say; of single
            indices if None. Fewer blocks than ranks raise.
        grain: pieces are cut at multiples of so many indices, the last part takes what is left: of
            weights that share a scale each has all or none. Give a row's to its columns, too.

    Raises:
        ValueError: a number is no integer, or one of blocks is less than 1.

    >>> Cut(0, parts=3, by=2).split((12, 5), ways=2).runs
    (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    >>> Cut(1, grain=32).split((5, 100), ways=2).runs
    (((0, 64),), ((64, 100),))
    """

    dim: int
    parts: int = 1
    by: int | None = None
    grain: int = 1

    def __post_init__(self) -> None:
        counts = self.parts, 1 if self.by is None else self.by, self.grain
        if any(type(x) is not int for x in (self.dim, *counts)) or min(counts) < 1:
            raise ValueError(
                f"{self}: expected a dimension, and parts=, by= and grain= of at least 1, all int."
            )

    def split(self, shape: Sequence[int], ways: int, path: str = "a leaf") -> Split:
        """The table for a leaf of this shape.

        Raises:
            PlacementError: there is no such dimension, or it does not fall into so many blocks.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise PlacementError(
                f"{path} has shape {tuple(shape)} and no dimension {self.dim}, by which {self} "
                "cuts it. Mend the rule."
            )
        dim = self.dim % len(shape)
        part, rest = divmod(shape[dim], self.parts)
        blocks = part if self.by is None else self.by
        if rest or not blocks or part % blocks:
            raise PlacementError(
                f"{path} has shape {tuple(shape)}: {shape[dim]} does not fall into {self.parts} x "
                f"{blocks} equal blocks, as {self} says. Mend parts= or by= of its rule."
            )
        step = part // blocks
        together = math.lcm(step, self.grain) // step
        count = -(-blocks // together)
        if count < ways:
            finer = " a smaller grain (of quantize a smaller group_size)," if self.grain > 1 else ""
            raise PlacementError(
                f"{path} falls into {count} blocks by {self}, and {ways} ranks are to have some. "
                f"Take at most {count} ranks along the axis,{finer} or leave it whole: rules="
                f"{{{path!r}: None}}."
            )
        ends = [min(blocks, end * together) for end in even_cuts(count, ways)]
        rows = [
            [i for k in range(self.parts) for i in range(k * part + a * step, k * part + b * step)]
            for a, b in pairwise(ends)
        ]
        return Split.of(dim, rows)


@dataclass(frozen=True)
class Part:
    """What a leaf is to the functions of a model: a part of the full one, or all of it.

    Attributes:
        split: which part; ``None`` for a leaf that every rank of the axis has whole.
        mesh, axis: over which ranks.
        plan: what a model needs to know to compute with such leaves, if it is a module.
    """

    split: Split | None
    mesh: Mesh | None
    axis: str
    plan: Any = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> Group:
        """The ranks among which leaves are split."""
        return group(self.mesh, self.axis)

    def counted(self, leaf: Tensor) -> Tensor:
        """Those elements of this rank's part that count when ranks add up, each of them once."""
        if self.split is None:
            return leaf if self.group.rank == 0 else leaf.reshape(-1)[:0]
        if not self.split.shared:
            return leaf
        owned = torch.tensor(self.split.owned(self.group.rank), dtype=torch.long)
        return leaf.index_select(self.split.dim, on_device(owned, leaf.device))

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' numbers, in place; a collective."""
        return self.group.all_reduce(x, label="sums of leaves").wait()


def mark(leaf: Tensor, part: Part) -> Tensor:
    """Let a leaf say of what it is a part, to the functions that it is given to."""
    leaf.__dict__["_zfunc_part"] = part
    return leaf
