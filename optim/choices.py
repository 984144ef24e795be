"""Masks and labels that choose no leaf: said once, when a state is made.

A pattern with a typo trains every leaf in the wrong way, and nobody sees it. What a choice
is judged by is the whole tree that ``init`` is given, the places of leaves without a value (frozen
ones, those of other labels) among it.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree

from zfunc.errors import PlacementError
from zfunc.ranks import world
from zfunc.trees.nodes import MAPPED, Lazy, Placed
from zfunc.trees.tree import paths

__all__ = ["judged", "unjudged"]

Tree = Any
SHOWN = 5  # paths

_SILENT: contextvars.ContextVar[bool] = contextvars.ContextVar("zfunc_unjudged", default=False)


@contextmanager
def unjudged() -> Iterator[None]:
    """While ``init`` sees another tree than that of the parameters: a sample, a unit."""
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


def judged(
    init: Callable[[Tree], Any], choices: Mapping[str, Callable[[str], Any]]
) -> Callable[[Tree], Any]:
    """``init``, which warns once of each choice that no leaf of the whole tree meets.

    Args:
        choices: functions of leaf paths, by what to say of one that is never true.
    """
    said: set[str] = set()

    def run(params: Tree) -> Any:
        if not _SILENT.get() and len(said) < len(choices):
            _judge(choices, params, said)
        return init(params)

    return run


def _judge(choices: Mapping[str, Callable[[str], Any]], params: Tree, said: set[str]) -> None:
    if world.current().rank:  # one speaks for all; simulated ranks share what has been said
        return
    known = _all_paths(params)
    for what, choice in choices.items():
        if known and what not in said and not _meets(choice, known):
            said.add(what)
            warnings.warn(_text(what, known), stacklevel=4)


def _text(what: str, known: list[str]) -> str:
    some = ", ".join(map(repr, known[:SHOWN])) + (", ..." if len(known) > SHOWN else "")
    return (
        f"{what} none of the {len(known)} parameters. Their paths are {some}: a mask or label is "
        "a function of these, or a tree of the parameters' structure."
    )


def _all_paths(params: Tree) -> list[str]:
    """The paths of a whole tree; none if a part of it is not known."""
    for node in optree.tree_leaves(params, namespace=MAPPED):
        if isinstance(node, Lazy):
            return []
        if isinstance(node, Placed) and len(node.names()) < getattr(node, "num_leaves", 1):
            return []
    return paths(params)


def _meets(choice: Callable[[str], Any], known: list[str]) -> bool:
    """Whether a choice is true of a leaf. One that does not know all leaves is not judged."""
    for path in known:
        try:
            if choice(path):
                return True
        except PlacementError:  # a tree of the leaves that are here says nothing about others
            continue
        except Exception:  # a user's own function, which need not bear paths that it will not get
            return True
    return False
