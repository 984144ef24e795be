"""The plan of an unmodified module: each kind of layer is probed once, and every part tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from zfunc.errors import PlacementError
from zfunc.layout.splits import Split
from zfunc.modules.functional import Functional
from zfunc.modules.split_modules import numbers_of
from zfunc.modules.split_plans import Role
from zfunc.modules.units import Anatomy
from zfunc.probing.calls import Probed, probed
from zfunc.probing.copies import LayerKind
from zfunc.probing.flows import pairings
from zfunc.probing.networks import networks_in, split_network
from zfunc.probing.numbers import Numbers, places_read
from zfunc.probing.positions import Streams, streams_of
from zfunc.probing.published import said_otherwise
from zfunc.probing.reaches import Refused
from zfunc.probing.stages import Stage, call_in_training
from zfunc.probing.tables import FEW, tables_of
from zfunc.probing.texts import ModulePlan
from zfunc.probing.together import check_together
from zfunc.probing.trials import Parts, parts_of

__all__ = ["plan_of"]

RULED = "a rule leaves it whole"
ANEW = "a checkpoint in the layer computes something else in backward than it has forward"
READ = "code outside of the layer reads a parameter of it"
ELSEWHERE = "it is called elsewhere in the module, too, where it would be split otherwise"
APART = "it shares a submodule with a layer in which other positions are put together at it"
TIED = "its weight is that of another submodule, too, where it would be split otherwise"


@dataclass
class _LayerPlan:
    """What holds for each layer of a kind; names are those within the layer."""

    splits: dict[str, Split] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    attributes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    inputs: dict[str, Split] = field(default_factory=dict)
    given: dict[str, Split] = field(default_factory=dict)
    further: dict[int, Split] = field(default_factory=dict)
    norms: dict[str, Split] = field(default_factory=dict)
    once: dict[str, tuple[str, ...]] = field(default_factory=dict)
    between: dict[str, tuple[str, ...]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def copied(self) -> _LayerPlan:
        """What may be added to, without changing this one."""
        made = _LayerPlan(**{key: dict(value) for key, value in vars(self).items()})
        made.attributes = {name: dict(values) for name, values in self.attributes.items()}
        return made

    def of(self, name: str) -> tuple[Any, ...]:
        """What it says of one submodule."""
        own = {k: x for k, x in self.splits.items() if k.rpartition(".")[0] == name}
        said = (self.roles, self.attributes, self.norms, self.once, self.between)
        return [*own.values()], {k.rpartition(".")[2] for k in own}, *(x.get(name) for x in said)

    def number(self, numbers: Numbers) -> None:
        for number, values in numbers.items():
            self.attributes.setdefault(number.module, {})[number.attribute] = values


class _Uses:
    """Where submodules stand: some in several layers, or outside of layers, too.

    A submodule has one forward, wherever it stands: what it does in one place it does in all.
    """

    def __init__(self, module: nn.Module, kinds: Sequence[LayerKind]) -> None:
        self.module = module
        self.own = {part: name for name, part in module.named_modules()}
        layers = [[module.get_submodule(name) for name in kind.names] for kind in kinds]
        self.names = [kind.names for kind in kinds]
        places: dict[nn.Module, set[tuple[int, str]]] = {}
        for i, each in enumerate(layers):
            for layer in each:
                for name, part in layer.named_modules():
                    places.setdefault(part, set()).add((i, name))
        self.outside: set[nn.Module] = set()
        self._walk(module, {layer for each in layers for layer in each})
        for kind, each in zip(kinds, layers, strict=True):
            self.outside |= {x.get_submodule(name) for x in each for name, _ in kind.read}
        self.places = {
            part: its for part, its in places.items() if len(its) > 1 or part in self.outside
        }

    def _walk(self, part: nn.Module, layers: set[nn.Module]) -> None:
        if part not in layers and part not in self.outside:
            self.outside.add(part)
            for child in part.children():
                self._walk(child, layers)

    def first(self, layer: str, name: str) -> str:
        """The first name that a submodule of a layer has in the module."""
        return self.own[self.module.get_submodule(_joined(layer, name))]

    def named(self, homes: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
        """Names of leaves by all places that they have in layers, from those by first ones."""
        return {
            (_joined(layer, name), key): homes[self.own[part], key]
            for names in self.names
            for layer in names
            for name, part in self.module.get_submodule(layer).named_modules()
            for key, p in part._parameters.items()
            if p is not None
        }

    def differing(self, parts: Sequence[_LayerPlan]) -> list[set[str]]:
        """Of each kind the submodules that would be split otherwise where else they stand."""
        found: list[set[str]] = [set() for _ in parts]
        for part, places in self.places.items():
            ways = [parts[i].of(name) for i, name in places]
            ways += [_LayerPlan().of("")] if part in self.outside else []
            if any(way != ways[0] for way in ways):
                for i, name in places:
                    found[i].add(name)
        return found

    def parted(self, cut: Streams) -> list[str]:
        """Layers on positions that share a submodule and do not agree on what it is given."""
        found: dict[str, None] = {}
        for places in self.places.values():
            every = [(layer, name) for i, name in places for layer in self.names[i]]
            on = [(layer, name, cut.layers[layer]) for layer, name in every if layer in cut.layers]
            ways = {(tuple(x.gathered.get(name, ())), name in x.ended) for _, name, x in on}
            found.update(dict.fromkeys(layer for layer, *_ in on) if len(ways) > 1 else {})
        return [*found]


def plan_of(
    model: Functional,
    ways: int,
    *,
    example: Any = None,
    vocab: bool = True,
    grains: Mapping[str, int] | None = None,
    whole: Callable[[str], bool] | None = None,
    sequence: bool = False,
) -> ModulePlan:
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
        whole: by its name in the parameters, whether a leaf is to stay whole; what is split with it
            does, too, and so do its like in other layers of the kind.
        sequence: also find which layers run on positions of the stream.

    Returns:
        The plan. It prints itself, and says where a plan that the model itself has, as those of
        Hugging Face do, says otherwise.

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
    if type(ways) is not int or ways < 1:
        raise PlacementError(f"plan_of() got {ways!r} ranks: expected an integer, at least 1.")
    anatomy = model._pool.anatomy
    splits: dict[str, Split] = {}
    roles: dict[str, Role] = {}
    why: dict[str, str] = {}
    attributes: dict[str, dict[str, tuple[int, ...]]] = {}
    inputs: dict[str, dict[str, Split]] = {}
    norms: dict[str, Split] = {}
    once: dict[str, tuple[str, ...]] = {}
    between: dict[str, tuple[str, ...]] = {}
    if ways == 1:
        return ModulePlan(ways, splits)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found = _probed_apart(model, example)
        for kind in found.kinds:
            call_in_training(kind)
        if vocab:
            splits, roles, why = tables_of(found, anatomy, ways)
            if whole is not None and any(map(whole, splits)):
                why.update(dict.fromkeys(splits, RULED))
                splits, roles = {}, {}
        uses = _Uses(model._pool.skeleton, found.kinds)
        homes = {home: leaf.name for leaf in anatomy.leaves for home in leaf.homes}
        names = homes | uses.named(homes)
        grained = [_grains_in(kind, names, grains or {}) for kind in found.kinds]
        kept = [_kept_in(kind, names, whole, RULED) for kind in found.kinds]
        for kind, its in zip(found.kinds, kept, strict=True):
            its.update({name: READ for name, _ in kind.read})
        for kind, its in zip(found.kinds, kept, strict=True):  # the whole module may be one layer
            head = "is split as the head over the vocabulary"
            its.update({n: f"{n} {head}" for n in roles if _within(n, kind.names)})
        parts = _of_kinds(found.kinds, ways, grained, kept)
        while True:
            tied = _split_otherwise(found.kinds, parts, anatomy, uses)
            odd = uses.differing(parts)
            before = [dict(its) for its in kept]
            for kind, its, elsewhere in zip(found.kinds, kept, odd, strict=True):
                its.update(_kept_in(kind, names, tied.__contains__, TIED))
                its.update({name: ELSEWHERE for name in elsewhere if its.get(name) != READ})
            if before == kept:
                break
            parts = _of_kinds(found.kinds, ways, grained, kept)
        cut = streams_of(found, parts, roles, ways) if sequence else Streams()
        for layer in uses.parted(cut):
            cut.layers.pop(layer)
            cut.uncut[layer] = APART
        for kind, made in zip(found.kinds, parts, strict=True):
            for layer in kind.names:
                for path, split in made.splits.items():
                    home, _, attribute = f".{_joined(layer, path)}".rpartition(".")
                    splits[names[home[1:], attribute]] = split
                roles.update({_joined(layer, name): role for name, role in made.roles.items()})
                why.update({_joined(layer, name): its for name, its in made.whole.items()})
                for name, values in made.attributes.items():
                    attributes[_joined(layer, name)] = values
                norms.update({uses.first(layer, name): each for name, each in made.norms.items()})
                once.update({_joined(layer, name): each for name, each in made.once.items()})
                between.update({_joined(layer, n): each for n, each in made.between.items()})
                if made.inputs:
                    inputs[layer] = made.inputs
    shapes = {leaf.name: tuple(leaf.shape) for leaf in anatomy.leaves}
    why = {name: its for name, its in why.items() if name not in splits and name not in roles}
    along = (norms, once, cut.layers, cut.pointwise, cut.uncut)
    told = (ways, splits, roles, attributes, why, inputs, *along)
    plan = ModulePlan(*told, between=between, shapes=shapes)
    module = model._pool.skeleton
    return replace(plan, otherwise=said_otherwise(module, plan), numbers=numbers_of(module))


def _probed_apart(model: Functional, example: Any) -> Probed:
    """A copy called once, whose layers are of one kind only if no code reads which one they are."""
    read = set[tuple[str, str]]()
    while True:
        found = probed(model, example, read)
        if (more := places_read(found)) <= read:
            return found
        read |= more


def _of_kinds(
    kinds: Sequence[LayerKind],
    ways: int,
    grains: Sequence[Mapping[str, int]],
    kept: Sequence[Mapping[str, str]],
) -> list[_LayerPlan]:
    """Plans of all kinds. What one hands on in parts the ones behind it take in parts."""
    closed: set[int] = set()  # kinds that must hand on what is whole
    while True:
        made: list[_LayerPlan] = []
        for i, kind in enumerate(kinds):
            made.append(_of_kind(kind, made, ways, i in closed, grains[i], kept[i]))
        wrong = {
            at
            for kind, plan in zip(kinds, made, strict=True)
            for i, (at, j) in (kind.calls[0].origins.items() if kind.calls else ())
            if j in made[at].further
            and made[at].further[j] != plan.given.get(kind.calls[0].names(kind.module)[i])
        }
        if wrong <= closed:
            return made
        closed |= wrong


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else layer or name


def _grains_in(
    kind: LayerKind, names: Mapping[tuple[str, str], str], grains: Mapping[str, int]
) -> dict[str, int]:
    """By a submodule's name within the layer, what fits the weights of all layers of a kind."""
    found: dict[str, int] = {}
    for (home, attribute), name in names.items() if grains else ():
        for layer in kind.names if attribute == "weight" and name in grains else ():
            if _within(home, [layer]):
                inner = home.removeprefix(layer).removeprefix(".")
                found[inner] = math.lcm(found.get(inner, 1), grains[name])
    return found


