"""Whether two types do the same when they are called: whether they are written alike.

Hugging Face repeats the parts of its models in each of them, under other names: most of its norms
are Llama's, letter for letter. So a part is known by what its ``forward`` is compiled to, not by
what it is called: the same instructions on the same attributes, which call functions and methods
that are alike in turn. What inherits, is named alike or has been patched counts as what it does.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import inspect
import sys
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["alike", "genuine", "same_forward", "specimen", "watched"]

MISSING = object()
READS = ("__getattr__", "__getattribute__")
OF_CONSTANTS = ("LOAD_CONST", "RETURN_CONST", "KW_NAMES")
AFTER_DOTS = ("LOAD_ATTR", "LOAD_METHOD")
KINDS = 0x3FF  # of co_flags: variable arguments, generators, coroutines; the rest is of the text


def same_forward(kind: type, other: type) -> bool:
    """Whether ``forward`` does the same in instances of two types whose attributes are the same.

    Names of arguments may differ. Methods and other attributes of the types that ``forward``
    mentions must be alike.
    """
    names, seen = ["forward"], {"forward"}
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


def alike(found: Any, wanted: Any, asked: frozenset[tuple[Any, Any]] = frozenset()) -> bool:
    """Whether two functions do the same: one code, and globals that are the same or alike.

    Decorators count by what they are written as. ``asked`` are pairs whose answer is being looked
    for, in functions that call each other.
    """
    if found is wanted or (found, wanted) in asked:
        return True
    if not (isinstance(found, FunctionType) and isinstance(wanted, FunctionType)):
        return False
    if hasattr(found, "__wrapped__") and hasattr(wanted, "__wrapped__"):
        decorated = written(found.__code__) == written(wanted.__code__)
        return decorated and alike(found.__wrapped__, wanted.__wrapped__, asked)
    if (
        found.__closure__
        or wanted.__closure__
        or written(found.__code__) != written(wanted.__code__)
    ):
        return False
    if (found.__defaults__, found.__kwdefaults__) != (wanted.__defaults__, wanted.__kwdefaults__):
        return False
    asked = asked | {(found, wanted)}
    names = _names(found.__code__, ("LOAD_GLOBAL",))
    return all(alike(_named(found, name), _named(wanted, name), asked) for name in names)


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
        methods = {x: y for x, y in vars(found).items() if isinstance(y, FunctionType)}
        own |= {f"{name}.{x}": y for x, y in methods.items()}
    told = {
        x: (getattr(y, "__module__", ""), getattr(y, "__qualname__", "")) for x, y in own.items()
    }
    return found if told == {x: (home, x) for x in own} else None


def genuine(part: nn.Module) -> str:
    """The full name of a module's type if it is what it is called; ``""`` if not.

    It is not where the module that it claims to come from knows another one by its name, or where
    its ``forward`` comes from somewhere else.
    """
    kind = type(part)
    home, name = kind.__module__, kind.__qualname__
    forward = (getattr(kind.forward, x, "") for x in ("__module__", "__qualname__"))
    known = getattr(sys.modules.get(home), name, None) is kind
    return f"{home}.{name}" if known and (*forward,) == (home, f"{name}.forward") else ""


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
    return (code.co_argcount, code.co_kwonlyargcount, code.co_flags & KINDS, body)


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
