"""Parameters that stay as they are: which leaves of a params tree get no gradient.

Two things say so. The *structure* of a functionalized module's params does, where parameters of
the module were frozen by ``requires_grad_(False)``: a dict that holds some of them is a
:class:`zfunc.trees.nodes.Frozen`, and every copy that keeps the structure keeps that. A *mark* on
the leaf does, where ``TrainState.create`` was given ``trainable=``: the state keeps the paths, and
renews the marks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.trees.nodes import MAPPED, NAMESPACE, Frozen, Lazy, Placed, Tree
from zfunc.trees.tree import dotted

__all__ = [
    "all_frozen",
    "check_trainable",
    "freeze",
    "frozen_among",
    "frozen_paths",
    "is_frozen",
    "leaves_at",
    "thawed",
    "without_frozen",
]

MOST = 256  # structures that are remembered


class _Masks(threading.local):
    """Ranks that are threads have equal structures, long to compare; those of one are the same."""

    def __init__(self) -> None:
        self.masks: dict[optree.PyTreeSpec, tuple[bool, ...]] = {}
        self.indices: dict[Any, list[int]] = {}


_seen = _Masks()


def freeze(leaf: Tensor) -> Tensor:
    """Mark a plain leaf as frozen: it gets no gradient."""
    leaf.__dict__["_zfunc_frozen"] = True
    return leaf


def is_frozen(leaf: Any) -> bool:
    """Whether a plain leaf was marked by :func:`freeze`."""
    return isinstance(leaf, Tensor) and leaf.__dict__.get("_zfunc_frozen", False)


def check_trainable(path: str, leaf: Any) -> None:
    """Raise ``PlacementError`` if a leaf cannot be a parameter: it is no floating-point tensor."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return
    path = path or "(the whole tree)"
    if isinstance(leaf, Tensor) and leaf.is_complex():
        raise PlacementError(
            f"parameter {path} has dtype {leaf.dtype}; parameters are floating-point tensors. "
            "Keep its real view (torch.view_as_real), and call torch.view_as_complex on it where "
            "it is used. (Complex tensors that are not trained may be `buffers`.)"
        )
    what = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else f"type {type(leaf).__name__}"
    raise PlacementError(
        f"parameter {path} has {what}; parameters are floating-point tensors. Integer tensors "
        "belong into `buffers` or `aux` (module.register_buffer), or are further arguments of the "
        "loss; other things belong outside the state."
    )


def leaves_at(spec: optree.PyTreeSpec, paths: tuple[str, ...]) -> list[int]:
    """Which leaves of a tree of this structure the dotted paths lead to."""
    found = _seen.indices.get((spec, paths))
    if found is None:
        if len(_seen.indices) >= MOST:
            _seen.indices.clear()
        wanted = frozenset(paths)
        found = [i for i, keys in enumerate(spec.paths()) if dotted(*keys) in wanted]
        _seen.indices[spec, paths] = found
    return found


def frozen_among(
    leaves: Sequence[Any], spec: optree.PyTreeSpec, marked: Callable[[Any], bool] = is_frozen
) -> list[bool]:
    """For each leaf of a plain tree whether it gets no gradient.

    Args:
        leaves, spec: the tree's, ``None`` being a leaf.
        marked: what a mark on a leaf is.
    """
    mask = _seen.masks.get(spec)
    if mask is None:
        if len(_seen.masks) >= MOST:
            _seen.masks.clear()
        mask = _seen.masks[spec] = tuple(_mask(spec, False))
    return [still or marked(x) for still, x in zip(mask, leaves, strict=True)]


def _mask(spec: optree.PyTreeSpec, still: bool) -> list[bool]:
    if still or spec.num_nodes == 1:
        return [still] * spec.num_leaves
    keys: frozenset[str] = frozenset()
    level: Any = spec.one_level()
    if spec.type is Frozen:
        keys = level.unflatten(range(spec.num_children)).frozen
    children = zip(spec.entries(), spec.children(), strict=True)
    return [x for entry, child in children for x in _mask(child, entry in keys)]


def _leaves(params: Tree) -> tuple[list[Any], optree.PyTreeSpec, list[bool]]:
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=MAPPED)
    return leaves, spec, frozen_among(leaves, spec)


def frozen_paths(params: Tree) -> tuple[str, ...]:
    """Dotted paths of the leaves of a plain tree that get no gradient, in leaf order."""
    _, spec, mask = _leaves(params)
    if not any(mask):
        return ()
    rows = zip(spec.paths(), mask, strict=True)
    return tuple(dotted(*keys) for keys, still in rows if still)


def without_frozen(params: Tree) -> Tree:
    """A tree with ``None`` at each leaf that gets no gradient: what optimizers have moments for.

    >>> without_frozen(Frozen({"a": 1, "w": 2}, {"w"}))["w"] is None
    True
    """
    leaves, spec, mask = _leaves(params)
    if not any(mask):
        return params
    rows = zip(leaves, mask, strict=True)
    return optree.tree_unflatten(spec, [None if still else x for x, still in rows])


def thawed(params: Tree) -> Tree:
    """A plain tree of which every leaf gets a gradient."""
    if isinstance(params, Frozen):
        params = dict(params)
    if params is None or isinstance(params, Placed | Lazy):
        return params
    if optree.tree_is_leaf(params, namespace=NAMESPACE):
        return params.detach() if isinstance(params, Tensor) and is_frozen(params) else params
    children, metadata, _, unflatten = optree.tree_flatten_one_level(
        params, none_is_leaf=True, namespace=NAMESPACE
    )
    return unflatten(metadata, tuple(thawed(child) for child in children))


def all_frozen(some: Sequence[str]) -> PlacementError:
    """The error of who differentiates, or trains, a tree of which no leaf gets a gradient.

    Args:
        some: paths of its leaves.
    """
    return PlacementError(
        f"all parameters are frozen ({', '.join(some[:3])}{', ...' if len(some) > 3 else ''}): "
        "there is nothing to train. Those of a module stay frozen where functionalize() found "
        "requires_grad=False: TrainState.create(params, tx, trainable=lambda path: ...) says "
        "otherwise, or module.requires_grad_(True) before functionalize(). A teacher is applied, "
        "or passed as a further argument of the loss."
    )
