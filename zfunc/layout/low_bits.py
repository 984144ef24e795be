"""Parameters in low bits inside a training state: they are read, and never change."""

from __future__ import annotations

from collections.abc import Iterator

import optree

from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.readable import Readable
from zfunc.layout.splits import Encoded
from zfunc.trees.nodes import MAPPED, Tree, in_full
from zfunc.trees.tree import dotted

__all__ = ["check_none_trains", "refuse_low_bits"]


def check_none_trains(trained: Tree) -> None:
    """Raise ``PlacementError`` if a leaf that trains is stored in low bits."""
    for path in _low(trained):
        raise PlacementError(
            f"parameter {path} is in low bits, whose values never change, and it would train. "
            "Freeze it (requires_grad_(False) in the module, or trainable=), or leave it out of "
            "quantize_tree(..., include=)."
        )


def refuse_low_bits(state: Tree, name: str, advice: str) -> None:
    """Raise ``CompositionError`` if a state that a transform places has leaves in low bits."""
    for path in _low(state):
        raise CompositionError(
            f"{name} cannot place {path}: it would have to convert what is in low bits. {advice}"
        )


def _low(params: Tree) -> Iterator[str]:
    """Paths of what is in low bits, as layouts know it: nothing is gathered."""
    keys, items, _ = optree.tree_flatten_with_path(in_full(params), namespace=MAPPED)
    for key, x in zip(keys, items, strict=True):
        if isinstance(x, Readable):
            slots = (slot for slot in x.layout.slots if slot is not None)
            yield from (dotted(*key, slot.path) for slot in slots if slot.code is not None)
        elif isinstance(x, Encoded):
            yield dotted(*key)
