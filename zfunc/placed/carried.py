"""What transforms carry from step to step, as ordinary state: loss scales, errors, schedules.

It lives in the state's ``aux``, under the transform's name; a dict that has no ``aux``
gets an entry ``"transforms"``. There ``place`` puts it, ``open`` takes it away from the
function's eyes, and ``finish`` puts its successor back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfunc.errors import PlacementError
from zfunc.placed.placement import Entries

__all__ = ["may_lack", "may_lose", "put", "take"]

ENTRY = "transforms"
_LOSABLE: dict[str, frozenset[str]] = {}


def put(state: Any, name: str, value: Any) -> Any:
    """``state`` with what transform ``name`` carries.

    Raises:
        PlacementError: the state has no place for it.

    >>> put({"params": 1}, "precision", 2)
    {'params': 1, 'transforms': {'precision': 2}}
    """
    entries = Entries(state)
    where = "aux" if "aux" in entries else ENTRY
    if where not in entries and type(state) is dict:
        return {**state, ENTRY: {name: value}}
    carried = entries.get(where)
    if carried is None and where in entries:
        carried = {}
    if not isinstance(carried, dict):
        raise PlacementError(
            f"{name} carries state of its own from step to step, but the state ({entries}) has no "
            f"place for it: give a {type(state).__name__} an entry `aux` that is a dict ({{}} at "
            "first)."
        )
    entries[where] = {**carried, name: value}
    return entries.rebuild()


def take(state: Any, name: str) -> tuple[Any, Any]:
    """``(value, state without it)``; the value is ``None`` where there is none.

    >>> take({"params": 1, "transforms": {"precision": 2}}, "precision")
    (2, {'params': 1})
    """
    entries = Entries(state)
    where = "aux" if "aux" in entries else ENTRY
    carried = entries.get(where)
    if not isinstance(carried, dict) or name not in carried:
        return None, state
    rest = {key: value for key, value in carried.items() if key != name}
    if where == ENTRY and not rest and type(state) is dict:
        return carried[name], {key: value for key, value in state.items() if key != ENTRY}
    entries[where] = rest
    return carried[name], entries.rebuild()


def may_lose(name: str, kinds: Iterable[str]) -> None:
    """Say which entries of what transform ``name`` carries a run can go on without.

    A checkpoint then need not have them, or may have others: they are dropped, and those that
    it lacks begin as ``place`` makes them.
    """
    _LOSABLE[name] = frozenset(kinds)


def may_lack(path: str) -> bool:
    """Whether a leaf, by its dotted path in a full state, is of those."""
    where, name, kind, *_ = [*path.split("."), "", "", ""]
    return where in ("aux", ENTRY) and kind in _LOSABLE.get(name, ())
