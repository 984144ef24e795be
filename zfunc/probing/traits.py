"""What tells layers of one class and of the same shapes from each other: one may stand for others
only if its code runs as theirs does."""

from __future__ import annotations

import types
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize

from zfunc.probing.products import product_of

__all__ = ["NUMBERS", "Floats", "Numbered", "differences", "floats_of", "integers_of", "plain"]

Numbered = tuple[int, nn.Module]
"""A layer, and which one of its stack it is."""

Floats = Mapping[tuple[str, str], float]
"""By a submodule's name and an attribute."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
OWN = frozenset(vars(nn.Module()))  # what every module keeps
NUMBERS = ("idx", "index", "number", "_id")
DEPTH = 3  # of containers and objects in each other
FEW = 64  # elements of a buffer that is compared by its values
SHORT = 1024  # elements of a tensor that is compared by its values


def differences(
    layers: Sequence[Numbered], read: Collection[tuple[str, str]] = ()
) -> list[tuple[Hashable, ...]]:
    """Of each layer what it keeps beside its leaves that its code may decide by.

    These are the classes of its submodules, which of them are products, their bools, integers,
    strings and functions, also in containers and objects. Not which layer of the stack it is, and
    not floats, of which there may be others in each: :func:`floats_of` has them.

    Args:
        read: numbers that count also where they say which layer it is, for its code reads them:
            (submodule, attribute).

    Returns:
        For each layer; equal for those that run alike.

    >>> differences([(0, nn.Sequential(nn.Linear(2, 4), nn.GELU())), (1, nn.Sequential(
    ...     nn.Linear(2, 4), nn.GELU("tanh")))])
    [('none',), ('tanh',)]
    """
    known: dict[int, Hashable] = {}
    rows = [dict(_kept(layer, known)) for _, layer in layers]
    places = [place for place, _ in layers]
    columns = {
        key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)
    }
    told = [
        values
        for at, values in columns.items()
        if len(set(values)) > 1 and (at in read or not _is_own_number(at[1], values, places))
    ]
    return [tuple(values[i] for values in told) for i in range(len(rows))]


def _is_own_number(key: str, values: Sequence[Hashable], places: Sequence[int]) -> bool:
    """Whether layers keep there which one they are; of two its name is to say so, too."""
    if any(type(value) is not int for value in values):
        return False
    first = {value - place for value, place in zip(values, places, strict=True)}  # type: ignore[operator]
    return len(first) == 1 and (len(values) > 2 or any(word in key for word in NUMBERS))


def floats_of(layer: nn.Module) -> dict[tuple[str, str], float]:
    """The floats that a layer's submodules keep as attributes, but for probabilities of dropout."""
    return {
        (name, key): value
        for name, part in layer.named_modules()
        if not isinstance(part, _DropoutNd)
        for key, value in vars(part).items()
        if type(value) is float and "drop" not in key
    }


def integers_of(layer: nn.Module) -> dict[tuple[str, str], int]:
    """The integers that a layer's submodules keep as attributes."""
    return {
        (name, key): value
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if type(value) is int
    }


def _kept(
    layer: nn.Module, known: dict[int, Hashable]
) -> Iterator[tuple[tuple[str, str], Hashable]]:
    for name, part in layer.named_modules():
        kind = type(part)  # a parametrized module has a class of its own
        yield (name, ""), kind.__mro__[1] if parametrize.is_parametrized(part) else kind
        yield (name, "its product"), product_of(part)
        for key, value in vars(part).items():
            if key in HOOKS:
                yield (name, key), tuple(map(plain, value.values()))
            elif isinstance(value, float):
                yield (name, key), float
            elif key not in OWN:
                if id(value) not in known:  # a configuration is that of many
                    known[id(value)] = plain(value)
                yield (name, key), known[id(value)]
        for key, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.numel() <= FEW:
                yield (name, key), _told(buffer)


def _told(x: Tensor) -> Hashable:
    """Of some numbers what code may decide by, or mix features by."""
    if x.numel() != 1:
        return x.dtype, tuple(x.shape), str(x.tolist())
    return bool(x) if x.dtype == torch.bool or x.is_complex() else (float(x) > 0) - (float(x) < 0)


def plain(value: Any, depth: int = DEPTH) -> Hashable:
    """What can be compared of a value: of most things the class alone.

    >>> plain({"mix": [0.5, None]})
    (('mix', (0.5, None)),)
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if depth:
        inner = _inside(value, depth - 1)
        if inner is not None:
            return inner
    if isinstance(value, types.FunctionType | types.MethodType):
        return value.__code__
    if isinstance(value, types.BuiltinFunctionType):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _inside(value: Any, depth: int) -> Hashable | None:
    """What is in a container or an object; None of what is neither."""
    if isinstance(value, tuple | list):
        return tuple(plain(x, depth) for x in value)
    if isinstance(value, set | frozenset):
        return frozenset(plain(x, depth) for x in value)
    if isinstance(value, dict):
        return tuple((plain(key, depth), plain(x, depth)) for key, x in value.items())
    if isinstance(value, Tensor):
        short = value.numel() <= SHORT and value.device.type == "cpu"
        return (value.dtype, tuple(value.shape), str(value.tolist())) if short else None
    if isinstance(value, partial):
        return plain(value.func, depth), plain(value.args, depth), plain(value.keywords, depth)
    if isinstance(value, types.FunctionType | types.MethodType):
        cells = getattr(value, "__closure__", None) or ()
        return value.__code__, *(plain(cell.cell_contents, depth - 1) for cell in cells if depth)
    if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
        return None
    kept = tuple((key, plain(x, depth)) for key, x in vars(value).items())
    return (f"{type(value).__module__}.{type(value).__qualname__}", *kept) if kept else None
