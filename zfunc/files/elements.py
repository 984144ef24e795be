"""Which elements of a flattened leaf a rank or a chunk has, and what two such sets share.

Elements lie one behind the other, or are the same part of each row of the leaf. Two sets share a
few blocks: rectangles of elements that one strided copy moves, however many rows they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.layout.splits import Strided
from zfunc.trees.nodes import Span

__all__ = ["Block", "Elements", "copy_blocks", "covers", "elements_of", "overlaps"]

SHOWN = 4  # runs that a name lists


class _Box(NamedTuple):
    """Columns of some rows of a leaf; ``at`` is the position of the first in the set it is of."""

    top: int
    bottom: int
    left: int
    right: int
    at: int
    step: int  # from row to row


@dataclass(frozen=True)
class Elements:
    """Elements ``start`` to ``stop`` of a flattened leaf, or of those of it that ``rows`` count.

    Strided begin at the leaf's first element.

    >>> print(Elements(1, 6, Strided(6, ((0, 2), (4, 5)))))
    1:6 in 0:2,4:5 of 6
    >>> list(Elements(1, 6, Strided(6, ((0, 2), (4, 5)))).intervals())
    [(1, 2), (4, 5), (6, 8), (10, 11)]
    """

    start: int
    stop: int
    rows: Strided | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        if self.rows is None:
            return f"{self.start}:{self.stop}"
        shown = [f"{low}:{high}" for low, high in self.rows.runs[:SHOWN]]
        shown += ["..."] * (len(self.rows.runs) > SHOWN)
        return f"{self.start}:{self.stop} in {','.join(shown)} of {self.rows.length}"

    @cached_property
    def simple(self) -> Elements:
        """The same as elements of the leaf, if they lie one behind the other."""
        if not len(self):
            return Elements(0, 0)
        low, high = self.bounds
        return Elements(low, high) if high - low == len(self) else self

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The first element of the leaf among them, and the one behind the last."""
        if self.rows is None or not len(self):
            return self.start, self.stop
        return self._at(self.start), self._at(self.stop - 1) + 1

    def _at(self, position: int) -> int:
        assert self.rows is not None
        return next(self.rows.intervals(position, position + 1))[0]

    def moved(self, by: int) -> Elements:
        """The same, so many elements of the leaf further on: whole rows, if there are rows."""
        if self.rows is not None:
            by = by // self.rows.length * self.rows.width
        return Elements(self.start + by, self.stop + by, self.rows)

    def part(self, start: int, stop: int) -> Elements:
        """Those of them from position ``start`` to ``stop``."""
        return Elements(self.start + start, self.start + stop, self.rows)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Where they lie in the leaf, as runs in order."""
        if self.rows is None:
            return iter([(self.start, self.stop)] if len(self) else [])
        return self.rows.intervals(self.start, self.stop)

    def boxes(self, length: int) -> list[_Box]:
        """The same as rectangles of rows of ``length``: a row begun, whole ones, one not ended."""
        runs = ((0, length),) if self.rows is None else self.rows.runs
        width = length if self.rows is None else self.rows.width
        found = []
        for top, bottom, first, last in _stretches(self.start, self.stop, width):
            position = 0
            for low, high in runs:
                a, b = max(first, position), min(last, position + high - low)
                if a < b:
                    shift, at = low - position, top * width + a - self.start
                    found.append(_Box(top, bottom, a + shift, b + shift, at, width))
                position += high - low
        return found


def _stretches(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Strided, and positions within each: of elements ``start`` to ``stop``, ``width`` a row."""
    if start >= stop:
        return
    (top, at), (bottom, end) = divmod(start, width), divmod(stop, width)
    if top == bottom:
        yield top, top + 1, at, end
        return
    if at:
        yield top, top + 1, at, width
        top += 1
    if top < bottom:
        yield top, bottom, 0, width
    if end:
        yield bottom, bottom + 1, 0, end


def elements_of(span: Span) -> Elements:
    """The elements of a span, whose rows may begin anywhere in the leaf.

    Raises:
        CheckpointError: they begin in the middle of a row.
    """
    rows = span.rows
    if rows is None:
        return Elements(span.start, span.stop)
    row, rest = divmod(rows.first, max(1, rows.length))
    if rest:
        raise CheckpointError(
            f"leaf {span.index} is cut in rows of {rows.length} elements, of which the first "
            f"begins at element {rows.first}: expected a multiple of their length"
        )
    start, stop = (x + row * rows.width for x in (span.start, span.stop))
    return Elements(start, stop, Strided(rows.length, rows.runs)).simple


