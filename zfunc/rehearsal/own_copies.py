"""Functions whose Python state is their own: a rehearsal calls these, and leaves no trace.

A hook that counts, or keeps what it has seen, is to have seen what was computed, and no ghosts. So
what a user's function reaches through its closure, its defaults and the globals that it names is
copied: lists, dicts, sets, numbers, and other such functions. Everything else is shared.
"""

from __future__ import annotations

import functools
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

import zfunc.engine
from zfunc.rehearsal.repeats import Repeats

__all__ = ["OwnCopies", "is_users"]

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
MANY = 1000  # what is larger is copied, and not what is in it
_LIBRARIES = (
    str(Path(torch.__file__).parents[1]),
    str(Path(zfunc.engine.__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<frozen",
)


class OwnCopies:
    """Copies that belong together: what two functions share, their copies share.

    Attributes:
        changed: whether what functions reach has changed between layers, or behind them.
        repeats: is told what they reach, where that is asked for.
    """

    def __init__(self, repeats: Repeats | None = None) -> None:
        self.changed, self.repeats = False, repeats
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # what was copied, so that no other object has its id
        self._globals: dict[int, dict[str, Any]] = {}
        self._containers: list[Any] = []
        self._cells: list[tuple[CellType, str]] = []
        self._noted: dict[Any, Any] = {}
        self._names: set[str] = set()  # of the globals that they use
        self._before: dict[Any, Any] = {}

    def begin(self, fn: Any) -> Any:
        """The copy of the function that is to run."""
        made = self.of(fn)
        if self.repeats is not None:
            self.repeats.start(self._reached())
        return made

    def begin_layer(self) -> None:
        """Compare what they reach with what they did behind the layer before. Called at the end
        too."""
        now = self._reached()
        self.compare(self._noted, {key: now.get(key) for key in self._noted})
        if self.repeats is not None:
            self._before = self.repeats.before_layer(now)

    def end_layer(self) -> None:
        """What a layer changes is its own."""
        self._noted = self._reached()
        if self.repeats is not None:
            self.repeats.behind_layer(self._before, self._noted)

    def compare(self, then: Any, now: Any) -> None:
        """Two states outside of layers, one before the other."""
        self.changed |= not _is_alike(then, now)

    def _reached(self) -> dict[Any, Any]:
        """What they reach, by where that is and what it is called."""
        cells = {(id(x), name): _content(x) for x, name in self._cells}
        lists = {(id(x), "what it has as a default"): x.copy() for x in self._containers}
        around = self._globals.values()
        named = {(id(x), name): x[name] for x in around for name in self._names if name in x}
        return cells | lists | named

    def of(self, x: Any) -> Any:
        """A copy of a user's function or container; anything else is itself."""
        if id(x) in self._made:
            return self._made[id(x)]
        kind = type(x)
        if kind is FunctionType:
            return self._function(x) if is_users(x) else x
        if kind is MethodType:
            return MethodType(self.of(x.__func__), x.__self__)
        if kind is functools.partial:
            made = functools.partial(self.of(x.func), *x.args, **x.keywords)
            return self._keep(x, made)
        return self._container(x) if kind in CONTAINERS else x

    def _keep(self, x: Any, made: Any) -> Any:
        self._made[id(x)] = made
        self._kept.append(x)
        return made

    def _container(self, x: Any) -> Any:
        made = self._keep(x, x.copy())
        self._containers.append(made)
        if len(x) > MANY:
            return made
        if isinstance(x, dict):
            for key, value in tuple(x.items()):
                made[key] = self.of(value)
        elif isinstance(x, list):
            made[:] = [self.of(value) for value in x]
        return made

    def _function(self, fn: FunctionType) -> FunctionType:
        closed = zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True)
        around, cells = self._around(fn), tuple(self._cell(*each) for each in closed)
        made = FunctionType(fn.__code__, around, fn.__name__, None, cells)
        self._keep(fn, made)
        functools.update_wrapper(made, fn)
        del made.__wrapped__  # type: ignore[attr-defined]
        made.__dict__.update(fn.__dict__)
        if fn.__defaults__ is not None:
            made.__defaults__ = tuple(map(self.of, fn.__defaults__))
        if fn.__kwdefaults__ is not None:
            made.__kwdefaults__ = {key: self.of(x) for key, x in fn.__kwdefaults__.items()}
        for cell, new in zip(fn.__closure__ or (), cells, strict=True):
            if _is_filled(cell) and not _is_filled(new):
                new.cell_contents = self.of(cell.cell_contents)
        for name in _names(fn.__code__):
            if name in fn.__globals__:
                self._names.add(name)
                around[name] = self.of(fn.__globals__[name])
        return made

    def _around(self, fn: FunctionType) -> dict[str, Any]:
        """The globals of copies from the same module: one for all of them."""
        key = id(fn.__globals__)
        if key not in self._globals:
            self._globals[key] = dict(fn.__globals__)
        return self._globals[key]

    def _cell(self, cell: CellType, name: str) -> CellType:
        made: CellType | None = self._made.get(id(cell))
        if made is None:
            made = self._keep(cell, CellType())
            self._cells.append((made, name))
        return made


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_filled(cell: CellType) -> bool:
    return _content(cell) is not _EMPTY


def _is_alike(then: Any, now: Any) -> bool:
    """Whether a state is the same one: the same objects, equal numbers, or containers of such."""
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(now, dict):
        return then.keys() == now.keys() and all(_is_alike(then[key], x) for key, x in now.items())
    if isinstance(now, list | tuple | deque):
        return len(then) == len(now) and all(map(_is_alike, then, now))
    return isinstance(now, bool | int | float | str | set) and bool(then == now)


def _names(code: CodeType) -> Iterator[str]:
    """The globals that a function, and what is defined in it, may name."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _names(x)


def is_users(fn: Any) -> bool:
    """Whether a function, a method, or an object that can be called is no library's."""
    if isinstance(fn, functools.partial):
        return is_users(fn.func)
    if isinstance(fn, MethodType):
        return is_users(fn.__func__)
    called = fn if isinstance(fn, FunctionType) else type(fn).__call__
    code = getattr(called, "__code__", None)
    return code is not None and not code.co_filename.startswith(_LIBRARIES)
