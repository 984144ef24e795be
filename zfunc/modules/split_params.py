"""Whether a model's params are parts of leaves, and by which plan: they say so themselves.

Placed trees and layers that have not entered yet say it by their layout, leaves that have entered
by a mark. The running step is not asked: a teacher beside a split model is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zfunc.engine.sources import LayerRef
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.modules.split_plans import SplitPlan
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import Box, Layers, Tree, part_of

__all__ = ["splitting_of"]


def splitting_of(params: Tree) -> tuple[SplitPlan, Group] | None:
    """The plan of params that are split, and among which ranks; None of whole ones.

    Raises:
        PlacementError: they are split by rules for functions, and a module runs on them.
        CompositionError: the plan is for another number of ranks.
    """
    found = _said_by(_first(params))
    if found is None:
        return None
    plan, ranks, axis = found
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


def _first(node: Tree) -> Any:
    """The first leaf, or what stands for several: all of a tree say the same."""
    if isinstance(node, Mapping | Layers):
        children = node.values() if isinstance(node, Mapping) else node
        return next((x for child in children if (x := _first(child)) is not None), None)
    return node


def _said_by(leaf: Any) -> tuple[Any, Group, str] | None:
    layout = leaf.source.layout if isinstance(leaf, LayerRef) else None
    if isinstance(leaf, Readable | Box):
        layout = leaf.layout
    if isinstance(layout, Layout):
        return None if layout.along is None else (layout.plan, layout.parts, layout.along)
    part = part_of(leaf) if isinstance(leaf, Tensor) else None
    return None if part is None else (part.plan, part.group, part.axis)
