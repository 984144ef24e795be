"""Names of modules while they run, by torch's hooks for all modules, which are there for one block.

Layers say themselves where they are (:mod:`zfunc.foresight.layer_names`). Modules inside of them,
and modules of a step that knows no layers, are found here by their place in the outermost module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zfunc.foresight.layer_names import CurrentLayer

__all__ = ["modules_named"]

_WATCHED: ContextVar[CurrentLayer | None] = ContextVar("zfunc_watched", default=None)
"""Hooks are called in every thread; what a layer recomputes in another one has this context."""


@contextmanager
def modules_named(current: CurrentLayer) -> Iterator[None]:
    """A block in which ``current`` is told which module of this context runs."""
    names, token = _ModuleNames(current), _WATCHED.set(current)
    try:
        entering = register_module_forward_pre_hook(names.enter)
        try:
            leaving = register_module_forward_hook(names.leave, always_call=True)
            try:
                yield
            finally:
                leaving.remove()
        finally:
            entering.remove()
    finally:
        _WATCHED.reset(token)


class _ModuleNames:
    def __init__(self, current: CurrentLayer) -> None:
        self._current = current
        self._known: dict[nn.Module, str] = {}  # held, so that no other module gets its identity
        self._outer: list[tuple[nn.Module, str]] = []

    def enter(self, module: nn.Module, given: Any) -> None:
        if _WATCHED.get() is not self._current:
            return
        if module not in self._known and not self._outer:  # the outermost one
            self._known.update((part, name) for name, part in module.named_modules())
        name = self._known.get(module, self._current.layer)
        self._outer.append((module, self._current.move(name)))

    def leave(self, module: nn.Module, given: Any, out: Any) -> None:
        if _WATCHED.get() is not self._current:
            return
        while self._outer:
            inner, before = self._outer.pop()
            self._current.move(before)
            if inner is module:
                return
