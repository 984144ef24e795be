"""Values that one chunk computes and another one uses, and under which name they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zfunc.rehearsal.ghosts import Ghost, Recipe
from zfunc.rehearsal.plans import Label, Spec
from zfunc.rehearsal.results import flattened

__all__ = ["Crossing", "by_label", "is_made_by"]


class Crossing(NamedTuple):
    """A value that a chunk has and another one needs: by where layers meet it, or what made it."""

    known: Label | None
    made: Label | None
    home: int
    spec: Spec
    ghost: Ghost
    of: Sequence[Ghost]


def by_label(row: Mapping[Label, Crossing]) -> dict[Label, tuple[int, Spec]]:
    """What a chunk needs. Of ``norm(x)`` beside ``x`` it would make its own, if it were not to come
    as soon as that is made."""
    found: dict[Label, tuple[int, Spec]] = {}
    for x in row.values():
        others = {id(y.ghost.memory) for y in row.values() if y is not x}
        first = x.known is None or (x.made is not None and _is_made_of(x.of, others))
        label = x.made if first else x.known
        assert label is not None
        found.setdefault(label, (x.home, x.spec))
    return found


def _is_made_of(ghosts: Sequence[Ghost], memories: set[int]) -> bool:
    """Whether these, or what they were made of between layers, have one of the memories."""
    rest, seen = [*ghosts], set[int]()
    while rest:
        x = rest.pop()
        if id(x) not in seen:
            seen.add(id(x))
            if type(x) is Ghost:
                if id(x.memory) in memories:
                    return True
                rest += x.of
    return False


def is_made_by(recipe: Recipe | None, x: Ghost) -> bool:
    """Whether something is made of ``x``, a value made of parameters alone, each time anew."""
    rest, seen = [recipe], set[int]()
    while rest:
        if (made := rest.pop()) is not None and id(made) not in seen:
            seen.add(id(made))
            given = [y for y in flattened((made.args, made.kwargs))[0] if type(y) is Ghost]
            if any(y is x for y in given):
                return True
            rest += [y.recipe for y in given]
    return False
