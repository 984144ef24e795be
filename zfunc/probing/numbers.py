"""Whole numbers that a module keeps beside its leaves, and reads when it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import nn

from zfunc.probing.attributes import Note, watched
from zfunc.probing.calls import Probed
from zfunc.probing.copies import LayerKind
from zfunc.probing.stages import Stage
from zfunc.probing.traits import integers_of

__all__ = ["Number", "Numbers", "attributes_set", "numbers_read", "numbers_read_in", "places_read"]


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
        if value > 1:
            seen.setdefault(attribute, Number(part, module, attribute, value))

    back = watched(part, name, note)
    try:
        run()
    finally:
        back()
    return list(seen.values())


def numbers_read(stage: Stage, row: str) -> list[Number]:
    """The numbers that a layer reads until its product ``row`` is called, in order.

    Not those that other code reads, too: it is to find them as they are.
    """
    seen: dict[tuple[str, str], Number] = {}
    state = {"on": True}

    def note(part: nn.Module, module: str, attribute: str, value: Any) -> None:
        if state["on"] and value > 1 and (module, attribute) not in stage.fixed:
            seen.setdefault((module, attribute), Number(part, module, attribute, value))

    def reached(name: str) -> None:
        if name == row:
            state["on"] = False

    for call in stage.calls:
        with stage.called(call):
            state["on"], stage.on_product = True, reached
            try:
                with _watching(stage.layer, note):
                    stage.run()
            finally:
                stage.on_product = lambda name: None
    return list(seen.values())


def places_read(found: Probed) -> set[tuple[str, str]]:
    """Of the numbers in which layers of a kind differ, those that the first one reads when it runs.

    Most only keep which layer they are. One that reads it may do something else than others do.
    """
    return {at for kind in found.kinds if kind.calls for at in _places_read(found.module, kind)}


def _places_read(module: nn.Module, kind: LayerKind) -> set[tuple[str, str]]:
    first = integers_of(kind.module)
    others = [integers_of(module.get_submodule(name)) for name in kind.names[1:]]
    places = {at for each in others for at, value in each.items() if first.get(at) != value}
    if not places:
        return set()
    read = set[tuple[str, str]]()
    stage = Stage(kind.module, kind.calls)
    with _watching(stage.layer, lambda _, home, attribute, value: read.add((home, attribute))):
        for call in (*kind.calls, replace(kind.calls[0], training=True)):
            with stage.called(call), suppress(Exception):  # the module's own code
                stage.run()
    return places & read


@contextmanager
def _watching(layer: nn.Module, note: Note) -> Iterator[None]:
    """A block in which plain attributes of a layer's submodules that are read are told."""
    undo = [watched(part, name, note) for name, part in layer.named_modules()]
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


@contextmanager
def attributes_set(
    layer: nn.Module, attributes: Mapping[str, Mapping[str, tuple[int, ...]]], rank: int
) -> Iterator[None]:
    """A block in which submodules keep a rank's numbers: by their names, those of attributes."""
    undo: list[Number] = []
    try:
        for name, values in attributes.items():
            part = layer.get_submodule(name)
            for attribute, value in values.items():
                owner: Any = part
                for key in attribute.split("."):
                    owner = getattr(owner, key)
                number = Number(part, name, attribute, owner)
                number.write(value[rank])
                undo.append(number)
        yield
    finally:
        for number in reversed(undo):
            number.restore()