class Block(NamedTuple):
    """A rectangle of elements that two sets share: where it begins in each, and steps of rows."""

    rows: int
    width: int
    first: int
    first_step: int
    second: int
    second_step: int


def overlaps(first: Elements, second: Elements) -> list[Block]:
    """What two sets share; positions count from each one's start.

    >>> overlaps(Elements(2, 12), Elements(0, 6, Strided(6, ((0, 2), (4, 5)))))
    [Block(rows=1, width=1, first=2, first_step=6, second=2, second_step=3), \
Block(rows=1, width=2, first=4, first_step=6, second=3, second_step=3), \
Block(rows=1, width=1, first=8, first_step=6, second=5, second_step=3)]
    """
    low = max(first.bounds[0], second.bounds[0])
    if low >= min(first.bounds[1], second.bounds[1]):
        return []
    if first.rows == second.rows:
        start, stop = max(first.start, second.start), min(first.stop, second.stop)
        shared = Block(1, stop - start, start - first.start, 0, start - second.start, 0)
        return [shared] if start < stop else []
    lengths = [x.rows.length for x in (first, second) if x.rows is not None]
    if len(set(lengths)) == 1:
        return _shared(first.boxes(lengths[0]), second.boxes(lengths[0]))
    if lengths[0] < lengths[1]:
        turned = overlaps(second, first)
        return [Block(x.rows, x.width, x[4], x[5], x[2], x[3]) for x in turned]
    return list(_by_interval(first, second))


def _by_interval(long: Elements, short: Elements) -> Iterator[Block]:
    """Strided of two lengths: runs of the longer ones have many of the shorter ones."""
    at = 0
    for low, high in long.intervals():
        for block in overlaps(Elements(low, high), short):
            yield block._replace(first=block.first + at)
        at += high - low


def _shared(first: Iterable[_Box], second: Sequence[_Box]) -> list[Block]:
    found = []
    for a in first:
        for b in second:
            top, bottom = max(a.top, b.top), min(a.bottom, b.bottom)
            left, right = max(a.left, b.left), min(a.right, b.right)
            if top < bottom and left < right:
                at, to = (x.at + (top - x.top) * x.step + left - x.left for x in (a, b))
                found.append(Block(bottom - top, right - left, at, a.step, to, b.step))
    return found


def copy_blocks(blocks: Iterable[Block], source: Tensor, target: Tensor) -> None:
    """Copy what two sets share from the 1-D values of the first to those of the second."""
    for x in blocks:
        into = _rectangle(target, x.rows, x.width, x.second, x.second_step)
        into.copy_(_rectangle(source, x.rows, x.width, x.first, x.first_step))


def _rectangle(values: Tensor, rows: int, width: int, at: int, step: int) -> Tensor:
    stride = values.stride(0)
    begin = int(values.storage_offset()) + at * stride
    return values.as_strided((rows, width), (step * stride, stride), begin)


def covers(numel: int, length: int, sets: Iterable[Elements]) -> bool:
    """Whether sets of elements, which may overlap, have together all of a leaf of whole rows.

    >>> half, rest = Elements(0, 2, Strided(4, ((0, 1),))), Elements(0, 6, Strided(4, ((1, 4),)))
    >>> covers(8, 4, [half, rest]), covers(8, 4, [half, rest.part(0, 5)])
    (True, False)
    """
    boxes = sorted(box for some in sets for box in some.boxes(length))
    bottom = numel // length
    if any(box.bottom > bottom for box in boxes):
        return False
    borders = sorted({0, bottom, *(x.top for x in boxes), *(x.bottom for x in boxes)})
    waiting, active = iter([*boxes, None]), list[_Box]()
    coming = next(waiting)
    for top, _ in pairwise(borders):
        active = [box for box in active if box.bottom > top]
        while coming is not None and coming.top == top:
            active.append(coming)
            coming = next(waiting)
        if not _reaches(active, length):
            return False
    return True


def _reaches(boxes: Iterable[_Box], length: int) -> bool:
    """Whether columns make up whole rows."""
    end = 0
    for left, right in sorted((box.left, box.right) for box in boxes):
        if left > end:
            return False
        end = max(end, right)
    return end == length
