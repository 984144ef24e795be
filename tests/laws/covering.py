"""Which combinations of a law's many axes are tried: each in turn, or all (``pytest --whole``).

A law that holds for 47 steps on 4 stages and 4 worlds has 752 instances, and an error is
almost always one of a stage, of a world or of a pair of them, whatever the step. So the suite
tries each step on every stage and in every world once, and goes through the pairs of stage
and world from step to step: a Latin square. Of more axes, ``pairs`` has every two values of any
two; ``each`` has every value of each, where another law has the pairs. ``--whole`` tries every
combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)


class Covering:
    """What ``--whole`` says; set by tests/conftest.py."""

    whole = False


def places(turn: int, worlds: tuple[int, ...] = WORLDS) -> list[tuple[int, int]]:
    """Pairs ``(stage, ranks)``: every stage and every world once, other pairs at the next turn.

    >>> places(0), places(1)
    ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2), (1, 3), (2, 4), (3, 1)])
    """
    if Covering.whole:
        return [(stage, ranks) for stage in STAGES for ranks in worlds]
    return [(stage, worlds[(stage + turn) % len(worlds)]) for stage in STAGES]


def half(turn: int) -> list[tuple[int, int]]:
    """Two of ``places(turn)``, the other two four turns later; with ``--whole`` all.

    For what changes no bit of steps that another law has in all of ``places``.

    >>> half(0), half(4)
    ([(0, 1), (2, 3)], [(1, 2), (3, 4)])
    """
    return places(turn) if Covering.whole else places(turn)[turn // 4 % 2 :: 2]


def each(*axes: Iterable[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Rows in which every value of every axis occurs, those of the longest as often as asked for.

    The others go along, one further whenever they begin anew. With ``--whole`` all rows. (Ammann
    and Offutt, Introduction to Software Testing, 2008: each choice coverage.)

    >>> each("abcd", (0, 1))
    [('a', 0), ('b', 1), ('c', 1), ('d', 0)]
    """
    values = [list(axis) for axis in axes]
    if Covering.whole:
        return list(product(*values))
    size = max(map(len, values))
    longest = next(k for k, axis in enumerate(values) if len(axis) == size)
    return [
        tuple(
            axis[i if k == longest else (i + i // len(axis) + turn * (k + 1)) % len(axis)]
            for k, axis in enumerate(values)
        )
        for turn in range(times)
        for i in range(size)
    ]


def turns(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names, and the turn of each: for ``pytest.mark.parametrize``."""
    return [(name, turn) for turn, name in enumerate(names)]


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of any two axes occur together; with ``--whole`` all rows.

    The two longest axes are multiplied, and the others go along in their turn. (Lei and Tai,
    In-Parameter-Order: a test generation strategy for pairwise testing, 1998.)

    >>> pairs("ab", (0, 1), (True, False))
    [('a', 0, True), ('a', 1, False), ('b', 0, False), ('b', 1, True)]
    """
    values = [list(axis) for axis in axes]
    if Covering.whole:
        return list(product(*values))
    order = sorted(range(len(values)), key=lambda k: -len(values[k]))
    sizes = [len(values[k]) for k in order]
    rows: list[list[int]] = [list(row) for row in product(*map(range, sizes[:2]))]
    for n, size in enumerate(sizes[2:], 2):
        rows = _longer(rows, sizes[:n], size)
    place = [order.index(k) for k in range(len(values))]
    chosen = (zip(values, (row[k] for k in place), strict=True) for row in sorted(rows))
    return [tuple(axis[i] for axis, i in row) for row in chosen]


def _longer(rows: list[list[int]], sizes: Sequence[int], size: int) -> list[list[int]]:
    """Rows with a value of one more axis, and some more rows for pairs that no row has then."""
    left = {(k, i, new) for k, n in enumerate(sizes) for i in range(n) for new in range(size)}
    for turn, row in enumerate(rows):
        found = {new: {(k, i, new) for k, i in enumerate(row)} for new in range(size)}
        new = max(found, key=lambda new: (len(found[new] & left), -((new - turn) % size)))
        left -= found[new]
        row.append(new)
    while left:
        k, i, new = min(left)
        row = [i if at == k else len(left) % n for at, n in enumerate(sizes)]
        left -= {(at, value, new) for at, value in enumerate(row)}
        rows.append([*row, new])
    return rows
