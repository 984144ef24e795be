"""Updates of those leaves alone that a step has used (``train_step(skip_unused=True)``).

A leaf that nobody used keeps its moments and takes no step, and each leaf counts its own updates,
as in ``torch.optim``, where the gradient of such a leaf is ``None``. An optimizer keeps one count
all the same: the step says of each leaf that takes part how many updates it has missed
(:func:`zfunc.trees.memory.missed`), and what depends on a leaf's own count subtracts that. So
states look alike with and without it, and the usual step, of which all leaves take part, knows
nothing of it. Schedules go by the count of steps, as those of ``torch.optim.lr_scheduler`` do.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.trees import memory, tree

__all__ = [
    "Pace",
    "Paces",
    "check_fit",
    "held",
    "map_own",
    "nothing",
    "own_count",
    "own_pace",
    "paced",
    "remembering",
]

Tree = Any
T = TypeVar("T")


class Pace(NamedTuple):
    """How one leaf goes: its weight decay, and how many updates it has missed."""

    decay: float
    missed: int


Rates = Callable[[str], float] | float
Paces = Callable[[str], Any] | float
"""Weight decay, of all leaves or by leaf path; a ``Pace``, or ``None`` for a leaf that rests, where
some leaves go their own ways."""


def paced(rates: Rates) -> Paces:
    """``rates`` where all leaves always take part; else a function of the path to its pace."""
    missed = memory.missed()
    if missed is None:
        return rates
    rate = rates if callable(rates) else lambda path: rates
    return lambda path: Pace(rate(path), missed[path]) if path in missed else None


def check_fit(tx: Any) -> None:
    """Raise ``CompositionError`` if a part of an optimizer does not know of leaves that rest."""
    what = getattr(tx, "unfit", "an optimizer of your own")
    if what is not None:
        raise CompositionError(
            f"skip_unused: {what} would touch parameters that a step has not used. Use sgd, adam, "
            "adamw, lion and what clips, scales, averages, masks and chains around them; or leave "
            "out skip_unused: then what nobody uses has a gradient of zero."
        )


def own_pace(pace: Pace | float) -> Pace:
    """The pace of a leaf of which only the weight decay may be known: it has missed nothing."""
    return pace if isinstance(pace, Pace) else Pace(pace, 0)


def own_count(count: Tensor, missed: int) -> Tensor:
    """A leaf's own number of this update.

    >>> own_count(torch.tensor(5), 2)
    tensor(3)
    """
    return count - missed if missed else count


def remembering(f: Callable[..., T]) -> Callable[..., T]:
    """``f``, which may be called when the step has gone on, and still is to know who rests."""
    if memory.missed() is None:
        return f
    now = contextvars.copy_context()
    return lambda *xs: now.copy().run(f, *xs)


def map_own(f: Callable[..., Tensor], first: Tree, *rest: Tree) -> Tree:
    """``f(missed, leaf, ...)`` of corresponding leaves, elementwise: each with what it missed."""
    missed = memory.missed()
    if missed is None:
        return tree.map(lambda *xs: f(0, *xs), first, *rest)
    return tree.map_leaves(lambda path, *xs: f(missed.get(path, 0), *xs), first, *rest)


def held(updates: Tree) -> Tree:
    """The updates, none for leaves that rest."""
    missed = memory.missed()
    if missed is None:
        return updates
    return tree.map_leaves(lambda path, u: u if path in missed else nothing(u), updates)


def nothing(x: Tensor) -> Tensor:
    """An update that leaves every number as it is: minus zero, for zero turns -0.0 into 0.0."""
    return torch.full_like(x, -0.0)
