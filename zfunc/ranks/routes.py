"""Who sends what to whom in a collective between the memories of hosts, and how many bytes.

In a group of up to ``adjacency.DIRECT`` ranks each sends straight to every other: one round, and
sums in rank order. In a larger group that would take a connection to every other rank. There a rank
has some 2 log2(N) partners in as many rounds, by recursive halving and doubling, which sends no
more bytes (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005). A number of ranks that is no power of two is folded to one first: the first ranks
pair up.

Everything here is arithmetic on a rank and a number of ranks, so the traffic of a thousand ranks
can be computed by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import TypeVar

from zfunc.ranks.adjacency import is_direct, neighbours
from zfunc.ranks.comm import even_cuts

__all__ = [
    "Cube",
    "all_gather_bytes",
    "all_reduce_bytes",
    "broadcast_bytes",
    "children",
    "goes_whole",
    "headers_each",
    "parent",
    "reduce_scatter_bytes",
    "summed",
]

# Up to here an all-reduce exchanges whole tensors, beyond it segments in two rounds. Between two
# ranks both send the same bytes, so one round has less to wait for. Of a large tensor it leaves all
# to the network at once: on a slow link one way then falls behind the other, and a step takes as
# long as the slower one.
WHOLE_BYTES, WHOLE_BYTES_OF_TWO = 2**10, 2**19

T = TypeVar("T")


@dataclass(frozen=True)
class Cube:
    """Where one rank of a large group stands in the hypercube that the ranks are folded to.

    The first ``2 * extra`` ranks make ``extra`` pairs; each pair, and each rank after them, is a
    corner. The odd rank of a pair hands its data to the even one before, and gets the result
    after. Corners are in rank order, so those that share their high bits own one stretch of every
    tensor that is sharded over the ranks.

    >>> Cube(3, 20).twin, Cube(2, 20).twin, Cube(19, 20).twin
    (2, 3, None)
    """

    rank: int
    size: int

    @property
    def corners(self) -> int:
        """How many there are: the largest power of two that is not above the number of ranks."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """How many ranks there are more than corners."""
        return self.size - self.corners

    @property
    def corner(self) -> int:
        """The corner of this rank."""
        return self.rank // 2 if self.rank < 2 * self.extra else self.rank - self.extra

    @property
    def twin(self) -> int | None:
        """The other rank at this corner."""
        return self.rank ^ 1 if self.rank < 2 * self.extra else None

    @property
    def folded(self) -> bool:
        """Whether the twin acts for this rank."""
        return self.twin is not None and self.rank % 2 == 1

    def first(self, corner: int) -> int:
        """The first rank of a corner, which acts for it; the number of ranks behind the last."""
        return 2 * corner if corner < self.extra else corner + self.extra

    def stretch(self, cuts: Sequence[int], low: int, high: int) -> tuple[int, int]:
        """The bounds of what the corners from ``low`` to ``high`` own of a sharded tensor."""
        return cuts[self.first(low)], cuts[self.first(high)]

    def rounds(self) -> list[int]:
        """The distances between partners, far ones first."""
        return [1 << bit for bit in reversed(range(self.corners.bit_length() - 1))]

    def partner(self, distance: int) -> int:
        """The rank that this one exchanges with at a distance."""
        return self.first(self.corner ^ distance)

    def halves(self, distance: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The corners on this rank's side in a round, and on its partner's."""
        low = self.corner - self.corner % (2 * distance)
        sides = (low, low + distance), (low + distance, low + 2 * distance)
        return sides if self.corner < low + distance else (sides[1], sides[0])

    def partners(self) -> list[int]:
        """Every rank that this one exchanges data with in reductions and gathers.

        >>> len(Cube(0, 1024).partners()), Cube(3, 1000).partners()
        (10, [2])
        """
        if self.folded:
            return [self.rank - 1]
        beside = [] if self.twin is None else [self.twin]
        return beside + [self.partner(distance) for distance in self.rounds()]


def parent(rank: int, size: int, src: int) -> int | None:
    """The rank from which this one gets what ``src`` broadcasts, in a binomial tree.

    >>> [parent(rank, 20, 0) for rank in range(7)]
    [None, 0, 0, 2, 0, 4, 4]
    """
    at = (rank - src) % size
    if at == 0:
        return None
    return src if is_direct(size) else (at - (at & -at) + src) % size


