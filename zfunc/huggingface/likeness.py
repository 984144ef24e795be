"""Whether two types do the same when they are called: whether they are written alike.

Hugging Face repeats the parts of its models in each of them, under other names: most of its norms
are Llama's, letter for letter. So a part is known by what its ``forward`` is compiled to, not by
what it is called: the same instructions on the same attributes, which call functions and methods
that are alike in turn. What inherits, is named alike or has been patched counts as what it does.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

__all__ = [
    "MODELS",
    "alike",
    "genuine",
    "remembered",
    "remembering",
    "same_forward",
    "shadowed",
    "specimen",
    "watched",
]

R = TypeVar("R")
MISSING = object()
PLAIN = (bool, int, float, str, bytes, type(None))
LIBRARIES, MODELS = ("torch.", "transformers."), "transformers.models."
READS = ("__getattr__", "__getattribute__")
OF_CONSTANTS = ("LOAD_CONST", "RETURN_CONST", "KW_NAMES")
AFTER_DOTS = ("LOAD_ATTR", "LOAD_METHOD")
KINDS = 0x3FF  # of co_flags: variable arguments, generators, coroutines; the rest is of the text


_memory: ContextVar[dict[Any, Any] | None] = ContextVar("memory", default=None)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Within it nobody patches anything, so that an answer about types is looked for once."""
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def remembered(ask: Callable[..., R]) -> Callable[..., R]:
    """The same function of hashable arguments, which is asked once within :func:`remembering`."""

    @functools.wraps(ask)
    def answer(*args: Any) -> R:
        memory = _memory.get()
        if memory is None:
            return ask(*args)
        if (ask, *args) not in memory:
            memory[(ask, *args)] = ask(*args)
        found: R = memory[(ask, *args)]
        return found

    return answer


@remembered
def same_forward(kind: type, other: type) -> bool:
    """Whether ``forward`` does the same in instances of two types whose attributes are the same.

    Names of arguments may differ. Methods and other attributes of the types that ``forward``
    mentions must be alike, and so must what a call does around it.
    """
    names = ["forward", "__call__"]
    seen = {*names}
    while names:
        name = names.pop()
        found, wanted = (inspect.getattr_static(x, name, MISSING) for x in (kind, other))
        if not alike(found, wanted):
            return False
        if isinstance(found, FunctionType) and getattr(nn.Module, name, None) is not found:
            more = {*READS, *_names(inspect.unwrap(found).__code__, AFTER_DOTS)} - seen
            seen |= more
            names += more
    return True


