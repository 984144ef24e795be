"""Marks of plain leaves, which are tensors of the user's: frozen, a part of a full one, spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["any_spent", "carry", "gone", "part_of", "spent"]

CARRIED = ("_zfunc_frozen", "_zfunc_part")  # that successors have, too


def carry(new: Any, old: Any) -> Any:
    """Let the successor of a plain leaf be frozen, or a part of a full one, if that is."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor) and old.__dict__):
        return new
    marks = old.__dict__
    kept = {key: marks[key] for key in CARRIED if key in marks and key not in new.__dict__}
    # A spent leaf has no shape, but it has its marks.
    if kept and ("_zfunc_donated" in marks or new.shape == old.shape):
        if type(new) is Tensor:  # perhaps somebody else's, which is not to be marked there
            new = new.view_as(new)
        new.__dict__.update(kept)
    return new


def part_of(leaf: Any) -> Any:
    """What a plain leaf says of what it is a part (a ``splits.Part``), if anything."""
    return leaf.__dict__.get("_zfunc_part") if isinstance(leaf, Tensor) else None


def spent(x: Any) -> bool:
    """Whether a tensor's memory was given to a later state (see ``donate``)."""
    return isinstance(x, Tensor) and "_zfunc_donated" in x.__dict__


def any_spent(xs: Sequence[Any]) -> bool:
    """Whether the memory of one of them was given to a later state."""
    return any(isinstance(x, Tensor) and "_zfunc_donated" in x.__dict__ for x in xs)


def gone(path: str) -> str:
    """What to say of a leaf whose memory holds a later state."""
    return (
        f"{path or 'this tree'} was donated: its memory holds a later state. Use the state "
        "that the step returned, or leave out `donate` to keep old states."
    )
