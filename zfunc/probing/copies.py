"""A copy of a module that has no weights of its own, and which of its layers are alike.

Of layers that are alike the first one has made-up numbers, and stands for all: what a copy costs
does not depend on how deep or large the model is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn

from zfunc.modules.functional import Functional
from zfunc.modules.units import ModuleUnit
from zfunc.probing.arguments import leaves_of
from zfunc.probing.products import Product, product_of
from zfunc.probing.traits import Floats, Numbered, differences, floats_of
from zfunc.trees.nodes import NAMESPACE

__all__ = ["LARGE", "MOST", "Copy", "LayerInputs", "LayerKind", "Way"]

MOST = 8  # ways in which layers of a kind are called, in one call of the module
LARGE = 1 << 26  # elements: more than a module's own parameters may have to be made up

Way = tuple[Hashable, tuple[int, ...]]
"""What a layer's code may decide by in a call, and by itself what says which layer it is."""


@dataclass(frozen=True)
class LayerInputs:
    """Arguments of a call; ``streams`` are the tensors that are computed from parameters."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    streams: frozenset[int]  # positions among the tensors of the arguments
    attention: str | None = None  # which code for attention, where a model has several
    origins: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Positions of tensors that another layer gave: its kind, and which of its results it was."""
    training: bool = False
    floats: Floats = field(default_factory=dict)
    """What submodules of another layer keep, in which it differs from the first of its kind."""

    def names(self, layer: nn.Module) -> dict[int, str]:
        """By position the names of the arguments; with a dot if they lie inside of one."""
        every: Any = (self.args, self.kwargs)
        paths = optree.tree_paths(every, none_is_leaf=True, namespace=NAMESPACE)
        rows = zip(paths, leaves_of(every), strict=True)
        parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
        found: dict[int, str] = {}
        for path, x in rows:
            if isinstance(x, Tensor):
                first = path[1] if path[0] else parameters[min(path[1], len(parameters) - 1)]
                found[len(found)] = ".".join(map(str, (first, *path[2:])))
        return found


@dataclass
class LayerKind:
    """Layers of one stack that run alike on leaves of the same shapes; the first was called.

    Attributes:
        names: of all of them.
        module: the first one, with made-up parameters, or the whole module if it has no layers.
        calls: what it was given: for each way of calling the module. Empty if none was called.
        result: what it gave.
        replaced: whether the call put other submodules into it.
        floats: what submodules keep in layers in which it is other than in the first.
        others: what layers were given, in the same call of the module, of another structure; and
            by those that are told which one they are, of as many as are tried.
        read: its parameters that code outside of layers reads: (submodule, attribute).
        fixed: numbers of its submodules that this code reads.
    """

    names: list[str]
    module: nn.Module
    calls: list[LayerInputs] = field(default_factory=list)
    result: Any = None
    replaced: bool = False
    floats: list[Floats] = field(default_factory=list)
    others: dict[Way, LayerInputs] = field(default_factory=dict)
    read: set[tuple[str, str]] = field(default_factory=set)
    fixed: set[tuple[str, str]] = field(default_factory=set)

    @property
    def varied(self) -> bool:
        """Whether layers are called in more ways than are tried."""
        return len({way for way, _ in self.others}) > MOST


class Copy:
    """Fills a bare copy: products with nothing, first layers of a kind with made-up numbers."""

    def __init__(self, functional: Functional, read: Collection[tuple[str, str]]) -> None:
        self.generator, self.read = torch.Generator().manual_seed(0), read
        self.module = copy.deepcopy(functional._pool.skeleton).eval()
        self.products: dict[str, Product] = {}
        anatomy = functional._pool.anatomy
        for leaf in anatomy.buffers:
            value = _buffer(functional.buffers[leaf.name], self.generator)
            for home, attribute in leaf.homes:
                self.module.get_submodule(home)._buffers[attribute] = value
        self.kinds = self._kinds(anatomy.units)
        later = {name for kind in self.kinds for name in kind.names[1:]}
        done: dict[int, nn.Parameter] = {}
        for name, part in self.parts(later):
            product = product_of(part)
            if product is not None:
                self.products[name] = product
            outside = not any(f"{name}.".startswith(f"{k.names[0]}.") for k in self.kinds)
            table = isinstance(part, nn.Embedding) and outside
            self._fill(part, product is not None or table, done)
        for part in self.module.modules():
            config = getattr(part, "config", None)
            if getattr(config, "_experts_implementation", None) is not None:
                config._experts_implementation = "eager"  # type: ignore[union-attr]

    def _kinds(self, units: Sequence[ModuleUnit]) -> list[LayerKind]:
        found: dict[Any, dict[str, Numbered]] = {}
        for unit in units:
            part = self.module.get_submodule(unit.module)
            if _is_layer(part):
                shapes = tuple((leaf.path, tuple(leaf.shape)) for leaf in unit.leaves)
                like = found.setdefault((type(part), unit.stack, shapes), {})
                like[unit.module] = (unit.index, part)
        kinds: dict[Any, LayerKind] = {}
        for key, like in found.items():
            told = differences(list(like.values()), self.read)
            for (name, (_, part)), each in zip(like.items(), told, strict=True):
                kind = kinds.setdefault((key, each), LayerKind([], part))
                kind.names.append(name)
                _note_floats(kind, part)
        order = {unit.module: i for i, unit in enumerate(units)}
        return sorted(kinds.values(), key=lambda kind: order[kind.names[0]])

    def parts(self, later: set[str]) -> list[tuple[str, nn.Module]]:
        """Submodules that run, once: not those of layers that are like an earlier one."""
        out: list[tuple[str, nn.Module]] = []
        seen: set[nn.Module] = set()

        def walk(name: str, part: nn.Module) -> None:
            if name in later or part in seen:
                return
            seen.add(part)
            out.append((name, part))
            for key, child in part._modules.items():
                if child is not None:
                    walk(f"{name}.{key}" if name else key, child)

        walk("", self.module)
        return out

    def _fill(self, part: nn.Module, bare: bool, done: dict[int, nn.Parameter]) -> None:
        for key, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in done:
                if bare and p.numel() > 4096:
                    value = torch.zeros((1,) * p.ndim, dtype=torch.float64).expand(*p.shape)
                else:
                    value = _made_up(p.shape, self.generator)
                done[id(p)] = nn.Parameter(value)
            part._parameters[key] = done[id(p)]


def _is_layer(part: nn.Module) -> bool:
    """Whether something in it may be split: no table, head or norm in a sequence of modules."""
    bare = isinstance(part, nn.Embedding) or product_of(part) is not None
    return not bare and any(p.ndim > 1 for p in part.parameters())


def _made_up(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values for a parameter that is no product's; one number for all if there are too many."""
    numel = 1
    for n in shape:
        numel *= n
    if numel > LARGE:
        return torch.full((1,) * len(shape), 0.01, dtype=torch.float64).expand(*shape)
    if len(shape) < 2:
        return torch.rand(tuple(shape), generator=generator, dtype=torch.float64) + 0.5
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x / shape[-1] ** 0.5


def _buffer(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_meta:
        return x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    if x.is_floating_point():
        return torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return torch.zeros(x.shape, dtype=x.dtype) if x.dtype != torch.bool else torch.ones(x.shape) > 0


def _note_floats(kind: LayerKind, part: nn.Module) -> None:
    """Those of one more layer, if the first one has others."""
    first = floats_of(kind.module)
    other = {key: x for key, x in floats_of(part).items() if first.get(key, x) != x}
    if other and other not in kind.floats:
        kind.floats.append(other)
