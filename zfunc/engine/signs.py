"""What in a state shows which transforms have placed it.

Signs are structure, which no copy loses: the class of a node, what a layout says of its origin,
and what is carried in ``aux``. Transforms say here which are theirs; a step asks whose it finds.
"""

from __future__ import annotations

from typing import Any

from zfunc.engine import carried
from zfunc.engine.placement import Entries
from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.trees.nodes import OPAQUE, leaves_in

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
        if issubclass(kind, Readable | Replicated):
            for node in nodes:
                if type(node) is kind:
                    _note(found, node.layout)
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


def _note(found: dict[str, str], layout: Layout) -> None:
    if layout.by is not None:
        found[layout.by[0]] = layout.by[1]


def listed(found: dict[str, str]) -> str:
    """Who placed a state, in words."""
    return f"a step wrapped in {' and '.join(found.values())}" if found else "no transform"
