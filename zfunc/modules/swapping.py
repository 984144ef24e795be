"""Writing a params tree, and buffers, into a module's ``_parameters`` and ``_buffers``.

A slot is a place in one of these dicts. The way from a tree to the slots is compiled once, since
each call of each layer takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import optree
from torch import Tensor

from zfunc.engine.primitives import Ref
from zfunc.engine.versions import blind
from zfunc.errors import PlacementError
from zfunc.modules.units import Path, TensorInfo
from zfunc.trees.nodes import NAMESPACE, Layers, Tree

__all__ = ["BufferSlot", "Node", "Slot", "compile_tree", "misfit", "write"]

Slot = tuple[dict[str, Any], str]
"""``holder, attribute``: ``holder`` is a module's ``_parameters`` or ``_buffers``."""


Node = tuple[int, list[Any], list[Any], list[Any]]
"""One dict or stack of a params tree, compiled: its length, its leaves as (key, shape, holder,
attribute), its units as (index, number) and its other children as (key, node)."""


def compile_tree(
    infos: Any,
    slots: Callable[[TensorInfo], Iterable[Slot]],
    units: Mapping[Path, int] = MappingProxyType({}),
    at: Path = (),
) -> Node:
    """The program that :func:`write` runs: where the leaf under each path goes.

    Args:
        infos: a tree of ``TensorInfo``.
        slots: where a leaf is in the module.
        units: path of each unit -> its number in ``values``.
        at: where ``infos`` is in the tree that ``units`` speaks of.
    """
    leaves: list[Any] = []
    numbered: list[Any] = []
    children: list[Any] = []
    for key, x in enumerate(infos) if isinstance(infos, Layers) else infos.items():
        if isinstance(x, TensorInfo):
            leaves.extend((key, x.shape, holder, attribute) for holder, attribute in slots(x))
        elif not isinstance(infos, Layers):
            children.append((key, compile_tree(x, slots, units, (*at, key))))
        elif (*at, key) in units:
            numbered.append((key, units[*at, key]))
    return len(infos), leaves, numbered, children


def write(
    tree: Tree, node: Node, values: list[Any], want: Iterable[TensorInfo], where: str
) -> None:
    """Put the leaves of ``tree`` into their slots, and its units' subtrees into ``values``.

    Raises:
        PlacementError: the tree is not made of the leaves ``want``; says which differ.
    """
    todo: list[tuple[Any, Node]] = [(tree, node)]
    try:
        for part, (size, leaves, units, children) in todo:
            if len(part) != size:
                raise LookupError
            for key, shape, holder, attribute in leaves:
                x = part[key]
                if x.shape != shape:
                    raise LookupError
                holder[attribute] = x
            for index, unit in units:
                values[unit] = part[index]
            for key, child in children:
                todo.append((part[key], child))
    except (LookupError, TypeError, AttributeError):
        raise misfit(tree, want, where) from None


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


def misfit(tree: Tree, leaves: Iterable[TensorInfo], where: str) -> PlacementError:
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


_SMALL = 1 << 16


class BufferSlot:
    """One buffer, bound as a working copy: a call may do with it what it likes.

    Small buffers are copied for every call: the kernels behind ``F.batch_norm`` write
    running statistics without counting a version. The copy of a large one (a causal
    mask) is kept for the next call while neither it nor the caller's has changed.
    """

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.rest: Tensor = slots[0][0][slots[0][1]]
        self.small = self.rest.numel() <= _SMALL
        self.source, self.work = self.rest, self.rest
        self.versions: tuple[int, int] | None = None  # of both, where the copy may be kept

    def bind(self, source: Tensor) -> None:
        unknown = blind()
        if (
            unknown
            or source is not self.source
            or self.versions is None
            or self.versions[0] != source._version
        ):
            self.source, self.work = source, source.detach().clone()
            keep = not (self.small or unknown or source.is_inference())
            self.versions = (source._version, self.work._version) if keep else None
        for holder, attribute in self.slots:
            holder[attribute] = self.work

    def result(self) -> Tensor:
        """The value after a call; the source itself if it is large and was not written."""
        for holder, attribute in self.slots:
            now = holder.get(attribute)
            if now is not self.work:  # assigned anew
                return self.source if now is None else now.detach()
        if self.untouched():
            return self.source
        self.versions = None  # the copy is the caller's now
        return self.work

    def untouched(self) -> bool:
        """Whether the copy is known to be as it was made."""
        return self.versions is not None and self.versions[1] == self.work._version

    def release(self) -> None:
        for holder, attribute in self.slots:
            holder[attribute] = self.rest
        if blind() or not self.untouched():
            self.versions, self.source, self.work = None, self.rest, self.rest
