"""Which ranks check each other's headers, and so find out that they have parted."""

from __future__ import annotations

__all__ = ["DIRECT", "is_direct", "neighbours", "ring"]

DIRECT = 16  # the most ranks that connect each to each


def is_direct(size: int) -> bool:
    """Whether the ranks of a group of ``size`` send straight to each other."""
    return size <= DIRECT


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks that check each other's headers: everybody, or those beside it in a ring.

    Ranks in a ring that all agree with their neighbours agree. Each begins with the one to the
    right, so that nobody is everybody's first.

    >>> neighbours(1, 4), neighbours(0, 1024)
    ([2, 3, 0], [1, 1023])
    """
    if is_direct(size):
        return [(rank + step) % size for step in range(1, size)]
    return ring(rank, size)


def ring(rank: int, size: int) -> list[int]:
    """The ranks beside this one in a ring: two, or one in a pair.

    >>> ring(0, 3), ring(0, 2), ring(0, 1)
    ([1, 2], [1], [])
    """
    beside = dict.fromkeys([(rank + 1) % size, (rank - 1) % size])
    return [peer for peer in beside if peer != rank]
