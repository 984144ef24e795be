"""Which combinations of a law's many axes are tried: each in turn, or all (``pytest --whole``).

A law that holds for 47 steps on 4 stages and 4 worlds has 752 instances, and an error is
almost always one of a stage, of a world or of a pair of them, whatever the step. So the suite
tries each step on every stage and in every world once, and goes through the pairs of stage
and world from step to step: a Latin square. ``--whole`` tries every combination.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def turns(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names, and the turn of each: for ``pytest.mark.parametrize``."""
    return [(name, turn) for turn, name in enumerate(names)]
