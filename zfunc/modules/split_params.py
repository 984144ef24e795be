"""Whether a model's params are parts of leaves, and by which plan: they say so themselves.

Placed trees and layers that have not entered yet say it by their layout, leaves that have entered
by a mark. The running step is not asked: a teacher beside a split model is whole, and so is a
model whose leaves are all whole beside others in one tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.primitives import Ref
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.layout import Layout, Slot
from zfunc.layout.readable import Readable
from zfunc.layout.splits import Part
from zfunc.modules.split_plans import SplitPlan
from zfunc.ranks.comm import Group
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import Box, Layers, Tree

__all__ = ["check_parts", "splitting_of"]

Row = tuple[dict[str, Any], str, str]
"""Where a leaf that is split is in a module, and what it is called."""


def splitting_of(params: Tree) -> tuple[SplitPlan, Group] | None:
    """The plan of params some of which are parts, and among which ranks; None of whole ones.

    Raises:
        PlacementError: they are split by rules for functions, and a module runs on them.
        CompositionError: the plan is for another number of ranks.
    """
    todo = [params]  # the first leaf, or what stands for several, comes last
    while todo:
        node = todo.pop()
        if isinstance(node, dict | Layers):
            todo += reversed([*node.values()] if isinstance(node, dict) else [*node])
        elif node is not None:
            part = _first_part(node)
            if part is None:
                return None  # others of the same tree are whole, too
            if part.split is not None:
                return _planned(part)
    return None


def check_parts(rows: Iterable[Row], ways: int) -> None:
    """Raise ``PlacementError`` if one of these leaves does not say that it is a part.

    It was made of one then, and nobody knows how: by its norm, say, which a rank has of its part.
    """
    for holder, attribute, name in rows:
        if _first_part(holder[attribute]) is None:
            raise PlacementError(
                f"{name} is split over {ways} ranks, and what apply() was given for it was made of "
                "it: w / w.norm(), say, takes the norm of this rank's part, and nobody can tell. "
                "Give apply() the leaf as the loss gets it, or leave it whole: "
                f"zf.split(..., rules={{{name!r}: None}})."
            )


def _planned(part: Part) -> tuple[SplitPlan, Group] | None:
    plan, ranks, axis = part.plan, part.group, part.axis
    if ranks.size == 1:
        return None
    if not isinstance(plan, SplitPlan):
        raise PlacementError(
            f"a module runs on params that are split along {axis!r} by rules alone, and does not "
            "know what its products are to do with parts. Let it be planned: zf.split(step, model)."
        )
    if plan.ways != ranks.size:
        raise CompositionError(
            f"the plan of these params is for {plan.ways} ranks, and axis {axis!r} has "
            f"{ranks.size}. Place them anew by a step for as many."
        )
    return plan, ranks


def _first_part(leaf: Any) -> Part | None:
    """What one leaf says; of several, what the first of them does that is split, if one is."""
    if isinstance(leaf, Ref) and leaf.layout is not None:
        return _of_layout(leaf.layout, leaf.layout.slots[leaf.span.start : leaf.span.stop])
    if isinstance(leaf, Readable | Box) and isinstance(leaf.layout, Layout):
        return _of_layout(leaf.layout, leaf.layout.slots)
    if not isinstance(leaf, Tensor):
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(leaf):  # torch.func has put it around
        leaf = torch._C._functorch.get_unwrapped(leaf)
    return part_of(leaf)


def _of_layout(layout: Layout, slots: Sequence[Slot | None]) -> Part | None:
    if layout.along is None:
        return None
    found = next((slot for slot in slots if slot is not None and slot.split is not None), None)
    if found is None:
        return Part(None, layout.mesh, layout.along, layout.plan)
    return layout.part(found)
