"""What transforms carry from step to step, as ordinary state: loss scales, errors, schedules.

It lives in the state's ``aux``, under the transform's name; a dict that has no ``aux``
gets an entry ``"transforms"``. There ``place`` puts it, ``open`` takes it away from the
function's eyes, and ``finish`` puts its successor back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfunc.engine.entries import Entries
from zfunc.errors import PlacementError

__all__ = ["held", "may_lack", "may_lose", "may_stay", "names", "put", "sort_of", "take"]

ENTRY = "transforms"
_LOSABLE: dict[str, frozenset[str]] = {}
_SORTS: dict[str, str] = {}
_KNOWN: set[str] = set()
_STAYING: set[str] = set()


def put(state: Any, name: str, value: Any) -> Any:
    """``state`` with what transform ``name`` carries.

    Raises:
        PlacementError: the state has no place for it.

    >>> put({"params": 1}, "precision", 2)
    {'params': 1, 'transforms': {'precision': 2}}
    """
    _KNOWN.add(name)
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


def names(entries: Entries) -> list[str]:
    """The transforms of which a state carries something that only a placed state has."""
    return [name for name in held(entries) if name in _KNOWN and name not in _STAYING]


def held(entries: Entries) -> dict[str, Any]:
    """Where a state has what transforms carry, users' own entries among it."""
    found = entries.get("aux" if "aux" in entries else ENTRY)
    return found if isinstance(found, dict) else {}


def may_stay(name: str) -> None:
    """Say that what transform ``name`` carries is left in a full state, too."""
    _STAYING.add(name)


def may_lose(name: str, kinds: Iterable[str], sort: str | None = None) -> None:
    """Say which entries of what transform ``name`` carries a run can go on without.

    A checkpoint then need not have them, or may have others: they are dropped, and those that
    it lacks begin as ``place`` makes them.

    Args:
        sort: the entry, a 0-d tensor, that says what these are. Where the checkpoint says something
            else than the state they are lost, and the state's word stands.
    """
    _LOSABLE[name] = frozenset([*kinds, *([sort] if sort else [])])
    if sort:
        _SORTS[name] = sort


def may_lack(path: str) -> bool:
    """Whether a leaf, by its dotted path in a full state, is of those."""
    where, name, kind, *_ = [*path.split("."), "", "", ""]
    return where in ("aux", ENTRY) and kind in _LOSABLE.get(name, ())


def sort_of(path: str) -> str | None:
    """The path of what says what such a leaf is, if anything does."""
    where, name, *_ = path.split(".")
    return f"{where}.{name}.{_SORTS[name]}" if name in _SORTS else None
