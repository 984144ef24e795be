"""Many leaves as few buffers: what an elementwise update takes at once.

An update of a leaf of a few elements costs more to begin than to do, on a CPU and on a GPU. The
leaves of a placed state lie in flats: those are updated, padding included. Other small leaves are
copied beside each other.

An element must come out with the same bits wherever it lies. CPU kernels round the last elements
of a buffer, those that do not fill a vector, in another way than the rest, so they are given
whole blocks of 64 elements only; the ends of large leaves travel with the small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zfunc.trees.kinds import kind

__all__ = ["BLOCK", "SMALL", "Joined", "Launch", "Row", "Stretch", "joined", "parted", "runs"]

BLOCK = 64
SMALL = 1 << 14  # elements up to which a leaf is copied beside others

Row = tuple[Tensor, ...]
Stretch = tuple[int, int, float]


@dataclass(frozen=True)
class Joined:
    """Leaves, the small ones of them in memory together.

    Attributes:
        alone: rows of large leaves.
        rates: their decay.
        together: rows of new buffers with the small ones.
        common: the decay of each of these.
        order: which leaves they are: of ``alone``, then of each buffer.
    """

    alone: list[Row]
    rates: list[float]
    together: list[Row]
    common: list[float]
    order: list[list[int]]
    shapes: list[torch.Size]

    def leaves(self, alone: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Columns of leaves: those ``alone`` as given, the others out of the buffers."""
        out = []
        for k, column in enumerate(alone):
            leaves = dict(zip(self.order[0], column, strict=True))
            for row, some in zip(self.together, self.order[1:], strict=True):
                sizes = [self.shapes[i].numel() for i in some]
                flat = row[k and k + 1]  # parameters, then moments; not gradients
                for i, part in zip(some, _copies(flat[: sum(sizes)], sizes), strict=True):
                    leaves[i] = part if len(self.shapes[i]) == 1 else part.view(self.shapes[i])
            out.append([leaves[i] for i in range(len(self.shapes))])
        return out


def _copies(flat: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The parts of a buffer, in memory of their own: who keeps or saves one, keeps that one."""
    if kind(flat.device) == "cpu":
        copied: list[Tensor] = torch.ops.aten.split_with_sizes_copy(flat, sizes)
        return copied
    parts = flat.split(sizes)
    copies = [torch.empty_like(part) for part in parts]
    torch._foreach_copy_(copies, list(parts))
    return copies


def joined(rows: Sequence[Row], rates: Sequence[float]) -> Joined:
    """Copies of small leaves side by side, of each device, dtype and decay."""
    alone: list[int] = []
    groups: dict[tuple[torch.device, torch.dtype, float], list[int]] = {}
    for i, (row, rate) in enumerate(zip(rows, rates, strict=True)):
        if row[0].numel() > SMALL:
            alone.append(i)
        else:
            groups.setdefault((row[0].device, row[0].dtype, rate), []).append(i)
    together = [_side_by_side([rows[i] for i in some]) for some in groups.values()]
    return Joined(
        [rows[i] for i in alone],
        [rates[i] for i in alone],
        together,
        [rate for *_, rate in groups],
        [alone, *groups.values()],
        [row[0].shape for row in rows],
    )


def _side_by_side(rows: Sequence[Row]) -> Row:
    """New buffers with the elements of all rows, up to a multiple of 64."""
    short = -sum(row[0].numel() for row in rows) % BLOCK
    pads = [x.new_zeros(short) for x in rows[0]]
    columns = zip(*rows, pads, strict=True)
    return tuple(torch._C._nn.flatten_dense_tensors(list(column)) for column in columns)


def runs(starts: Sequence[tuple[int, float]], length: int) -> Iterator[Stretch]:
    """``(start, stop, value)`` of the stretches of equal value in a buffer.

    >>> list(runs([(0, 0.1), (64, 0.1), (128, 0.0)], 192))
    [(0, 128, 0.1), (128, 192, 0.0)]
    """
    changes = [x for i, x in enumerate(starts) if i == 0 or x[1] != starts[i - 1][1]]
    stops = [start for start, _ in changes[1:]] + [length]
    for (start, value), stop in zip(changes, stops, strict=False):
        yield start, stop, value


def parted(row: Row, stretches: Sequence[Stretch]) -> Iterator[tuple[Row, float]]:
    """The parts of a row that decay alike; what is empty is left out."""
    if len(stretches) == 1:
        start, stop, rate = stretches[0]
        if start < stop:
            yield row if stop - start == row[0].numel() else _cut(row, start, stop), rate
        return
    for start, stop, rate in stretches:
        if start < stop:
            yield _cut(row, start, stop), rate


def _cut(row: Row, start: int, stop: int) -> Row:
    return tuple(x.view(-1)[start:stop] for x in row)


@dataclass
class Launch:
    """Buffers for one launch: those updated in place, and leaves and ends that are staged."""

    rows: list[Row] = field(default_factory=list)
    ends: list[Row] = field(default_factory=list)
    staged: Row = ()
    on_cpu: bool | None = None  # unknown before there are some

    def add(self, row: Row) -> None:
        """Another buffer ``(param, grad, *moments)``."""
        if self.on_cpu is None:
            self.on_cpu = kind(row[0].device) == "cpu"
        size = row[0].numel()
        whole = not size % BLOCK
        small = size <= SMALL and not (self.on_cpu and whole)
        if small or not all(x.is_contiguous() for x in row):
            self.ends.append(row)
            return
        if whole or not self.on_cpu:
            self.rows.append(row)
            return
        cut = size - size % BLOCK
        self.rows.append(_cut(row, 0, cut))
        self.ends.append(_cut(row, cut, size))

    def stage(self) -> list[Row]:
        """What the kernel is to update: the blocks, and the ends in one padded buffer."""
        if not self.ends:
            return self.rows
        self.staged = _side_by_side(self.ends)
        return [*self.rows, self.staged]

    def unstage(self) -> None:
        """Copy the updated ends back."""
        sizes = [row[0].numel() for row in self.ends]
        for i, flat in enumerate(self.staged):
            if i != 1:
                parts = flat[: sum(sizes)].split(sizes)
                targets = [row[i] for row in self.ends]
                pairs = zip(parts, targets, strict=True)
                torch._foreach_copy_(targets, [x.view(y.shape) for x, y in pairs])
