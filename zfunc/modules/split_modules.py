"""A module on this rank's parts of its leaves: their shapes, and the numbers that it keeps.

Its code runs unmodified. What it takes from its leaves' shapes follows by itself; numbers that it
keeps beside them, how many heads it has say, are those of the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zfunc.errors import CompositionError
from zfunc.layout.splits import Split
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.modules.units import Anatomy, TensorInfo

__all__ = [
    "check_outputs",
    "check_plan",
    "local_anatomy",
    "local_skeleton",
    "numbers_of",
    "split_homes",
]

FURTHER = "output_attentions"  # outputs of layers that say something of each head


def local_skeleton(skeleton: nn.Module, anatomy: Anatomy, plan: SplitPlan, rank: int) -> nn.Module:
    """A copy on ``meta`` whose parameters have a rank's shapes, and the plan's numbers."""
    modules = dict(skeleton.named_modules())
    memo: dict[int, Any] = {}
    for leaf in anatomy.leaves:
        home, attribute = leaf.homes[0]
        if leaf.name in plan.splits and (p := modules[home]._parameters[attribute]) is not None:
            local = p.new_empty(_local(leaf, plan, rank).shape)
            memo[id(p)] = nn.Parameter(local, requires_grad=p.requires_grad)
    bare = copy.deepcopy(skeleton, memo)
    for name, attributes in plan.attributes.items():
        for path, values in attributes.items():
            _set(bare.get_submodule(name), path.split("."), values[rank])
    return bare


def local_anatomy(anatomy: Anatomy, plan: SplitPlan, rank: int) -> Anatomy:
    """The same units and names, with a rank's shapes."""

    def local(leaves: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
        return tuple(_local(leaf, plan, rank) for leaf in leaves)

    units = tuple(
        replace(unit, leaves=local(unit.leaves), shared=local(unit.shared))
        for unit in anatomy.units
    )
    return replace(anatomy, root=local(anatomy.root), units=units)


def _local(leaf: TensorInfo, plan: SplitPlan, rank: int) -> TensorInfo:
    split = plan.splits.get(leaf.name)
    if split is None:
        return leaf
    return replace(leaf, shape=torch.Size(split.shape(leaf.shape, rank)))


def _set(owner: Any, path: Sequence[str], value: int) -> None:
    """Let a module, or a copy of an object that it has, keep another number."""
    for key in path[:-1]:
        own = copy.copy(getattr(owner, key))  # others have it, too, and keep theirs
        setattr(owner, key, own)
        owner = own
    setattr(owner, path[-1], value)


def split_homes(anatomy: Anatomy, plan: SplitPlan) -> Mapping[tuple[str, str], Split]:
    """By (module, attribute) how the parameter there is split; tied ones at each of their homes."""
    return {
        home: plan.splits[leaf.name]
        for leaf in anatomy.leaves
        if leaf.name in plan.splits
        for home in leaf.homes
    }


def numbers_of(module: nn.Module) -> dict[str, int]:
    """By dotted names the integers that submodules keep as attributes.

    >>> numbers_of(nn.Sequential(nn.Linear(2, 3)))
    {'0.in_features': 2, '0.out_features': 3}
    """
    return {
        f"{name}.{key}".removeprefix("."): x
        for name, part in module.named_modules()
        for key, x in vars(part).items()
        if type(x) is int and not key.startswith("_")
    }


# --- what does not fit -------------------------------------------------------------------------


def check_plan(module: nn.Module, anatomy: Anatomy, plan: SplitPlan) -> None:
    """Raise ``CompositionError`` if a plan is not one of this module; names what differs."""
    wrong = [*_foreign_leaves(anatomy, plan), *_foreign_parts(module, plan)]
    kept = numbers_of(module)
    wrong += [
        f"its {name} is {kept[name]}, and {value} in the model that was planned"
        for name, value in plan.numbers.items()
        if kept.get(name, value) != value
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CompositionError(
            f"the plan by which these params are split over {plan.ways} ranks is not one of this "
            f"{type(module).__name__}: {'; '.join(wrong[:5])}{more}. Call the model that was given "
            "to zf.split(step, model), or give it this one."
        )
    if any(getattr(getattr(x, "config", None), FURTHER, False) for x in module.modules()):
        check_outputs(plan, {FURTHER: True}, " in its config")


def _foreign_leaves(anatomy: Anatomy, plan: SplitPlan) -> Iterator[str]:
    shapes = {leaf.name: tuple(leaf.shape) for leaf in anatomy.leaves}
    for name, split in plan.splits.items():
        shape = shapes.get(name)
        if shape is None:
            yield f"it has no leaf {name}"
        elif not (split.dim < len(shape) and shape[split.dim] == split.size):
            yield f"{name} has shape {shape}, not size {split.size} in dimension {split.dim}"
        elif split.ways != plan.ways:
            yield f"{name} is split over {split.ways} ranks"


def _foreign_parts(module: nn.Module, plan: SplitPlan) -> Iterator[str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    told = (plan.roles, plan.attributes, plan.inputs, plan.norms, plan.once)
    for name in dict.fromkeys(name for each in told for name in each):
        if name not in modules:
            yield f"it has no submodule {name}"


def check_outputs(plan: SplitPlan, arguments: Mapping[str, Any], where: str = "") -> None:
    """Raise ``CompositionError`` if layers are asked for outputs of each head, which are split."""
    if arguments.get(FURTHER) and Role.COLUMN in plan.roles.values():
        raise CompositionError(
            f"{FURTHER}=True{where} asks for the scores of all heads, and each of {plan.ways} "
            f"ranks has those of its own alone. Set {FURTHER}=False, or call the model outside of "
            "split: model.apply(zf.full(params), ...)."
        )