def alike(found: Any, wanted: Any, asked: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two functions do the same: one code; globals and closures that are the same or alike.

    Decorators count by what they are written as, and by what they have been given. ``asked`` are
    pairs (by id) whose answer is being looked for, in functions that call each other.
    """
    if found is wanted or (id(found), id(wanted)) in asked:
        return True
    if type(found) is not type(wanted):
        return False
    if isinstance(found, PLAIN):
        return repr(found) == repr(wanted)
    if isinstance(found, MethodType):
        return found.__func__ is wanted.__func__ and _stated(found) == _stated(wanted)
    if not isinstance(found, FunctionType) or written(found.__code__) != written(wanted.__code__):
        return False
    if (found.__defaults__, found.__kwdefaults__) != (wanted.__defaults__, wanted.__kwdefaults__):
        return False
    asked = asked | {(id(found), id(wanted))}
    names = _names(found.__code__, ("LOAD_GLOBAL",))
    pairs = [(_named(found, name), _named(wanted, name)) for name in names]
    pairs += zip(_held(found), _held(wanted), strict=True)
    return all(alike(*pair, asked) for pair in pairs)


@remembered
def specimen(path: str) -> Any:
    """A class or function of Hugging Face by its full name, as it was written.

    Returns:
        None where Hugging Face is not in use, has no such thing, or somebody has changed it.
    """
    if "transformers" not in sys.modules:
        return None
    home, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(home), name, None)
    except ImportError:
        return None
    own = {name: found}
    if isinstance(found, type):
        if (found.__module__, found.__qualname__) != (home, name):
            return None
        own = {f"{name}.{x}": y for x, y in vars(found).items() if isinstance(y, FunctionType)}
    return found if all(_as_written(y, home, x) for x, y in own.items()) else None


def genuine(part: nn.Module) -> str:
    """The full name of a module's type if it is what it is called; ``""`` if not.

    It is not where the module that it claims to come from knows another one by its name, or where
    its ``forward`` comes from somewhere else.
    """
    kind = type(part)
    home, name = kind.__module__, kind.__qualname__
    known = getattr(sys.modules.get(home), name, None) is kind
    return f"{home}.{name}" if known and _as_written(kind.forward, home, f"{name}.forward") else ""


def shadowed(part: nn.Module) -> bool:
    """Whether a module has attributes of its own in the place of methods of its type."""
    return not _methods(type(part)).isdisjoint(part.__dict__)


@remembered
def _methods(kind: type) -> frozenset[str]:
    own = (vars(x).items() for x in kind.__mro__)
    return frozenset(name for items in own for name, y in items if isinstance(y, FunctionType))


def watched(part: nn.Module) -> bool:
    """Whether a module does more, when it is called, than its type says."""
    hooks = (
        *(part._forward_hooks, part._forward_pre_hooks),
        *(part._backward_hooks, part._backward_pre_hooks),
    )
    return "forward" in part.__dict__ or any(hooks)


@functools.cache
def written(code: CodeType) -> tuple[Any, ...]:
    """What a function is compiled to, whatever its text, and the names of its variables."""
    body = tuple(_instruction(x, code.co_consts) for x in dis.get_instructions(code))
    counts = (code.co_argcount, code.co_kwonlyargcount, code.co_flags & KINDS)
    return (*counts, code.co_exceptiontable, body)


def _instruction(x: dis.Instruction, constants: tuple[Any, ...]) -> tuple[Any, ...]:
    if x.opname not in OF_CONSTANTS or x.arg is None:
        return (x.opname, x.arg, x.argval if x.opcode in dis.hasname else None)
    value = constants[x.arg]  # its number depends on whether there is a docstring
    text = written(value) if isinstance(value, CodeType) else repr(value)
    return (x.opname, type(value), text)


@functools.cache
def _names(code: CodeType, ways: tuple[str, ...]) -> frozenset[str]:
    """The names that some instructions of a function mention."""
    all_of = list(dis.get_instructions(code))
    inner = [_names(x, ways) for x in code.co_consts if isinstance(x, CodeType)]
    return frozenset(x.argval for x in all_of if x.opname in ways).union(*inner)


def _named(function: FunctionType, name: str) -> Any:
    """What a function finds under a global name."""
    return function.__globals__.get(name, vars(builtins).get(name, MISSING))


def _held(function: FunctionType) -> list[Any]:
    """What the closure of a function holds."""
    return [x.cell_contents if x != CellType() else MISSING for x in function.__closure__ or ()]


def _stated(method: MethodType) -> tuple[type, str]:
    """What a bound method knows of its object: the context managers behind decorators are such."""
    return type(method.__self__), repr(getattr(method.__self__, "__dict__", method.__self__))


def _as_written(found: Any, home: str, name: str, asked: frozenset[int] = frozenset()) -> bool:
    """Whether a function stands in a module under this name, and so does what it calls.

    Decorators give what they put around a function its name: where its code comes from tells.
    """
    around, space = found, vars(sys.modules.get(home, builtins))
    while hasattr(around, "__wrapped__"):
        if not getattr(around, "__globals__", {}).get("__name__", "").startswith(LIBRARIES):
            return False
        around = around.__wrapped__
    if not isinstance(around, FunctionType) or around.__globals__ is not space:
        return False
    if around.__code__.co_qualname != name:
        return False
    asked = asked | {id(found)}
    for called in _names(around.__code__, ("LOAD_GLOBAL",)):
        other = space.get(called)
        if not isinstance(other, FunctionType) or id(other) in asked:
            continue
        theirs = other.__module__ or ""
        if theirs != home and (theirs.startswith(MODELS) or not theirs.startswith(LIBRARIES)):
            return False
        if not _as_written(other, theirs, called, asked):
            return False
    return True
