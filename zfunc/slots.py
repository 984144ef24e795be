"""Slots: places in a module's dicts, and how a tree or a set of buffers gets into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.primitives import Ref
from zfunc.tree import NAMESPACE, Tree
from zfunc.units import Leaf

__all__ = ["BufferSlot", "Node", "Slot", "misfit", "write"]

Slot = tuple[dict[str, Any], str]
"""``holder, attribute``: ``holder`` is a module's ``_parameters`` or ``_buffers``."""


@dataclass
class Node:
    """One dict or stack of a params tree, and where its leaves go; compiled once."""

    leaves: list[tuple[Any, torch.Size, tuple[Slot, ...]]] = field(default_factory=list)
    children: dict[Any, Node] = field(default_factory=dict)
    units: list[tuple[int, int]] = field(default_factory=list)
    length: int | None = None

    @property
    def size(self) -> int:
        return len(self.leaves) + len(self.children) if self.length is None else self.length

    def at(self, path: Sequence[Any]) -> Node:
        """The node under a path, made if need be."""
        node = self
        for key in path:
            node = node.children.setdefault(key, Node())
        return node


class _Mismatch(Exception):
    """The tree has another structure; the caller says where."""


def write(tree: Tree, node: Node, values: list[Any], want: Iterable[Leaf], where: str) -> None:
    """Put the leaves of ``tree`` into their slots, and its units' subtrees into ``values``.

    Raises:
        PlacementError: the tree is not made of the leaves ``want``; says which differ.
    """
    try:
        _write(tree, node, values)
    except _Mismatch:
        raise misfit(tree, want, where) from None


def _write(tree: Any, node: Node, values: list[Any]) -> None:
    try:
        if len(tree) != node.size:
            raise _Mismatch
        for key, shape, slots in node.leaves:
            x = tree[key]
            if x.shape != shape:
                raise _Mismatch
            for holder, attribute in slots:
                holder[attribute] = x
        for index, unit in node.units:
            values[unit] = tree[index]
        children = [(tree[key], child) for key, child in node.children.items()]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _Mismatch from None
    for subtree, child in children:
        _write(subtree, child, values)


def _shapes(tree: Tree, prefix: str) -> dict[str, Any]:
    """name -> shape of each leaf; a layer that has not entered yet counts as ``...``."""
    keys, items, _ = optree.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, Ref), none_is_leaf=True, namespace=NAMESPACE
    )
    names = [".".join(part for part in (prefix, *map(str, key)) if part) for key in keys]
    return {
        name: ... if isinstance(x, Ref) else tuple(getattr(x, "shape", ("no tensor",)))
        for name, x in zip(names, items, strict=True)
    }


def misfit(tree: Tree, leaves: Iterable[Leaf], where: str) -> PlacementError:
    """The error that names the leaves in which ``tree`` differs from ``leaves``."""
    want = {leaf.name: leaf for leaf in leaves}
    have = _shapes(tree, where.removeprefix("layer ") if where.startswith("layer ") else "")
    waiting = tuple(name + "." for name, shape in have.items() if shape is ...)
    wrong = [
        f"{name} {have[name]} instead of {tuple(leaf.shape)}"
        for name, leaf in want.items()
        if name in have and have[name] != tuple(leaf.shape)
    ]
    kinds = {
        "missing": [n for n in want if n not in have and not n.startswith(waiting)],
        "unexpected": [n for n in have if n not in want and have[n] is not ...],
        "of another shape": wrong,
    }
    listed = "; ".join(
        f"{kind}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for kind, names in kinds.items()
        if names
    )
    return PlacementError(
        f"these params do not fit {where}: {listed or 'they are nested differently'}. "
        "Pass a tree of the structure of Functional.params."
    )


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _blind() -> bool:
    """In inference mode and inside torch.func, versions and identities say nothing."""
    level = torch._C._functorch.peek_interpreter_stack()
    return level is not None or torch.is_inference_mode_enabled()


class BufferSlot:
    """One buffer: bound as a working copy of the caller's, reused while both stay as they are."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.rest: Tensor = slots[0][0][slots[0][1]]
        self.source: Tensor | None = None
        self.work = self.rest
        self.versions = (-1, -1)

    def bind(self, source: Tensor) -> None:
        same = source is self.source and (_version(source), _version(self.work)) == self.versions
        if not same or _blind():
            self.source, self.work = source, source.detach().clone()
            self.versions = (_version(source), _version(self.work))
        for holder, attribute in self.slots:
            holder[attribute] = self.work

    def result(self) -> Tensor:
        """The value after a call: the source itself, or a tensor of its own if it changed."""
        assert self.source is not None
        source, work = self.source, self.work
        for holder, attribute in self.slots:
            now = holder.get(attribute)
            if now is not work:  # assigned anew
                return source if now is None else now.detach()
        if not _blind() and _version(work) == self.versions[1]:
            return source
        self.source = None  # the copy is the caller's now
        return work

    def release(self) -> None:
        for holder, attribute in self.slots:
            holder[attribute] = self.rest
        if _blind():
            self.source, self.work = None, self.rest
