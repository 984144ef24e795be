"""What tells layers of one class and of the same shapes from each other: one may stand for others
only if its code runs as theirs does."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["Numbered", "differences"]

Numbered = tuple[int, nn.Module]
"""A layer, and which one of its stack it is."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
OWN = frozenset(vars(nn.Module()))  # what every module keeps
NUMBERS = ("idx", "index", "number", "_id")


def differences(layers: Sequence[Numbered]) -> list[tuple[Hashable, ...]]:
    """Of each layer what it keeps beside its leaves that its code may decide by.

    These are the classes of its submodules, their bools, integers, strings and functions. Not
    floats, which scale numbers and do not say which ones meet, nor which layer of the stack it is.

    Returns:
        For each layer; equal for those that run alike.

    >>> differences([(0, nn.Sequential(nn.Linear(2, 4), nn.GELU())), (1, nn.Sequential(
    ...     nn.Linear(2, 4), nn.GELU("tanh")))])
    [('none',), ('tanh',)]
    """
    rows = [dict(_kept(layer)) for _, layer in layers]
    places = [place for place, _ in layers]
    columns = {
        key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)
    }
    told = [
        values
        for (_, key), values in columns.items()
        if len(set(values)) > 1 and not _is_own_number(key, values, places)
    ]
    return [tuple(values[i] for values in told) for i in range(len(rows))]


def _is_own_number(key: str, values: Sequence[Hashable], places: Sequence[int]) -> bool:
    """Whether layers keep there which one they are; of two its name is to say so, too."""
    if any(type(value) is not int for value in values):
        return False
    first = {value - place for value, place in zip(values, places, strict=True)}  # type: ignore[operator]
    return len(first) == 1 and (len(values) > 2 or any(word in key for word in NUMBERS))


def _kept(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    for name, part in layer.named_modules():
        kind = type(part)  # a parametrized module has a class of its own
        yield (name, ""), kind.__mro__[1] if parametrize.is_parametrized(part) else kind
        for key, value in vars(part).items():
            if key in HOOKS:
                yield (name, key), tuple(map(_plain, value.values()))
            elif key not in OWN and not isinstance(value, float):
                yield (name, key), _plain(value)


def _plain(value: Any, deep: bool = True) -> Any:
    """What can be compared of a value, hashable: of most things the class alone."""
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return value
    if isinstance(value, tuple | list) and deep:
        return tuple(_plain(x, deep=False) for x in value)
    if isinstance(value, partial) and deep:
        return _plain(value.func), _plain(value.args), _plain(list(value.keywords.values()))
    if isinstance(value, types.FunctionType | types.MethodType):
        cells = getattr(value, "__closure__", None) or () if deep else ()
        return value.__code__, *(_plain(cell.cell_contents, deep=False) for cell in cells)
    if isinstance(value, types.BuiltinFunctionType):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"
