"""Whole numbers that a module keeps beside its leaves, and reads when it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zfunc.probing.stages import Stage

__all__ = ["Number", "Numbers", "numbers_read", "numbers_read_in"]

PLAIN = (int, float, str, bytes, bool, complex, tuple, list, dict, set, Tensor, nn.Module)


class Number:
    """One number of one submodule.

    Attributes:
        module: the submodule's name within its layer.
        attribute: its name; dotted if it belongs to an object that the submodule has.
        value: what it is on the whole.
    """

    def __init__(self, part: nn.Module, module: str, attribute: str, value: int) -> None:
        self.part, self.module, self.attribute, self.value = part, module, attribute, value
        self._before: Any = None

    @property
    def key(self) -> tuple[str, str]:
        """What it is called."""
        return self.module, self.attribute

    def of(self, part: nn.Module) -> Number:
        """The same number of another copy of the submodule, with its value there."""
        owner: Any = part
        for key in self.attribute.split("."):
            owner = getattr(owner, key)
        return Number(part, self.module, self.attribute, owner)

    def write(self, value: int) -> None:
        """Let the submodule have another number; an object that others have, too, is copied."""
        owner, _, name = self.attribute.rpartition(".")
        if owner:
            self._before = getattr(self.part, owner)
            mine = copy.copy(self._before)
            setattr(mine, name, value)
            setattr(self.part, owner, mine)
        else:
            setattr(self.part, name, value)

    def restore(self) -> None:
        """As it was."""
        owner, _, name = self.attribute.rpartition(".")
        setattr(self.part, owner or name, self._before if owner else self.value)


Numbers = dict[Number, tuple[int, ...]]
"""Of each number its value on each rank."""


def numbers_read_in(part: nn.Module, name: str, run: Callable[[], Any]) -> list[Number]:
    """The numbers that one submodule reads in a run."""
    seen: dict[str, Number] = {}

    def note(part: nn.Module, module: str, attribute: str, value: Any) -> None:
        if type(value) is int and value > 1:
            seen.setdefault(attribute, Number(part, module, attribute, value))

    back = _watched(part, name, note)
    try:
        run()
    finally:
        back()
    return list(seen.values())


def numbers_read(stage: Stage, row: str) -> list[Number]:
    """The numbers that a layer reads until its product ``row`` is called, in order."""
    seen: dict[tuple[str, str], Number] = {}
    state = {"on": True}

    def note(part: nn.Module, module: str, attribute: str, value: Any) -> None:
        if state["on"] and type(value) is int and value > 1:
            seen.setdefault((module, attribute), Number(part, module, attribute, value))

    def reached(name: str) -> None:
        if name == row:
            state["on"] = False

    for call in stage.calls:
        with stage.called(call):
            undo = [_watched(part, name, note) for name, part in stage.layer.named_modules()]
            state["on"], stage.on_product = True, reached
            try:
                stage.run()
            finally:
                stage.on_product = lambda name: None
                for back in reversed(undo):
                    back()
    return list(seen.values())


Note = Callable[[nn.Module, str, str, Any], None]


def _watched(part: nn.Module, name: str, note: Note) -> Callable[[], None]:
    """Let a submodule, and the objects that it has, tell which of their attributes are read."""
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