def _split_otherwise(
    kinds: Sequence[LayerKind], parts: Sequence[_LayerPlan], anatomy: Anatomy, uses: _Uses
) -> set[str]:
    """Leaves that submodules share which would split them in several ways, or not at all."""
    found: dict[tuple[str, str], Split] = {}
    for kind, made in zip(kinds, parts, strict=True):
        for layer in kind.names:
            for path, split in made.splits.items():
                home, _, attribute = path.rpartition(".")
                found[uses.first(layer, home), attribute] = split
    return {
        leaf.name
        for leaf in anatomy.leaves
        if any(found.get(home) != found.get(leaf.homes[0]) for home in leaf.homes)
    }


def _kept_in(
    kind: LayerKind,
    names: Mapping[tuple[str, str], str],
    whole: Callable[[str], bool] | None,
    why: str,
) -> dict[str, str]:
    """Submodules within the layers of a kind that have a leaf which is to stay whole, and why."""
    homes = {home for (home, _), name in names.items() if whole is not None and whole(name)}
    return {
        home.removeprefix(layer).removeprefix("."): why
        for home in homes
        for layer in kind.names
        if _within(home, [layer])
    }


def _within(name: str, layers: Sequence[str]) -> bool:
    return any(not x or name == x or name.startswith(f"{x}.") for x in layers)


