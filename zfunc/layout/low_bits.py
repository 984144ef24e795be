"""Parameters in low bits inside a training state: they are read, and never change."""

from __future__ import annotations

from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.splits import Encoded
from zfunc.trees import tree
from zfunc.trees.nodes import Tree

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


def _low(params: Tree) -> list[str]:
    return [path for path, x in tree.flatten_names(params).items() if isinstance(x, Encoded)]
