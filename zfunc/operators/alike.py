"""Whether ranks that split layers have come to the same, where all of them have all.

A product with a split leaf that no function knows of gives each rank other numbers, and so does a
stream of which a loss sees some positions. It is looked for once, behind the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded
from zfunc.ranks.comm import Group
from zfunc.ranks.digests import digests
from zfunc.trees.nodes import OPAQUE
from zfunc.trees.tree import dotted

__all__ = ["check_alike"]

PLAINLY = (
    "a split leaf was used by a plain product, or its counterpart is not split. Compute with split "
    "leaves by zf.column, zf.row, zf.embed and zf.cross_entropy, or leave them whole "
    "(rules={...: None}). Compute from a model's own parameters, or without gradients, what its "
    "layers read between column and row."
)
ON_POSITIONS = (
    "split(sequence=True) cuts the stream along positions, of which each rank has some. The loss "
    "is to be that of zf.cross_entropy, which puts them together, or of zf.column's outputs."
)


def check_alike(
    ranks: Group,
    state: Any,
    losses: Sequence[Tensor] = (),
    beside: Sequence[Tensor] = (),
    on_positions: bool = False,
) -> None:
    """Raise ``PlacementError`` if losses or whole leaves differ between ranks; a collective.

    They do where a product with a split leaf has no function that knows of it.

    Args:
        state: behind a step.
        losses: of this rank, in that step.
        beside: gradients of plain tensors beside placed trees, which no later check sees.
        on_positions: whether functions ran on positions of the stream.
    """
    nodes, spec = optree.tree_flatten(state, namespace=OPAQUE)
    rows = ["a loss"] * len(losses) + ["a gradient of a plain tensor"] * len(beside)
    values = [*losses, *beside]
    for path, node in zip(spec.paths(), nodes, strict=True):
        if isinstance(node, Replicated | Sharded) and node.layout.along is not None:
            flat = node.standing() if isinstance(node, Replicated) else node
            pieces = {} if flat is None else flat.pieces()
            for slot in node.layout.present:
                if slot.split is None and slot.index in pieces:
                    rows.append(dotted(*path, slot.path))
                    values.append(pieces[slot.index])
    every = ranks.exchange(digests(values), label="split alike")
    for i, name in enumerate(rows):
        if len({theirs[i] for theirs in every}) > 1:
            why = ON_POSITIONS if on_positions and i < len(losses) else PLAINLY
            raise PlacementError(
                f"after this step {name}, which is whole on all ranks of axis {ranks.axis!r}, has "
                f"other values on some of them: {why}"
            )
