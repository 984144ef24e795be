"""Rows in which every two values of any two axes occur together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

__all__ = ["pairwise_rows"]

Row = tuple[Any, ...]


def pairwise_rows(
    axes: Sequence[Sequence[Any]],
    cost: Callable[[Row], float],
    tries: int = 60,
    allowed: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Few rows, the same ones whenever it is called.

    Args:
        axes: the values of each axis.
        cost: of a row; what is dear comes where nothing else is left to try.
        tries: how many rows are drawn for each that is taken.
        allowed: whether there is such a row; a pair in none of those drawn is left out.

    >>> rows = pairwise_rows([(0, 1), "ab", (True, False)], lambda row: 1.0)
    >>> len(rows) < 8, {(a, b) for a, b, _ in rows} == {(0, "a"), (0, "b"), (1, "a"), (1, "b")}
    (True, True)
    """
    chance = random.Random(0)
    left = {*_pairs_of(axes)}
    rows = []
    while left:
        pairs = [chance.choice(sorted(left, key=repr)) for _ in range(tries)]
        drawn = [row for pair in pairs if allowed(row := _drawn(axes, pair, chance))]
        if not drawn:
            left.discard(pairs[0])
            continue
        row = max(drawn, key=lambda row: len(left & {*_pairs(row)}) / cost(row))
        left -= {*_pairs(row)}
        rows.append(row)
    return rows


Pair = tuple[tuple[int, Any], tuple[int, Any]]


def _pairs(row: Row) -> Iterator[Pair]:
    yield from combinations(enumerate(row), 2)


def _pairs_of(axes: Sequence[Sequence[Any]]) -> Iterator[Pair]:
    for (a, mine), (b, theirs) in combinations(enumerate(axes), 2):
        yield from (((a, x), (b, y)) for x in mine for y in theirs)


def _drawn(axes: Sequence[Sequence[Any]], pair: Pair, chance: random.Random) -> Row:
    fixed = dict(pair)
    return tuple(fixed.get(i, chance.choice(axis)) for i, axis in enumerate(axes))
