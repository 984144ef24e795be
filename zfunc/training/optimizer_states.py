"""What to say of a state that another optimizer than the step's has made.

Nothing is looked at while all goes well: an update that fails is asked why, and one that gives back
a state of another class than it was given has read another optimizer's.
"""

from __future__ import annotations

from typing import Any

import optree
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.optim.base import present
from zfunc.optim.choices import unjudged
from zfunc.trees.forms import short
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed
from zfunc.trees.tree import dotted
from zfunc.trees.zeros import begun

__all__ = ["difference", "foreign", "same_kind", "told"]

Found = tuple[str, str, str]
"""A path, what is there, and what should be."""


def foreign(tx: Any, opt_state: Any, params: Any) -> CompositionError | None:
    """The error for a state that is not like those of ``tx``; None if it is.

    >>> from zfunc import optim
    >>> import torch
    >>> w = {"w": torch.zeros(2)}
    >>> str(foreign(optim.sgd(0.1), optim.adam(0.1).init(w), w)).partition(", but")[0]
    'opt_state is AdamState(count, mu, nu)'
    """
    if getattr(type(opt_state), "placed_by", None):  # a transform's: it says so itself
        return None
    try:
        with unjudged():
            expected = begun(tx, params)
    except Exception:  # then what the update has raised says more
        return None
    found = difference(opt_state, expected)
    return None if found is None else told(found)


def told(found: Found) -> CompositionError:
    """The error for a difference."""
    path, here, expected = found
    return CompositionError(
        f"{path} is {here}, but this step's optimizer keeps {expected} there: the state was made "
        "with another optimizer, or of other parameters. Give TrainState.create and train_step the "
        "same optimizer, or begin its state anew: state.replace(opt_state=tx.init(state.params))."
    )


def same_kind(before: Any, after: Any, at: str = "opt_state") -> Found | None:
    """Where an update has read a state of one class and made one of another, if it has.

    >>> from zfunc import optim
    >>> same_kind(optim.EmptyState(), optim.EmptyState()) is None
    True
    """
    if not (isinstance(before, tuple) and isinstance(after, tuple)):
        return None
    if type(before) is not type(after):
        named = hasattr(before, "_fields") and hasattr(after, "_fields")
        return (at, _said(before), _said(after)) if named else None
    pairs = zip(getattr(before, "_fields", range(len(before))), before, after, strict=False)
    found = (same_kind(x, y, dotted(at, str(name))) for name, x, y in pairs)
    return next(filter(None, found), None)


def difference(found: Any, expected: Any, at: str = "opt_state") -> Found | None:
    """The first place at which a state is unlike another; numbers and dtypes do not count."""
    if isinstance(found, Lazy) or isinstance(expected, Lazy):
        return None
    if isinstance(found, Placed | Box) or isinstance(expected, Placed | Box):
        return _of_leaves(found, expected, at)
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return None if found.shape == expected.shape else (at, _said(found), _said(expected))
    if type(found) is not type(expected):
        return at, _said(found), _said(expected)
    mine, theirs = _children(found), _children(expected)
    for name in {**mine, **theirs}:
        path = dotted(at, name)
        if name not in mine or name not in theirs:
            return path, _said(mine.get(name)), _said(theirs.get(name))
        if (inner := difference(mine[name], theirs[name], path)) is not None:
            return inner
    return None


def _children(node: Any) -> dict[str, Any]:
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        return {}
    children, _, entries, _ = optree.tree_flatten_one_level(
        node, none_is_leaf=True, namespace=NAMESPACE
    )
    names = getattr(node, "_fields", entries)
    return {str(name): child for name, child in zip(names, children, strict=True)}


def _of_leaves(found: Any, expected: Any, at: str) -> Found | None:
    """Trees of which a rank has parts, by what leaves they have."""
    mine, theirs = list(present(found)), list(present(expected))
    for path in (*theirs, *mine):
        if path not in mine:
            return dotted(at, path), "nothing", "a leaf"
        if path not in theirs:
            return dotted(at, path), "a leaf", "nothing"
    return None


def _said(node: Any) -> str:
    if node is None:
        return "nothing"
    if isinstance(node, Tensor):
        return short(node.dtype, node.shape)
    name = type(node).__name__
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return f"{name}({', '.join(node._fields)})"
    return f"a {name} of {len(node)}" if isinstance(node, tuple | list | dict) else f"a {name}"
