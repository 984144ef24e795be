"""Functions of whole trees that are to be applied to a part of their units at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from zfunc.trees import norms
from zfunc.trees.nodes import PLACED, Placed, Tree, leaves_in
from zfunc.trees.tree import align, first_placed, global_norm

__all__ = ["by_unit", "known_norm", "streams"]


def streams(*trees: Tree) -> bool:
    """Whether something in the trees is evaluated unit by unit, later (state on disk)."""
    return any(
        isinstance(node, Placed) and node.streams
        for one in trees
        for node in leaves_in(one, PLACED)
    )


def known_norm(tree: Tree) -> Tensor:
    """The global norm, on the host where the tree is evaluated there: it is waited for, once.

    >>> import torch
    >>> known_norm({"w": torch.tensor([3.0, 4.0])})
    tensor(5.)
    """
    rows = leaves_in(tree, PLACED)
    streamed = next((x for x in rows if isinstance(x, Placed) and x.streams), None)
    if streamed is None:
        return global_norm(tree)

    def at_hand(_: Any) -> Tensor:
        norm = global_norm(tree)
        return norm if norm.device.type == "cpu" else streamed.at_hand(norm)

    return norms.shared(rows, at_hand, "norms at hand")


def by_unit(fn: Callable[..., Sequence[Tree]], outs: int, *trees: Tree) -> tuple[Tree, ...]:
    """``fn(*trees)``, a tuple of ``outs`` trees placed like the first.

    ``fn`` works on placed trees of any part of the units at a time, and must be right for
    each part. Where trees stream it is called later, once for every unit.

    >>> from zfunc import tree
    >>> by_unit(lambda a, b: (tree.map(lambda x, y: x + y, a, b), a), 2, {"w": 1}, {"w": 2})
    ({'w': 3}, {'w': 1})
    """
    if not streams(*trees):
        return tuple(fn(*trees))
    rows, spec = align(trees)
    columns: list[list[Any]] = [[None] * len(rows) for _ in range(outs)]

    def alone(i: int) -> Callable[..., Sequence[Any]]:
        def call(*parts: Any) -> Sequence[Any]:
            def holding(x: Any) -> Tree:
                return optree.tree_unflatten(
                    spec, [x if k == i else None for k in range(len(rows))]
                )

            made = fn(*(holding(part) for part in parts))
            return [spec.flatten_up_to(one)[i] for one in made]

        return call

    for i, row in enumerate(rows):
        if row[0] is None:
            continue
        placed = first_placed(row)
        new = alone(i)(*row) if placed is None or not placed.streams else None
        if new is None:
            assert placed is not None
            new = placed.by_unit(alone(i), outs, row)
        for column, x in zip(columns, new, strict=True):
            column[i] = x
    return tuple(optree.tree_unflatten(spec, column) for column in columns)
