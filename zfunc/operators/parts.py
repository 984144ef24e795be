"""What an operator is told of a leaf, and the errors where a leaf is not what the operator needs.

The layout marks the leaves that it hands to a loss (:func:`zfunc.layout.splits.mark`). A copy of
such a leaf has no mark, and nobody can tell whether it is a part: a running step that splits takes
none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.splits import Part
from zfunc.trees.marks import part_of
from zfunc.trees.memory import current

__all__ = ["RUNS", "found", "found_beside", "refused", "runs_of", "splits_now"]

RUNS = "_zfunc_runs"  # which features of all a tensor has: in the first step, of what columns made


def found(name: str, leaf: Tensor, what: str) -> Part | None:
    """Of what a leaf is a part; ``None`` where nothing is split among several ranks.

    Args:
        name: the operator.
        leaf: one of its arguments.
        what: the name of that argument.

    Raises:
        PlacementError: a step that splits is running, and the leaf does not say what it is.
    """
    part = part_of(leaf)
    if part is None:
        if splits_now():
            raise PlacementError(
                f"zf.{name}: {what} {list(leaf.shape)} does not say of what it is a part, and "
                "this step splits its leaves. A copy (w.bfloat16(), w * 2, a slice) does not know: "
                "give the leaf itself as the loss gets it. For a tensor that is no leaf, and whole "
                "on every rank, take torch.nn.functional."
            )
        return None
    return part if part.group.size > 1 else None


def splits_now() -> bool:
    """Whether a step is running that splits leaves among several ranks."""
    running = current()
    split: Any = None if running is None else running.notes.get("split")
    return split is not None and split.group.size > 1


def found_beside(name: str, leaf: Tensor, what: str) -> Part:
    """Of what a leaf is a part, beside one that says it.

    Raises:
        PlacementError: it does not say so.
    """
    part = part_of(leaf)
    if part is None:
        raise PlacementError(
            f"zf.{name}: {what} {list(leaf.shape)} does not say of what it is a part, and the "
            "weight beside it does. Give the leaf itself as the loss gets it, not a copy."
        )
    return part


def runs_of(x: Tensor) -> Any:
    """Which features of all these are, from where to where; None where it is not known."""
    part = part_of(x)
    if part is not None and part.split is not None and part.group.size > 1:
        return part.split.runs
    return x.__dict__.get(RUNS)


def refused(name: str, leaf: Tensor, what: str, part: Part, wish: str, remedy: str) -> Exception:
    """The error for a leaf that is split in another way than an operator needs."""
    split = part.split
    how = "whole" if split is None else f"split along dimension {split.dim} of {split.size}"
    return PlacementError(
        f"zf.{name}: {what} {list(leaf.shape)} is {how} on rank {part.group.rank} of "
        f"{part.group.size} of axis {part.axis!r}; expected {wish}. {remedy}"
    )
