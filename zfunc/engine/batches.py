"""A rank's part of a global batch, and what a batch is made of.

A batch is a tree whose leaves are tensors and arrays that have its rows in dimension 0. Beside
what torch's trees know, mappings of any type (what tokenizers return) and dataclasses are nodes of
it, and come back as what they were. What cannot be cut is refused by its path: passed on as it is
it would stand whole beside parts.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.ranks.meshes import Axes, Mesh, laid_out
from zfunc.ranks.world import MESH, current
from zfunc.trees.nodes import NAMESPACE, Lazy, Placed
from zfunc.trees.tree import dotted

__all__ = ["described", "has_rows", "is_plain", "leaves_of", "local_batch", "mapped", "mislaid"]

Path = tuple[Any, ...]
_PLAIN: tuple[type, ...] = (Tensor, bool, int, float, complex, str, bytes, type(None))
_PLAIN += (torch.dtype, torch.device, torch.Size)


def local_batch(batch: Any, mesh: Mesh | None = None, axis: Axes | None = None) -> Any:
    """This rank's rows of a global batch, as views.

    Args:
        batch: tree of tensors and NumPy arrays of the same size in dimension 0: dicts and other
            mappings, lists, tuples, dataclasses, which come back as their own types. 0-d ones,
            numbers, strings and None are passed on. Sizes that do not divide are cut as evenly
            as can be (use ``zf.Mean`` in the loss: then the mean stays exact).
        mesh: by default that of the running step; ``step.local_batch(batch)`` knows its step's.
        axis: along which it is cut; by default ``data`` and ``replica``, no others.

    Raises:
        PlacementError: fewer rows than ranks, or leaves of different sizes; something that cannot
            be cut, named by its path: a list of as many strings as there are rows, say, or
            an object of unknown type.

    >>> import torch
    >>> local_batch({"x": torch.arange(4)})
    {'x': tensor([0, 1, 2, 3])}
    """
    on, world = laid_out(mesh or MESH.get()), current()
    peers = on.members(axis or on.batch, world.rank)
    index, parts = peers.index(world.rank), len(peers)
    leaves = list(leaves_of(batch))
    sizes = {x.shape[0] for _, x in leaves if has_rows(x)}
    if len(sizes) > 1:
        raise PlacementError(
            f"the batch's tensors have {sorted(sizes)} rows; they must agree in dimension 0."
        )
    rows = next(iter(sizes), None)
    for path, x in leaves:
        if not (has_rows(x) or is_plain(x)):
            raise PlacementError(
                f"local_batch cannot cut {_named(path)}, {described(x)}. {TENSORS}"
            )
    for path, x in mislaid(batch, rows):
        raise PlacementError(
            f"local_batch cannot cut {_named(path)}, {described(x)}"
            + ("" if rows is None else f", as long as the batch has rows ({rows})")
            + f": each rank would get all of it. {TENSORS}"
        )
    if rows is None:
        return batch
    if rows < parts:
        raise PlacementError(
            f"a batch of {rows} rows cannot be cut over {parts} ranks. Use a larger batch."
        )
    part = slice(rows * index // parts, rows * (index + 1) // parts)
    return mapped(
        lambda x: x[part] if has_rows(x) else x,
        batch,
        lambda some: some[part] if len(some) == rows else some,
    )


TENSORS = (
    "A batch is made of tensors and NumPy arrays in dicts, lists, tuples or dataclasses: make it "
    'one (tokenizers do with return_tensors="pt"), or keep it out of the batch.'
)


def has_rows(x: Any) -> bool:
    """Whether a leaf of a batch is cut along dimension 0: a tensor, or a NumPy array."""
    if isinstance(x, Tensor):
        return x.ndim > 0
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and x.ndim > 0


def is_plain(x: Any) -> bool:
    """Whether a leaf has no rows, so that all may have it."""
    if isinstance(x, _PLAIN):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic | numpy.ndarray)


def _is_node(x: Any) -> bool:
    """Whether something is a node of a batch, by none of torch's trees."""
    return isinstance(x, Mapping) or (dataclasses.is_dataclass(x) and not isinstance(x, type))


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """``(entry, child)`` of a node's children, and what makes one like it; None of a leaf."""
    if type(node) in (tuple, list):
        return [*enumerate(node)], type(node)
    if isinstance(node, Tensor | Placed | Lazy | torch.Size):
        return None
    if not optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        children, metadata, entries, unflatten = optree.tree_flatten_one_level(
            node, none_is_leaf=True, namespace=NAMESPACE
        )
        return list(zip(entries, children, strict=True)), lambda new: unflatten(
            metadata, tuple(new)
        )
    if isinstance(node, Mapping):
        keys = list(node)
        return [(key, node[key]) for key in keys], lambda new: _mapping_like(
            node, dict(zip(keys, new, strict=True))
        )
    if _is_node(node):
        names = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
        return [(name, getattr(node, name)) for name in names], lambda new: _dataclass_like(
            node, dict(zip(names, new, strict=True))
        )
    return None


def _mapping_like(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other values."""
    try:
        if isinstance(old, dict | UserDict):  # of these a copy is known to have items of its own
            out: Any = copy.copy(old)
            if getattr(old, "__dict__", None) is old:  # its items are its attributes, too
                out.__dict__ = out
            for key, value in items.items():
                out[key] = value
            return out
        return type(old)(items)  # type: ignore[call-arg]
    except Exception as error:
        raise PlacementError(
            f"a {type(old).__name__} cannot be made anew with a part of its rows ({error}). Give "
            "the batch as a dict."
        ) from error


def _dataclass_like(old: Any, values: dict[str, Any]) -> Any:
    out = copy.copy(old)
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


def leaves_of(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a batch and their paths."""
    found = _children(node)
    if found is None:
        yield path, node
        return
    for entry, child in found[0]:
        yield from leaves_of(child, (*path, entry))


def mapped(f: Callable[[Any], Any], node: Any, lists: Callable[[list[Any]], list[Any]]) -> Any:
    """A batch with ``f(leaf)`` for each leaf, in order, its containers as their own types.

    Args:
        lists: what becomes of lists that a mapping keeps beside its items (a tokenizer's encodings,
            one for each row).
    """
    found = _children(node)
    if found is None:
        return f(node)
    children, make = found
    out = make([mapped(f, child, lists) for _, child in children])
    if isinstance(out, dict | UserDict) and hasattr(out, "__dict__"):
        for name, value in list(vars(out).items()):
            if type(value) is list and name not in out:
                vars(out)[name] = lists(value)
    return out


def mislaid(node: Any, rows: int | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Lists and tuples without tensors that are as long as the batch has rows, or of any length
    if it has none: outermost first."""
    found = _children(node)
    if found is None:
        return
    long = len(found[0]) > 0 if rows is None else len(found[0]) == rows
    if isinstance(node, list | tuple | deque) and long and not _holds_rows(node):
        yield path, node
    for entry, child in found[0]:
        yield from mislaid(child, rows, (*path, entry))


def _holds_rows(node: Any) -> bool:
    found = _children(node)
    if found is None:
        return has_rows(node) or isinstance(node, Placed | Lazy)
    return any(_holds_rows(child) for _, child in found[0])


def _named(path: Path) -> str:
    return f"the batch's {dotted(*path)}" if path else "the batch"


def described(x: Any) -> str:
    """What something is, in words: ``a list of str``."""
    kind = type(x).__name__
    if isinstance(x, list | tuple) and len(x):
        kind += f" of {type(x[0]).__name__}"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
