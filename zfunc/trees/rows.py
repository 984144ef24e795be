"""Elements of a leaf that do not lie one behind the other: the same part of each of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows:
    """Of a flattened leaf, seen as rows, those elements that lie in some runs of each row.

    They are counted row by row, run by run: that numbering is what starts and stops beside a
    ``Rows`` mean.

    Attributes:
        length: elements of a row of the full leaf.
        runs: ``(start, stop)`` within a row, rising and apart.
        first: the element of the full leaf at which its first row begins.

    >>> rows = Rows(length=6, runs=((0, 2), (4, 5)))
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
