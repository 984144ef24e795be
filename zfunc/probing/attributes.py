"""Which attributes of a module are read: it, and the objects that it has, tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor, nn

__all__ = ["Note", "watched"]

PLAIN = (int, float, str, bytes, bool, complex, tuple, list, dict, set, Enum, Tensor, nn.Module)
Note = Callable[[nn.Module, str, str, Any], None]
"""What is told: a submodule, its name, an attribute, dotted in an object that it has, its value."""


def watched(part: nn.Module, name: str, note: Note) -> Callable[[], None]:
    """Let a submodule, and the objects that it has, tell which of their integers are read.

    Returns:
        What ends it.
    """
    kind, before = type(part), {}

    def own(_: Any, attribute: str, value: Any) -> None:
        note(part, name, attribute, value)

    for key, value in list(part.__dict__.items()):
        if not key.startswith("_") and hasattr(value, "__dict__") and not _plain(value):

            def inner(_: Any, attribute: str, found: Any, key: str = key) -> None:
                note(part, name, f"{key}.{attribute}", found)

            before[key] = value
            mine = copy.copy(value)
            try:
                mine.__class__ = _telling(type(value), inner)
            except TypeError:  # of a class with slots: nothing can watch it
                del before[key]
                continue
            part.__dict__[key] = mine
    part.__class__ = _telling(kind, own)

    def back() -> None:
        part.__class__ = kind
        part.__dict__.update(before)

    return back


def _plain(value: Any) -> bool:
    return isinstance(value, (*PLAIN, type)) or callable(value)


def _telling(kind: Any, tell: Callable[[Any, str, Any], None]) -> type:
    def read(self: Any, attribute: str) -> Any:
        value = kind.__getattribute__(self, attribute)
        if type(value) is int:
            tell(self, attribute, value)
        return value

    body = {
        "__getattribute__": read,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), body)
