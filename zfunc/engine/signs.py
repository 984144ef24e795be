"""What in a state shows which transforms have placed it.

Signs are structure, which no copy loses: the class of a node, what a layout says of its origin,
and what is carried in ``aux``. Transforms say here which are theirs; a step asks whose it finds.
"""

from __future__ import annotations

from typing import Any

from zfunc.engine import carried
from zfunc.engine.entries import Entries
from zfunc.errors import PlacementError
from zfunc.trees.nodes import OPAQUE, Box, Placed, leaves_in

__all__ = ["listed", "sign", "signs"]

_KINDS: dict[type, str] = {}


def sign(kind: type, name: str) -> None:
    """Say that a node of this class, or an entry of a state, shows the transform ``name``."""
    _KINDS[kind] = name


def signs(state: Any) -> dict[str, str]:
    """The transforms that placed a state, by name, and how each wrote itself if that is known.

    >>> signs({"params": 1})
    {}
    """
    found: dict[str, str] = {}
    nodes = leaves_in(state, OPAQUE)
    for kind in set(map(type, nodes)):
        if (owner := _KINDS.get(kind)) is not None:
            found[owner] = owner
        if issubclass(kind, Placed | Box):
            found.update(node.placed_by for node in nodes if type(node) is kind and node.placed_by)
    try:
        entries = Entries(state)
    except PlacementError:  # a params tree by itself, or whatever a bare step may be given
        return found
    for name in entries.names:
        entry = entries[name]
        if (wrapped := _KINDS.get(type(entry))) is not None:
            found[wrapped] = wrapped
    for name in carried.names(entries):
        found.setdefault(name, name)
    return found


def listed(found: dict[str, str]) -> str:
    """Who placed a state, in words."""
    return f"a step wrapped in {' and '.join(found.values())}" if found else "no transform"