def _of_kind(
    kind: LayerKind,
    before: Sequence[_LayerPlan],
    ways: int,
    closed: bool,
    grains: Mapping[str, int],
    kept: Mapping[str, str],
) -> _LayerPlan:
    made = _LayerPlan()
    if not kind.calls:
        made.whole[""] = "it was not called"
        return made
    if kind.replaced:
        made.whole[""] = "a call puts other submodules into it"
        return made
    if kind.varied:
        made.whole[""] = "layers like it are called in more ways than are tried"
        return made
    stage = Stage(kind.module, kind.calls, kind.fixed)
    try:
        pairs, made.whole = pairings(stage)
    except CheckpointError:
        made.whole[""] = ANEW
        return made
    except Exception as error:  # the module's own code, on what its layers were given
        first = (str(error).splitlines() or [""])[0]
        made.whole[""] = f"it fails on the example ({type(error).__name__}: {first}): give another"
        return made
    for pairing in pairs:
        taken = [name for name in pairing.members if name in made.roles]
        if taken:
            why = f"{', '.join(taken)} is split with others"
            made.whole.update({n: why for n in pairing.members if n not in made.roles})
            continue
        if reasons := [kept[name] for name in pairing.members if name in kept]:
            made.whole.update(dict.fromkeys(pairing.members, reasons[0]))
            continue
        more = made.copied()
        try:
            parts = parts_of(stage, pairing, ways, grains)
            for path in parts.parameters:
                if (home := path.rpartition(".")[0]) in kept:
                    raise Refused(f"{path} is to be split with it, and {kept[home]}")
            homes = {path.rpartition(".")[0] for path in parts.between} | parts.norms.keys()
            for home in homes | {number.module for number in parts.numbers}:
                if kept.get(home) in (ELSEWHERE, READ):
                    raise Refused(f"{home} lies between, and {kept[home]}")
            _add(more, stage, parts, before, closed)
            check_together(stage, more, ways)
        except (Refused, CheckpointError) as error:
            told = str(error) if isinstance(error, Refused) else ANEW
            for name in pairing.members:
                made.whole.setdefault(name, told)
        else:
            made = more
    for name, p in stage.parameters.items():
        if p.ndim > 1 and p.numel() > FEW:
            made.whole.setdefault(name, "it is no weight of a product")
    for name in networks_in(stage):
        if name in kept:
            made.whole[name] = kept[name]
            continue
        if any(
            f"{name}.{key}" in made.splits for key in stage.layer.get_submodule(name)._parameters
        ):
            continue  # between a column and its row
        try:
            network = split_network(stage, name, ways)
        except Refused as error:
            made.whole[name] = str(error)
            continue
        made.splits.update(network.splits)
        made.roles[name] = Role.NETWORK
        made.number(network.numbers)
        if network.once:
            made.once[name] = network.once
    done = made.roles.keys() | made.splits.keys()
    done |= {f"{name}.{key}" for name, keys in made.once.items() for key in keys}
    done |= {name for name in made.whole if "." in name and name.rpartition(".")[0] in made.whole}
    made.whole = {name: why for name, why in made.whole.items() if name not in done}
    return made


