"""The anatomy of a module: which submodules are units, and where each parameter lives.

By default the units are the children of the *outermost* lists of callable modules
(``nn.ModuleList``, ``nn.Sequential``): what lies inside a unit, further lists and
experts included, belongs to it. A list of such lists is walked through.

A parameter that one unit alone uses lives in that unit; everything else, also what
two units share, lives in the root. Names are those of ``named_parameters()``, tied
ones once. A root parameter whose name leads through a list (a tensor shared by two
layers) is kept at the top of the tree under its whole dotted name, so that
``zfunc.tree.flatten_names`` gives the ``state_dict`` names in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from zfunc.errors import PlacementError
from zfunc.layout.freezing import check_trainable, freeze
from zfunc.trees.nodes import NAMESPACE, Frozen, Layers, register

__all__ = ["Anatomy", "ModuleUnit", "SingleLayer", "TensorInfo", "dissect", "node_at"]

Predicate = Callable[[str, nn.Module], bool]
Choice = Predicate | str | Iterable[str] | None
Path = tuple[str | int, ...]
Home = tuple[str, str]


class SingleLayer(Layers):
    """A stack of one: a unit that is no child of a list. It adds nothing to names."""


register(SingleLayer, lambda one: (tuple(one), None, ("",)), lambda _, xs: SingleLayer(xs))


@dataclass(frozen=True)
class TensorInfo:
    """One parameter or buffer.

    Attributes:
        name: as ``named_parameters()`` gives it.
        path: keys that lead to it, from the root of the tree or from its unit's dict.
        homes: (module, attribute) everywhere it is registered; more than one if tied.
    """

    name: str
    path: Path
    homes: tuple[Home, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class ModuleUnit:
    """One layer: its own leaves, the root leaves it also uses, and its buffers' names.

    ``module`` is its first name in ``named_modules()``; ``stack`` leads to the ``Layers``
    in the tree and ``index`` to the unit in it.
    """

    name: str
    module: str
    stack: Path
    index: int
    leaves: tuple[TensorInfo, ...]
    shared: tuple[TensorInfo, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy:
    """Static: no tensors, picklable. ``stacks`` gives each ``Layers``' path and length, ``order``
    the paths of these and of the root's leaves as the module defines them."""

    root: tuple[TensorInfo, ...]
    units: tuple[ModuleUnit, ...]
    buffers: tuple[TensorInfo, ...]
    stacks: dict[Path, int]
    singles: frozenset[Path]
    order: tuple[Path, ...] = ()

    def tree(self, tensors: dict[str, Tensor]) -> Any:
        """The params tree with these tensors, by name, at its leaves.

        A dict that holds leaves of parameters that require no gradient is a ``Frozen``.
        """
        top = _frozen(self._nested(tensors), self.infos)
        return top[""] if self.is_stack else top

    @cached_property
    def infos(self) -> Any:
        """The tree with what is known of each parameter at its leaves."""
        return self._nested({leaf.name: leaf for leaf in self.leaves})

    def _nested(self, values: Mapping[str, Any]) -> Any:
        top: dict[str | int, Any] = {}
        root = {leaf.path: values[leaf.name] for leaf in self.root}
        for path in self.order:
            if path in root:
                _insert(top, path, root[path])
                continue
            kind = SingleLayer if path in self.singles else Layers
            _insert(top, path, kind({} for _ in range(self.stacks[path])))
        for unit in self.units:
            for leaf in unit.leaves:
                _insert(node_at(top, (*unit.stack, unit.index)), leaf.path, values[leaf.name])
        return top

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that require no gradient, in the order of the tree's leaves."""
        leaves: list[TensorInfo] = optree.tree_leaves(self.infos, namespace=NAMESPACE)
        return tuple(leaf.name for leaf in leaves if not leaf.requires_grad)

    @property
    def is_stack(self) -> bool:
        """The module itself is a list of layers, and the tree a ``Layers``."""
        return not self.root and set(self.stacks) == {("",)}

    @cached_property
    def leaves(self) -> tuple[TensorInfo, ...]:
        """Every parameter, the root's first."""
        return (*self.root, *(leaf for unit in self.units for leaf in unit.leaves))


