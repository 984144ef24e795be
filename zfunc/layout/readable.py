"""Placed trees that can be read like the tree that they stand for.

``placed["head"]`` and ``{**placed}`` give placed parts, and a part that is a single leaf
gathers itself, without gradient, when a torch function meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import optree

from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import NAMESPACE, Placed, Tree

__all__ = ["Readable"]

_OWN = ("layout", "flats", "skeleton", "inputs")  # absent only while a node is being made


class Readable(Placed):
    """A placed tree with a layout.

    Attributes:
        layout: how the tree is cut.
    """

    layout: Layout

    @property
    def placed_by(self) -> tuple[str, str] | None:
        return self.layout.by

    @property
    def group(self) -> Group:
        """The ranks over which it is cut."""
        raise NotImplementedError

    @property
    def summing(self) -> Group:
        """The ranks that together have every element of every leaf."""
        return self.group if self.layout.along is None else self.layout.holders

    def __getitem__(self, entry: Any) -> Any:
        raise NotImplementedError

    def forms(self) -> Tree:
        """What the full leaves are."""
        from zfunc.layout.forms import forms  # where something is shown

        return forms(self.layout)

    def _repr_html_(self) -> str:
        from zfunc.trees.forms import as_html, form

        return as_html(form(self))

    def reassembled(self, layout: Layout, new: Tree) -> Readable:
        """One node like this of a tree that was put together from placed parts and plain leaves.

        Raises:
            PlacementError: it has not the leaves of ``layout``.
        """
        raise NotImplementedError

    def get(self, path: str) -> Any:
        node: Readable = self
        rest = path
        while rest:
            node, rest = node._descend(rest, path)
        return node.full()

    def _descend(self, rest: str, path: str) -> tuple[Readable, str]:
        """The child that the longest fitting beginning of ``rest`` names."""
        entries = self.layout.spec.entries()
        for entry in sorted(entries, key=lambda e: len(str(e)), reverse=True):
            name = str(entry)
            if rest == name or rest.startswith(name + "."):
                return self[entry], rest[len(name) + 1 :]
            if not name:
                return self[entry], rest
        raise PlacementError(
            f"no leaf at {path!r}: here are {', '.join(map(str, self.layout.spec.entries()))}."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        if not self.layout.spec.entries():
            return getattr(self.full(), name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this {type(self).__name__} tree has no child {name!r}") from None

    def keys(self) -> list[Any]:
        return list(self.layout.spec.entries())

    def values(self) -> list[Any]:
        return [self[key] for key in self.keys()]

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self[key]) for key in self.keys()]

    def __contains__(self, key: Any) -> bool:
        return key in self.layout.spec.entries()

    def __len__(self) -> int:
        return len(self.layout.spec.entries())

    def __iter__(self) -> Iterator[Any]:
        return iter(
            self.keys() if issubclass(self.layout.spec.type or list, dict) else self.values()
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def plain(x: Any) -> Any:
            return x.full() if isinstance(x, Readable) else x

        values: Any = [*args, kwargs or {}]
        values = optree.tree_map(
            plain, values, is_leaf=lambda x: isinstance(x, Readable), namespace=NAMESPACE
        )
        return func(*values[:-1], **values[-1])


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Readable, *args: Any) -> Any:
        return getattr(self.full(), name)(*args)

    return operate


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "pow",
    "radd",
    "rsub",
    "rmul",
    "rmatmul",
    "neg",
):
    setattr(Readable, f"__{_name}__", _operator(f"__{_name}__"))