def _add(
    made: _LayerPlan, stage: Stage, parts: Parts, before: Sequence[_LayerPlan], closed: bool
) -> None:
    _take(made, stage, parts, before, closed)
    made.roles.update(dict.fromkeys(parts.pairing.common, Role.FEED))
    for path in parts.between:
        name, _, key = path.rpartition(".")
        made.roles[name] = Role.BETWEEN
        made.between[name] = (*made.between.get(name, ()), key)
    made.norms.update(parts.norms)
    shared = [name for name, split in parts.norms.items() if split.shared]
    made.roles.update(dict.fromkeys(shared, Role.BETWEEN))  # for the gradients of their weights
    for name in parts.inner:  # what they read is in parts already: they are no columns
        if parts.columns[name].shared:
            made.roles[name] = Role.BETWEEN
        elif stage.products[name].turned:
            raise Refused(f"{name} keeps its width beside its weight")
    made.roles.update({x: Role.COLUMN for x in parts.columns if x not in parts.inner})
    made.roles.update(dict.fromkeys(parts.rows, Role.ROW))
    made.once.update({name: ("bias",) for name in parts.rows if _adds_itself(stage, name)})
    for name, role in made.roles.items():
        if role is Role.BETWEEN:  # some of them for rows that several ranks have alone
            made.between.setdefault(name, ())
    made.splits.update(parts.leaves(stage))
    made.number(parts.numbers)


def _adds_itself(stage: Stage, name: str) -> bool:
    """Whether a product is a linear layer that adds its bias in a forward of its own."""
    part = stage.layer.get_submodule(name)
    own = isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward
    return own and part._parameters.get("bias") is not None


def _take(
    made: _LayerPlan, stage: Stage, parts: Parts, before: Sequence[_LayerPlan], closed: bool
) -> None:
    """Arguments that come in parts, or of which a rank takes its part; results in parts."""
    names, inputs = stage.call.names(stage.layer), {}
    origins = {names[i]: origin for i, origin in stage.call.origins.items()}
    for name, split in parts.given.items():
        at, j = origins.get(name, (-1, 0))
        if 0 <= at < len(before) and before[at].further.get(j) == split:
            continue
        if "." in name:
            raise Refused(f"{name}, one of several tensors in an argument, is for each head")
        inputs[name] = split
    if parts.further and (closed or (inputs and _passed_on(stage, parts))):
        raise Refused("its layer hands on a part for each head, which others read whole")
    if any(made.given.get(name, split) != split for name, split in parts.given.items()):
        raise Refused("its layer takes another part of an argument")
    made.inputs.update(inputs)
    made.given.update(parts.given)
    made.further.update(parts.further)


def _passed_on(stage: Stage, parts: Parts) -> bool:
    """Whether the layer hands on an argument of which it takes a part, to others of its kind."""
    trace = stage.run()
    names = stage.call.names(stage.layer)
    shapes = [x.shape for i, x in enumerate(trace.given) if names[i] in parts.given]
    return any(trace.further[j - 1].shape in shapes for j in parts.further)
