"""The plan of an unmodified module: each kind of layer is probed once, and every part tried."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zfunc.errors import PlacementError
from zfunc.layout.splits import Split
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.modules.units import Anatomy
from zfunc.probing.calls import LayerKind, probed
from zfunc.probing.flows import pairings
from zfunc.probing.networks import networks_in, split_network
from zfunc.probing.numbers import Numbers
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage
from zfunc.probing.tables import tables_of
from zfunc.probing.trials import Parts, parts_of

__all__ = ["plan_of"]


@dataclass
class _LayerPlan:
    """What holds for each layer of a kind; names are those within the layer."""

    splits: dict[str, Split] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    attributes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    inputs: dict[str, Split] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def number(self, numbers: Numbers) -> None:
        for number, values in numbers.items():
            self.attributes.setdefault(number.module, {})[number.attribute] = values


def plan_of(
    model: Functional,
    ways: int,
    *,
    example: Any = None,
    vocab: bool = True,
    grains: Mapping[str, int] | None = None,
) -> SplitPlan:
    """How a module is split over ``ways`` ranks: probed, without knowing what it is.

    Products of a layer are replaced by stand-ins that give random numbers. One whose input comes
    from others' outputs alone may be a row, those are its columns. Which outputs of columns an
    input of the row depends on says what can go to different ranks. A pair is split if each rank's
    numbers alone give that rank's share of the whole, to 1e-9; else it stays whole.

    No weight is read: ``model`` may be on ``meta``. It is not changed, nor are its buffers and
    random generators.

    Args:
        model: a functionalized module.
        ways: the number of ranks.
        example: arguments of ``model.apply``, tensors or shapes: a tuple of positional ones, a dict
            of named ones, or the one argument. By default integer ids, or the module's
            ``dummy_inputs``.
        vocab: also split the table of the vocabulary and the head over it.
        grains: by a weight's name in the parameters, how many of its inputs share a scale. Rows are
            then split at multiples of it where their pieces allow that.

    Raises:
        PlacementError: the module cannot be called with the example, or takes no integer ids.

    >>> from torch import nn
    >>> from zfunc.modules.functional import functionalize
    >>> mlp = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))
    >>> plan = plan_of(functionalize(nn.ModuleDict({"mlp": mlp})["mlp"], units=lambda *_: False),
    ...     2, example=(4, 3))
    >>> {name: role.value for name, role in plan.roles.items()}
    {'0': 'column', '2': 'row'}
    """
    if ways < 1:
        raise PlacementError(f"plan_of() got {ways} ranks. There is at least one.")
    anatomy = model._pool.anatomy
    plan = SplitPlan(ways, {}, {}, {}, {})
    splits, roles, whole = dict(plan.splits), dict(plan.roles), dict(plan.whole)
    attributes: dict[str, dict[str, tuple[int, ...]]] = {}
    if ways == 1:
        return plan
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = probed(model, example)
        if vocab:
            splits, roles, whole = tables_of(found, anatomy, ways)
        for kind in found.kinds:
            names = {home: leaf.name for leaf in anatomy.leaves for home in leaf.homes}
            made = _of_kind(kind, anatomy, ways, _grains_in(kind, names, grains or {}))
            for layer in kind.names:
                at = f"{layer}." if layer else ""
                for path, split in made.splits.items():
                    home, _, attribute = f"{at}{path}".rpartition(".")
                    splits[names[home, attribute]] = split
                roles.update({_joined(layer, name): role for name, role in made.roles.items()})
                whole.update({_joined(layer, name): why for name, why in made.whole.items()})
                for name, values in made.attributes.items():
                    attributes[_joined(layer, name)] = values
    return SplitPlan(ways, splits, roles, attributes, whole)


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else layer or name


def _grains_in(
    kind: LayerKind, names: Mapping[tuple[str, str], str], grains: Mapping[str, int]
) -> dict[str, int]:
    """By a submodule's name within the layer, what fits the weights of all layers of a kind."""
    found: dict[str, int] = {}
    for (home, attribute), name in names.items() if grains else ():
        for layer in kind.names if attribute == "weight" and name in grains else ():
            if not layer or home == layer or home.startswith(f"{layer}."):
                inner = home.removeprefix(layer).removeprefix(".")
                found[inner] = math.lcm(found.get(inner, 1), grains[name])
    return found


def _of_kind(kind: LayerKind, anatomy: Anatomy, ways: int, grains: Mapping[str, int]) -> _LayerPlan:
    made = _LayerPlan()
    if not kind.calls:
        made.whole[""] = "it was not called"
        return made
    stage = Stage(kind.module, kind.calls)
    pairs, made.whole = pairings(stage)
    for pairing in pairs:
        taken = [name for name in pairing.members if name in made.roles]
        if taken:
            why = f"{', '.join(taken)} is split with others"
            made.whole.update({n: why for n in pairing.members if n not in made.roles})
            continue
        try:
            _add(made, stage, parts_of(stage, pairing, ways, grains))
        except Refused as error:
            for name in pairing.members:
                made.whole.setdefault(name, str(error))
    for name in networks_in(stage):
        try:
            splits, numbers = split_network(stage, name, ways)
        except Refused as error:
            made.whole[name] = str(error)
            continue
        made.splits.update(splits)
        made.roles[name] = Role.NETWORK
        made.number(numbers)
    made.whole = {name: why for name, why in made.whole.items() if name not in made.roles}
    return made


def _add(made: _LayerPlan, stage: Stage, parts: Parts) -> None:
    if parts.given:
        raise Refused("arguments of its layer have a part for each head")
    if parts.pairing.common:
        raise Refused("it feeds columns")
    for name, split in parts.columns.items():
        made.roles[name] = Role.COLUMN
        _leaves(made, stage, name, split, outputs=True)
    for name, split in parts.rows.items():
        made.roles[name] = Role.ROW
        _leaves(made, stage, name, split, outputs=False)
    made.splits.update(parts.parameters)
    for name in parts.between:
        made.roles[name.rpartition(".")[0]] = Role.BETWEEN
    made.number(parts.numbers)


def _leaves(made: _LayerPlan, stage: Stage, name: str, split: Split, outputs: bool) -> None:
    part, product = stage.layer.get_submodule(name), stage.products[name]
    dim = int(outputs == product.turned)
    made.splits[f"{name}.weight"] = Split(dim, split.size, split.runs)
    if outputs and part._parameters.get("bias") is not None:
        made.splits[f"{name}.bias"] = split
