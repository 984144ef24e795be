"""What transforms carry from step to step, as ordinary state: loss scales, errors, schedules.

It lives in the state's ``aux``, under the transform's name; a dict that has no ``aux``
gets an entry ``"transforms"``. There ``place`` puts it, ``open`` takes it away from the
function's eyes, and ``finish`` puts its successor back.
"""

from __future__ import annotations

from typing import Any

from zfunc.errors import PlacementError
from zfunc.placed.placement import Entries

__all__ = ["put", "take"]

ENTRY = "transforms"


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