def _frozen(node: Any, infos: Any) -> Any:
    """The tree with its frozen leaves marked, and the dicts that hold some made ``Frozen``."""
    if isinstance(infos, TensorInfo):
        # One in low bits is no plain leaf.
        return freeze(node) if not infos.requires_grad and isinstance(node, Tensor) else node
    if isinstance(infos, Layers):
        return type(node)(_frozen(x, info) for x, info in zip(node, infos, strict=True))
    made = {key: _frozen(x, infos[key]) for key, x in node.items()}
    keys = [k for k, x in infos.items() if isinstance(x, TensorInfo) and not x.requires_grad]
    return Frozen(made, keys) if keys else made


def _insert(node: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value


def node_at(node: Any, path: Path) -> Any:
    """What is in a tree under this path."""
    for key in path:
        node = node[key]
    return node


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


# --- which modules are units -------------------------------------------------------------------


def _callable(module: nn.Module | None) -> bool:
    return module is not None and getattr(type(module), "forward", None) is not (nn.Module.forward)


def _numbered(module: nn.Module) -> bool:
    names = list(module._modules)
    return isinstance(module, nn.ModuleList | nn.Sequential) and names == [
        str(i) for i in range(len(names))
    ]


def _is_stack(module: nn.Module) -> bool:
    children = module._modules.values()
    return (
        _numbered(module)
        and all(_callable(child) for child in children)
        and any(True for child in children if child for _ in child.parameters())
    )


def _in_stacks(name: str, module: nn.Module) -> Iterator[str]:
    for child_name, child in module._modules.items():
        if _is_stack(module):
            yield _join(name, child_name)
        elif child is not None:
            yield from _in_stacks(_join(name, child_name), child)


def _chosen(name: str, module: nn.Module, choice: Predicate) -> Iterator[str]:
    for child_name, child in module._modules.items():
        full = _join(name, child_name)
        if child is not None and _callable(child) and choice(full, child):
            yield full
        elif child is not None:
            yield from _chosen(full, child, choice)


def _unit_names(module: nn.Module, units: Choice) -> list[str]:
    if units is None:
        return list(_in_stacks("", module))
    if callable(units):
        return list(_chosen("", module, units))
    patterns = [units] if isinstance(units, str) else list(units)
    names = list(_chosen("", module, lambda name, _: any(fnmatchcase(name, p) for p in patterns)))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = [name for name, _ in module.named_modules() if name][:5]
            raise PlacementError(
                f"units={pattern!r} chooses no module that {type(module).__name__} calls (a list "
                f"is not called, its children are: 'blocks.*'). It has {', '.join(some)}, ..."
            )
    return names


# --- where everything lives --------------------------------------------------------------------


@dataclass
class _Found:
    """A tensor on the way through the module: its first name, its homes and its owners."""

    name: str
    tensor: Tensor
    homes: list[Home] = field(default_factory=list)
    owners: set[int | None] = field(default_factory=set)


class _Census:
    """Every parameter and buffer, by walking all names of all modules, repeated ones too."""

    def __init__(self, module: nn.Module, units: Sequence[str]) -> None:
        self.units = set(units)
        self.params: dict[int, _Found] = {}
        self.buffers: dict[int, _Found] = {}
        self.first: dict[int, str] = {}
        self.visit("", module, None)

    def visit(self, name: str, module: nn.Module, owner: int | None) -> None:
        owner = id(module) if name in self.units else owner
        home = self.first.setdefault(id(module), name)
        self.record(self.params, name, home, module._parameters, owner)
        self.record(self.buffers, name, home, module._buffers, owner)
        for child_name, child in module._modules.items():
            if child is not None:
                self.visit(_join(name, child_name), child, owner)

    def record(
        self, found: dict[int, _Found], name: str, home: str, tensors: Any, owner: int | None
    ) -> None:
        for attribute, x in tensors.items():
            if x is None:
                continue
            entry = found.setdefault(id(x), _Found(_join(name, attribute), x))
            entry.owners.add(owner)
            if (home, attribute) not in entry.homes:
                entry.homes.append((home, attribute))


def _check(name: str, x: Tensor) -> None:
    if isinstance(x, UninitializedParameter):
        raise PlacementError(
            f"parameter {name} has no shape yet. Run the module once before functionalize()."
        )
    check_trainable(name, x)
    if type(x.data).__name__ == "DTensor":  # by name: importing the class costs half a second
        raise PlacementError(
            f"parameter {name} is a DTensor: the module is sharded already. Functionalize the "
            "plain module and let zfunc shard the step."
        )


def _leaf(found: _Found, path: Path) -> TensorInfo:
    x = found.tensor
    return TensorInfo(
        found.name, path, tuple(found.homes), x.shape, x.dtype, x.device, x.requires_grad
    )


def _place_units(module: nn.Module, names: Sequence[str]) -> dict[str, tuple[Path, int]]:
    """Unit name -> (path of its ``Layers``, index): together where a whole list was chosen."""
    places: dict[str, tuple[Path, int]] = {}
    chosen = set(names)
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = module.get_submodule(parent)
        if _numbered(holder) and all(_join(parent, child) in chosen for child in holder._modules):
            places[name] = (tuple(parent.split(".")), int(last))
        else:
            places[name] = (tuple(name.split(".")), 0)
    return places


def dissect(module: nn.Module, units: Choice = None) -> Anatomy:
    """Find the units of a module, and a place in the tree for each of its parameters.

    Raises:
        PlacementError: a parameter that is not floating-point, has no shape yet or is
            sharded already; ``units`` that match nothing or are never called.
    """
    names = _unit_names(module, units)
    places = _place_units(module, names)
    census = _Census(module, names)
    home: dict[int, str] = {}
    for name in names:  # the first name, where one module is used as several layers
        home.setdefault(id(module.get_submodule(name)), name)
    stacks: dict[Path, int] = {}
    for stack, index in places.values():
        stacks[stack] = max(stacks.get(stack, 0), index + 1)

    root: list[TensorInfo] = []
    leaves: dict[int, list[TensorInfo]] = {owner: [] for owner in home}
    shared: dict[int, list[TensorInfo]] = {owner: [] for owner in home}
    order: dict[Path, None] = {}
    for found in census.params.values():
        _check(found.name, found.tensor)
        owner = next(iter(found.owners))
        prefix = home.get(owner, "") + "." if owner is not None else "."
        if len(found.owners) == 1 and found.name.startswith(prefix):
            assert owner is not None
            path = tuple(found.name.removeprefix(prefix).split("."))
            leaves[owner].append(_leaf(found, path))
            order[places[home[owner]][0]] = None
            continue
        root.append(_leaf(found, _root_path(found.name, stacks)))
        order[root[-1].path] = None
        for owner in found.owners - {None}:
            shared[owner].append(root[-1])  # type: ignore[index]

    buffers = tuple(_leaf(found, (found.name,)) for found in census.buffers.values())
    used = {
        owner: tuple(f.name for f in census.buffers.values() if owner in f.owners) for owner in home
    }
    return Anatomy(
        root=tuple(root),
        units=tuple(
            ModuleUnit(
                name, census.first[o], *places[name], tuple(leaves[o]), tuple(shared[o]), used[o]
            )
            for o, name in home.items()
        ),
        buffers=buffers,
        stacks=stacks,
        singles=frozenset(places[n][0] for n in names if places[n][0] == tuple(n.split("."))),
        order=(*order, *(stack for stack in stacks if stack not in order)),
    )


def _root_path(name: str, stacks: dict[Path, int]) -> Path:
    path = tuple(name.split("."))
    crosses = any(path[: len(stack)] == stack or stack == ("",) for stack in stacks)
    return (name,) if crosses else path
