"""A state as a step takes it: its entries, whose role is what, and whether it is placed already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.trees import tree
from zfunc.trees.marks import any_spent, carry
from zfunc.trees.nodes import HELD, NAMESPACE, OPAQUE, PLACED, Box, memory_of

__all__ = [
    "ROLES",
    "Entries",
    "Roles",
    "admitted",
    "copied",
    "entry",
    "first_leaf",
    "first_placed",
    "held_bytes",
    "key_of",
]


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
                f"which {who} needs. Call it so, or tell {who} which one it is: roles={{"
                "'generator': 'params', 'g_opt': 'opt_state'}. Inference takes zf.evaluate(fn)."
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


def first_placed(state: Any) -> str | None:
    """The path of a placed node, if there is one."""
    nodes, spec = optree.tree_flatten(state, namespace=PLACED)
    for i, node in enumerate(nodes):
        if isinstance(node, tree.Placed | Box):
            return tree.dotted(*spec.paths()[i]) or "the state"
    return None


def copied(state: Any) -> Any:
    """The state in memory of its own."""
    return optree.tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) else x, state, namespace=tree.NAMESPACE
    )


def admitted(state: Any) -> tuple[Any, list[Tensor], list[Box]]:
    """The state without leaves that autograd tracks (modules' Parameters, say), tensors, boxes.

    A step decides itself what to track; otherwise every state would drag along the
    graph of all steps before it.

    Raises:
        DonatedStateError: a leaf's memory belongs to a later state.
    """
    tensors, boxes = memory_of(state)
    if any_spent(tensors):
        tree.check_alive(state)  # says which
    if not any(x.requires_grad for x in tensors) or not any(map(_is_tracked, tensors)):
        return state, tensors, boxes
    free = optree.tree_map(_free, state, namespace=HELD)
    return free, *memory_of(free)


def _free(x: Any) -> Any:
    if isinstance(x, Box) and any(map(_is_tracked, x.held())):
        return optree.tree_map(_free, cast(Any, x), namespace=tree.NAMESPACE)
    return carry(x.detach(), x) if _is_tracked(x) else x


def _is_tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.is_leaf


def entry(state: Any, name: str) -> Any:
    """What a state has under a name, or None."""
    return state.get(name) if isinstance(state, dict) else getattr(state, name, None)


def first_leaf(state: Any) -> Any:
    """The first tensor or placed node of the params, or of the state; None if there is none."""
    found = entry(state, "params")
    leaves = optree.tree_iter(state if found is None else found, namespace=OPAQUE)
    return next(iter(leaves), None)


def key_of(state: Any) -> tuple[Any, Any] | None:
    """The key of a state and its number of steps, where it has them."""
    key, step = entry(state, "key"), entry(state, "step")
    if key is None:
        return None
    return key, step if isinstance(step, Tensor | int) else None
