"""The top-level entries of a state by name, whatever container it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree

from zfunc.errors import PlacementError
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE

__all__ = ["Entries", "held_bytes"]


class Entries:
    """The top-level entries of a state by name; assignable, and put together again."""

    def __init__(self, state: Any) -> None:
        try:
            children, _, entries, self._unflatten = optree.tree_flatten_one_level(
                state, none_is_leaf=True, namespace=NAMESPACE
            )
        except ValueError:
            raise PlacementError(
                f"a state is a pytree with named entries (a TrainState, dict, dataclass or named "
                f"tuple), not a {type(state).__name__}."
            ) from None
        self._metadata = _
        self.names = [str(entry) for entry in _names(state, entries)]
        self._children = dict(zip(self.names, children, strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def __getitem__(self, name: str) -> Any:
        return self._children[name]

    def get(self, name: str) -> Any:
        """The entry, or ``None``."""
        return self._children.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._children[name] = value

    def __str__(self) -> str:
        return "entries " + ", ".join(self.names) if self.names else "without entries"

    def rebuild(self) -> Any:
        """The state with the entries as they are now."""
        return self._unflatten(self._metadata, tuple(self._children.values()))


def _names(state: Any, entries: Sequence[Any]) -> Sequence[Any]:
    """Named tuples are entered by position; their fields are the names that users know."""
    return getattr(state, "_fields", entries)


def held_bytes(state: Any) -> dict[str, int]:
    """Bytes that this rank holds, by entry of the state."""
    try:
        entries = Entries(state)
    except PlacementError:
        return {"state": tree.size_bytes(state)}
    return {name: tree.size_bytes(entries[name]) for name in entries.names}
