"""Whole trees as the few buffers in which their leaves lie, for functions of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from zfunc.trees import tree
from zfunc.trees.nodes import OPAQUE, Box, Tree, Unprinted

__all__ = ["alike", "elementwise", "in_box", "in_flats"]


def alike(old: Tree, new: Tree) -> Tree:
    """A plain tree, with the layout of the one that it comes after if that has one."""
    return old.boxed(new) if isinstance(old, Box) else new


def in_flats(trees: Sequence[Any]) -> Sequence[Any]:
    """Whole trees with one layout as nodes of the flats that their leaves lie in.

    Args:
        trees: the first, gradients perhaps, is copied into flats if it lies in none; where one of
            the others lies in none, all are given back as they are.
    """
    first, *rest = trees
    if not rest or not all(isinstance(x, Box) for x in rest):
        return trees
    layout = rest[0].layout
    first = first if isinstance(first, Box) else rest[0].boxed(first)
    if not all(isinstance(x, Box) and x.layout == layout for x in (first, *rest)):
        return trees
    flats = [x.flat for x in rest]
    if any(x is None for x in flats):
        return trees
    mine = first.flat
    if mine is None:
        mine = first.staged()
    return trees if mine is None else [mine, *flats]


def in_box(like: Any, new: Any) -> Any:
    """A node of flats as a whole tree like the one that it was made of."""
    return like.holding(new) if isinstance(like, Box) else new


def elementwise(f: Callable[..., Any], first: Tree, *rest: Tree) -> Tree:
    """``tree.map`` of an elementwise ``f``, which is given whole flats where leaves lie in such."""
    try:
        leaves, spec = optree.tree_flatten(first, none_is_leaf=True, namespace=OPAQUE)
        with Unprinted():
            rows = list(zip(leaves, *map(spec.flatten_up_to, rest), strict=True))
    except (ValueError, TypeError):
        return tree.map(f, first, *rest)
    return optree.tree_unflatten(spec, [_each(f, row) for row in rows])


def _each(f: Callable[..., Any], row: Sequence[Any]) -> Any:
    if row[0] is None:
        return None
    if not isinstance(row[0], Box) or row[0].flat is None:
        return tree.map(f, *row)
    flats = in_flats(row) if len(row) > 1 else [row[0].flat]
    return in_box(row[0], tree.map(f, *flats)) if flats is not row else tree.map(f, *row)
