"""The top-level entries of a state by name, whatever container it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optree

from zfunc.errors import PlacementError
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE

__all__ = ["ROLES", "Entries", "Roles", "held_bytes"]


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


class Roles(tuple[tuple[str, str], ...]):
    """Which entries of a state are ``"params"``, and which are ``"opt_state"``: pairs of both.

    >>> Roles.of({"generator": "params"}).named("params")
    ['params', 'generator']
    """

    @classmethod
    def of(cls, given: Mapping[str, str] | None = None) -> Roles:
        """The roles that a user gave, beside the entries that are called like their role.

        Raises:
            ValueError: a role that there is not.
        """
        for entry, role in (given or {}).items():
            if role not in ("params", "opt_state"):
                raise ValueError(
                    f"roles={{{entry!r}: {role!r}}}: a role is 'params' or 'opt_state'."
                )
        return cls({"params": "params", "opt_state": "opt_state", **(given or {})}.items())

    def named(self, role: str) -> list[str]:
        """The entries that have a role."""
        return [name for name, its in self if its == role]

    def found(self, role: str, entries: Entries, who: str) -> list[str]:
        """The entries of a state that have a role.

        Args:
            who: the transform that needs one.

        Raises:
            PlacementError: there is none.
        """
        names = [name for name in self.named(role) if name in entries]
        if not names:
            raise PlacementError(
                f"the state ({entries}) has no entry {role!r} and none with the role {role!r}, "
                f"which {who} needs. Call it so, or tell {who} which one it is: "
                'roles={"generator": "params", "g_opt": "opt_state"}.'
            )
        return names


ROLES = Roles.of()  # of a state whose entries are called like their roles


def held_bytes(state: Any) -> dict[str, int]:
    """Bytes that this rank holds, by entry of the state."""
    try:
        entries = Entries(state)
    except PlacementError:
        return {"state": tree.size_bytes(state)}
    return {name: tree.size_bytes(entries[name]) for name in entries.names}
