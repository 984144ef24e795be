"""Layers that print, or stop in a debugger, do so on numbers, and not in a rehearsal."""

from __future__ import annotations

import builtins
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["silent"]

_HERE: ContextVar[bool] = ContextVar("zfunc_silent", default=False)
_lock = threading.Lock()
_open = 0
_before: list[Any] = []
_PLACES: list[tuple[Any, str]] = [(builtins, "print"), (sys, "breakpointhook"), (pdb, "set_trace")]


@contextmanager
def silent() -> Iterator[None]:
    """A block in which ``print``, ``breakpoint`` and ``pdb.set_trace`` do nothing in this thread.

    In others they are what they were.
    """
    _enter()
    token = _HERE.set(True)
    try:
        yield
    finally:
        _HERE.reset(token)
        _leave()


def _enter() -> None:
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            for owner, name in _PLACES:
                _before.append(getattr(owner, name))
                setattr(owner, name, _unless_silent(_before[-1]))


def _leave() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            for (owner, name), was in zip(_PLACES, _before, strict=True):
                setattr(owner, name, was)
            _before.clear()


def _unless_silent(do: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        return None if _HERE.get() else do(*args, **kwargs)

    return told