def children(rank: int, size: int, src: int) -> list[int]:
    """The ranks to which this one hands on what ``src`` broadcasts, the deepest branch first.

    >>> children(0, 20, 0), children(16, 20, 0), children(3, 20, 0)
    ([16, 8, 4, 2, 1], [18, 17], [])
    """
    if is_direct(size):
        return neighbours(rank, size) if rank == src else []
    at = (rank - src) % size
    top = (at & -at) if at else 1 << (size - 1).bit_length()
    steps = []
    while top := top >> 1:
        if at + top < size:
            steps.append((at + top + src) % size)
    return steps


def summed(parts: Sequence[T]) -> T:
    """Add in the order in which ranks of a group of this size do; the parts stay as they are.

    A direct group adds in rank order. In a larger one partners add what they hold, so the order
    is another one, but the same on every rank and for every element.

    >>> summed([1.0, 2.0, 3.0])
    6.0
    """
    left = list(parts)
    if not is_direct(len(left)):
        cube = Cube(0, len(left))
        left = [reduce(add, left[cube.first(c) : cube.first(c + 1)]) for c in range(cube.corners)]
        for distance in cube.rounds():
            left = [add(left[c], left[c + distance]) for c in range(distance)]
    return reduce(add, left)


# Payload bytes that one rank sends.


def all_gather_bytes(cuts: Sequence[int], itemsize: int, rank: int, size: int) -> int:
    """In an all-gather of segments with these offsets.

    >>> all_gather_bytes(range(1025), 4, 7, 1024) == 4 * 1023
    True
    """
    if is_direct(size):
        return (cuts[rank + 1] - cuts[rank]) * itemsize * (size - 1)
    cube = Cube(rank, size)
    if cube.folded:
        return (cuts[rank + 1] - cuts[rank]) * itemsize
    sent = sum(_length(cube, cuts, cube.halves(distance)[0]) for distance in cube.rounds())
    return (sent + (0 if cube.twin is None else cuts[-1])) * itemsize


def reduce_scatter_bytes(cuts: Sequence[int], itemsize: int, rank: int, size: int) -> int:
    """In a reduce-scatter to segments with these offsets.

    >>> reduce_scatter_bytes(range(1025), 4, 7, 1024) == 4 * 1023
    True
    """
    if is_direct(size):
        return (cuts[-1] - cuts[rank + 1] + cuts[rank]) * itemsize
    cube = Cube(rank, size)
    if cube.folded:
        return cuts[-1] * itemsize
    sent = sum(_length(cube, cuts, cube.halves(distance)[1]) for distance in cube.rounds())
    given = 0 if cube.twin is None else cuts[cube.twin + 1] - cuts[cube.twin]
    return (sent + given) * itemsize


def all_reduce_bytes(numel: int, itemsize: int, rank: int, size: int) -> int:
    """In an all-reduce of ``numel`` elements."""
    nbytes = numel * itemsize
    if goes_whole(nbytes, size):
        if is_direct(size):
            return nbytes * (size - 1)
        return nbytes * len(Cube(rank, size).partners())
    cuts = even_cuts(numel, size)
    scattered = reduce_scatter_bytes(cuts, itemsize, rank, size)
    return scattered + all_gather_bytes(cuts, itemsize, rank, size)


def broadcast_bytes(nbytes: int, rank: int, size: int, src: int) -> int:
    """In a broadcast of ``nbytes`` from ``src``."""
    return nbytes * len(children(rank, size, src))


def exchange_bytes(lengths: Sequence[int], rank: int, size: int) -> int:
    """In an exchange of objects of these lengths, once written.

    A large group gathers the lengths first: 8 bytes from each.
    """
    if is_direct(size):
        return lengths[rank] * (size - 1)
    told = all_gather_bytes(range(size + 1), 8, rank, size)
    return told + all_gather_bytes(offsets(lengths), 1, rank, size)


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where parts of these lengths begin, and the end.

    >>> offsets([2, 0, 3])
    [0, 2, 2, 5]
    """
    return list(accumulate(lengths, initial=0))


def headers_each(kind: str, nbytes: int, size: int) -> int:
    """How many headers a collective of the host sends each neighbour: one begins a second round.

    >>> headers_each("all_gather", 10**6, 4), headers_each("all_reduce", 10**6, 4)
    (1, 2)
    """
    twice = kind == "all_reduce" and is_direct(size) and not goes_whole(nbytes, size)
    return 2 if twice else 1


def goes_whole(nbytes: int, size: int) -> bool:
    """Whether an all-reduce exchanges whole tensors instead of segments."""
    return nbytes <= (WHOLE_BYTES_OF_TWO if size == 2 else WHOLE_BYTES)


def _length(cube: Cube, cuts: Sequence[int], corners: tuple[int, int]) -> int:
    low, high = cube.stretch(cuts, *corners)
    return high - low
