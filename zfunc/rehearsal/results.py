"""The leaves of what layers take and give.

Besides containers that ``optree`` knows, dataclasses and kinds of dicts (a ``ModelOutput`` of
Hugging Face) are seen into. Everything else is one leaf: a cache, say, which layers change.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import optree
from torch import Tensor

from zfunc.engine.batches import mapped
from zfunc.trees.nodes import OPAQUE

__all__ = [
    "Rebuild",
    "are_alike",
    "containers",
    "fields_of",
    "flattened",
    "is_array",
    "own",
    "replaced",
    "structure",
    "tensors_in",
]

Rebuild = Callable[[Sequence[Any]], Any]
"""A function from leaves to the structure that they were in."""


def flattened(
    tree: Any, leaf: type | tuple[()] = (), whole: Collection[int] = ()
) -> tuple[list[Any], Rebuild]:
    """The leaves, ``None`` being one, and how they go together.

    Args:
        tree: what a layer takes or gives.
        leaf: a kind of dataclass that is a leaf itself.
        whole: the ids of containers that are leaves themselves.

    >>> leaves, rebuild = flattened((1, {"a": [2, None]}))
    >>> leaves, rebuild([5, 6, 7])
    ([1, 2, None], (5, {'a': [6, 7]}))
    """
    if isinstance(tree, Tensor):
        return [tree], _first
    is_leaf = (lambda x: id(x) in whole) if whole else None
    leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=OPAQUE)
    records = [_is_record(x, leaf) and id(x) not in whole for x in leaves]
    if not any(records):
        return leaves, lambda new: optree.tree_unflatten(spec, new)
    found: list[Any] = []
    parts: list[tuple[int, Rebuild]] = []
    for x, inside in zip(leaves, records, strict=True):
        inner, rebuilt = _seen_into(x, leaf, whole) if inside else ([x], _first)
        found += inner
        parts.append((len(inner), rebuilt))

    def rebuild(new: Sequence[Any]) -> Any:
        rest = iter(new)
        items = [rebuilt([next(rest) for _ in range(count)]) for count, rebuilt in parts]
        return optree.tree_unflatten(spec, items)

    return found, rebuild


def _first(new: Sequence[Any]) -> Any:
    return new[0]


def replaced(tree: Any, new: Callable[[Tensor], Any]) -> Any:
    """The tree with each of its tensors replaced."""
    leaves, rebuild = flattened(tree)
    return rebuild([new(x) if isinstance(x, Tensor) else x for x in leaves])


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors that a function was given, or gave: most of them as they are."""
    if isinstance(tree, Tensor):
        return [tree]
    if not isinstance(tree, tuple):
        return [x for x in flattened(tree)[0] if isinstance(x, Tensor)]
    found: list[Tensor] = []
    for x in tree:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple | list | dict):
            found += tensors_in(x)
    return found


def structure(tree: Any) -> Any:
    """How a tree is put together, for ``are_alike``."""
    if isinstance(tree, Tensor):
        return None
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=OPAQUE)
    records = [(type(x), dict(_items(x))) for x in leaves if _is_record(x, ())]
    return spec, [(kind, [*own], structure([*own.values()])) for kind, own in records]


def are_alike(one: Any, other: Any) -> bool:
    """Whether two structures have the same types and names at the same places."""
    if one is None or other is None:
        return one is other
    (spec, records), (spec_too, records_too) = one, other
    if spec != spec_too and spec.accessors() != spec_too.accessors():  # a defaultdict's function
        return False
    return len(records) == len(records_too) and all(
        a[:2] == b[:2] and are_alike(a[2], b[2]) for a, b in zip(records, records_too, strict=True)
    )


def containers(tree: Any) -> list[Any]:
    """The lists, dicts and records in a tree, in order."""
    found: list[Any] = []

    def seen(x: Any) -> bool:
        if isinstance(x, list | dict | deque):
            found.append(x)
        return False

    leaves = optree.tree_leaves(tree, seen, none_is_leaf=True, namespace=OPAQUE)
    for x in leaves:
        if _is_record(x, ()):
            if not isinstance(x, dict):  # or it was seen above
                found.append(x)
            found += containers([value for _, value in _items(x)])[1:]
    return found


def fields_of(x: Any) -> list[tuple[Any, Any]] | None:
    """Names and values of a dataclass or a kind of dict; None of anything else."""
    return [*_items(x)] if _is_record(x, ()) else None


def is_array(x: Any) -> bool:
    """Whether something is an array of NumPy, which nobody needs to have."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def own(batch: Any) -> Any:
    """A batch with the same tensors in containers, and arrays, that may be written to; these in the
    order of memory that they have."""
    if isinstance(batch, Tensor):  # most are
        return batch
    return mapped(lambda x: x.copy("K") if is_array(x) else x, batch, list)


def _is_record(x: Any, leaf: type | tuple[()]) -> bool:
    kind: Any = type(x)
    return _are_records(kind) and not isinstance(x, type) and not isinstance(x, leaf)


@functools.cache
def _are_records(kind: Any) -> bool:
    return issubclass(kind, Mapping) or is_dataclass(kind)


def _seen_into(
    record: Any, leaf: type | tuple[()], whole: Collection[int]
) -> tuple[list[Any], Rebuild]:
    """The leaves of a dataclass or a kind of dict, and how another is made with other ones."""
    items = dict(_items(record))
    names = list(items)
    leaves, rebuild = flattened(list(items.values()), leaf, whole)
    empty = _with(record, dict.fromkeys(names))
    return leaves, lambda new: _with(empty, dict(zip(names, rebuild(new), strict=True)))


def _with(record: Any, values: Mapping[Any, Any]) -> Any:
    made = copy.copy(record)
    for key, value in values.items():
        if isinstance(made, Mapping):
            made[key] = value  # type: ignore[index]
            if isinstance(made, OrderedDict):  # a ModelOutput's copy has lost what was None
                made.move_to_end(key)
        else:
            object.__setattr__(made, key, value)
    return made


def _items(record: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(record, Mapping):
        return iter(record.items())
    return ((f.name, getattr(record, f.name)) for f in fields(record) if hasattr(record, f.name))
