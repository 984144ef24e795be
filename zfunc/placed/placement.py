"""What placing a state needs to know of it: its entries, and which subtrees are like the params."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import optree
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.nodes import NAMESPACE, OPAQUE, Lazy, Placed, Tree, leaves_in
from zfunc.placed.layout import Layout, Slot, Unit, find_layers
from zfunc.placed.leaves import freeze, home_of, is_frozen, mark_placed, settle_home
from zfunc.placed.pieces import assemble_all, leaves_of, pieces_of_parts
from zfunc.placed.sharded import Sharded
from zfunc.placed.sources import assembled
from zfunc.placed.streamed import Streamed
from zfunc.placed.unitwise import streams
from zfunc.tree import dotted

__all__ = [
    "Entries",
    "Twins",
    "borrowed",
    "layout_for",
    "marked",
    "packed",
    "placed_nodes",
    "reassembled",
    "rejoined",
]


class Entries:
    """The top-level entries of a state by name; assignable, and put together again."""

    def __init__(self, state: Any) -> None:
        try:
            children, _, entries, self._unflatten = optree.tree_flatten_one_level(
                state, none_is_leaf=True, namespace=NAMESPACE
            )
        except ValueError:
            raise PlacementError(
                f"a state is a pytree with named entries (a TrainState, dict, dataclass or named "
                f"tuple), not a {type(state).__name__}."
            ) from None
        self._metadata = _
        self.names = [str(entry) for entry in _names(state, entries)]
        self._children = dict(zip(self.names, children, strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def __getitem__(self, name: str) -> Any:
        return self._children[name]

    def get(self, name: str) -> Any:
        """The entry, or ``None``."""
        return self._children.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._children[name] = value

    def __str__(self) -> str:
        return "entries " + ", ".join(self.names) if self.names else "without entries"

    def rebuild(self) -> Any:
        """The state with the entries as they are now."""
        return self._unflatten(self._metadata, tuple(self._children.values()))


def _names(state: Any, entries: Sequence[Any]) -> Sequence[Any]:
    """Named tuples are entered by position; their fields are the names that users know."""
    return getattr(state, "_fields", entries)


class Twins:
    """Finds the subtrees of a state that have the structure and shapes of params trees, or of
    parts of them (moments of an optimizer for the head alone)."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.layouts = list(layouts)
        self.parts: list[tuple[optree.PyTreeSpec, list[Any], Layout, list[Any]]] = []
        for layout in self.layouts:
            shapes = [slot and slot.shape for slot in layout.slots]
            self._collect(layout, layout.spec, shapes, [])

    def _collect(
        self, layout: Layout, spec: optree.PyTreeSpec, shapes: list[Any], path: list[Any]
    ) -> None:
        self.parts.append((spec, shapes, layout, path))
        at = 0
        for entry, child in zip(spec.entries(), spec.children(), strict=True):
            if child.num_leaves and child.num_nodes > 1:
                self._collect(layout, child, shapes[at : at + child.num_leaves], [*path, entry])
            at += child.num_leaves

    def find(self, node: Any) -> Layout | None:
        """The layout by which ``node`` can be cut, if there is exactly one."""
        leaves, spec = optree.tree_flatten(node, none_is_leaf=True, namespace=NAMESPACE)
        if not leaves or all(x is None for x in leaves):
            return None
        fits = [
            (layout, path)
            for its, shapes, layout, path in self.parts
            if its == spec and _fits(leaves, shapes)
        ]
        whole = [layout for layout, path in fits if not path]
        if whole:
            return _present(whole[0], leaves)
        if len(fits) != 1 or spec.num_nodes == 1:
            return None
        layout, path = fits[0]
        for entry in path:
            layout = layout.subtree(entry)[0]
        return _present(layout, leaves)

    def holds(self, node: Any) -> bool:
        """Whether ``replace`` would find a twin in ``node``."""
        found: list[Layout] = []
        self.replace(node, lambda layout, twin: found.append(layout))
        return bool(found)

    def replace(self, node: Any, place: Callable[[Layout, Any], Any]) -> Any:
        """``node`` with every twin replaced by ``place(layout, twin)``, other tensors copied."""
        layout = self.find(node)
        if layout is not None:
            return place(layout, node)
        if isinstance(node, Tensor):
            return node.clone()
        if node is None or optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
            return node
        children, metadata, _, unflatten = optree.tree_flatten_one_level(
            node, none_is_leaf=True, namespace=NAMESPACE
        )
        return unflatten(metadata, tuple(self.replace(child, place) for child in children))


def _fits(leaves: Sequence[Any], shapes: Sequence[Any]) -> bool:
    return all(
        x is None or (isinstance(x, Tensor) and x.is_floating_point() and tuple(x.shape) == shape)
        for x, shape in zip(leaves, shapes, strict=True)
    )


def _present(layout: Layout, leaves: Sequence[Any]) -> Layout:
    """The layout without the leaves that the twin lacks, where a flat is only half there."""
    for row in layout.by_flat:
        lacking = [leaves[slot.index] is None for slot in row]
        if any(lacking) and not all(lacking):
            return layout.select(lambda i: leaves[i] is not None)
    return layout


def packed(layout: Layout, node: Tree) -> Tree:
    """A plain copy of a tree whose leaves are views of the layout's full flats."""
    leaves = leaves_of(layout, node)
    out: list[Any] = [None] * len(leaves)
    for i, row in enumerate(layout.by_flat):
        some = [leaves[slot.index] for slot in row]
        if all(x is None for x in some):
            continue
        for slot, view in zip(row, layout.views(i, layout.pack(i, some)), strict=True):
            if leaves[slot.index] is not None:
                out[slot.index] = settle_home(view, layout, slot.index)
                if not layout.flats[i].trainable:
                    freeze(view)
    return optree.tree_unflatten(layout.spec, out)


def marked(params: Tree) -> Tree:
    """Params of a placed state, the plain leaves among them marked as such."""
    for node in leaves_in(params, OPAQUE):
        for leaf in leaves_in(node) if isinstance(node, Placed) else (node,):
            if isinstance(leaf, Tensor) and "_zfunc_placed" not in leaf.__dict__:
                mark_placed(leaf)
    return params


def placed_nodes(node: Any) -> list[Placed]:
    """All placed nodes in a tree, those aside that a lazy one hides."""
    return [x for x in leaves_in(node, OPAQUE) if isinstance(x, Placed)]


def _lies_as(layout: Layout, params: Tree) -> bool:
    """Whether a plain tree is the one that the layout is of, its leaves where that says."""
    try:
        leaves = layout.spec.flatten_up_to(params)
    except (ValueError, TypeError):
        return False
    homes = [
        home if x is None else home_of(x) for x, home in zip(leaves, layout.homes, strict=True)
    ]
    return all(map(operator.is_, homes, layout.homes))


def layout_for(
    params: Tree, size: int, memo: dict[Any, Layout], make: Callable[[Tree], Layout]
) -> Layout:
    """The layout of a plain params tree: where its leaves live, or a new one."""
    leaves = optree.tree_iter(params, namespace=NAMESPACE)
    first = next((home for leaf in leaves if (home := home_of(leaf))), (None, 0))[0]
    if first is not None and first.world == size and _lies_as(first, params):
        return first
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True, namespace=NAMESPACE)
    homes = [(i, home_of(leaf)) for i, leaf in enumerate(leaves) if leaf is not None]
    if homes and all(home and home[0].world == size for _, home in homes):
        first = homes[0][1][0]  # type: ignore[index]
        complete = first.spec == spec and all(home == (first, i) for i, home in homes)
        return first if complete else borrowed(leaves, spec)
    key = (spec, tuple(x if x is None else (x.shape, x.dtype, is_frozen(x)) for x in leaves))
    if key not in memo:
        memo[key] = make(params)
    return memo[key]


def borrowed(leaves: Sequence[Any], spec: optree.PyTreeSpec) -> Layout:
    """The layout of a tree whose leaves live in other layouts: parts of params, or several."""
    homes = [None if x is None else x.__dict__["_zfunc_home"] for x in leaves]
    keys, _, _ = optree.tree_flatten_with_path(
        optree.tree_unflatten(spec, list(range(len(leaves)))), namespace=NAMESPACE
    )
    slots: list[Slot | None] = [None] * len(leaves)
    flats: list[Any] = []
    units: list[Unit] = []
    base = None
    for base in dict.fromkeys(home[0] for home in homes if home):
        mine = {home[1]: i for i, home in enumerate(homes) if home and home[0] == base}
        kept = base.select(mine.__contains__)
        numbers: dict[int, int] = {}
        for old, new in mine.items():
            slot = kept.slots[old]
            if slot.flat not in numbers:
                numbers[slot.flat] = len(flats)
                flats.append(kept.flats[slot.flat])
            path = dotted(*keys[new])
            slots[new] = replace(slot, path=path, flat=numbers[slot.flat], index=new)
        units.extend(
            Unit(
                unit.name,
                tuple(numbers[f] for f in unit.flats if f in numbers),
                tuple(mine[s] for s in unit.slots if s in mine),
            )
            for unit in kept.units
            if any(f in numbers for f in unit.flats)
        )
    assert base is not None
    outer, layers = find_layers(optree.tree_unflatten(spec, list(range(len(leaves)))))
    return replace(
        base,
        spec=spec,
        slots=tuple(slots),
        flats=tuple(flats),
        units=tuple(units),
        outer=outer,
        layers=layers,
        _memo={},
    )


def reassembled(old: Sharded | Streamed, new: Tree) -> Tree:
    """Params put together from parts (``{**params, "head": ...}``) as one node again."""
    if isinstance(new, Placed):
        return new
    if isinstance(old, Streamed) or streams(new):
        return assembled(old.layout, new)
    layout, rank = old.layout, old.group.rank
    return Sharded(layout, assemble_all(layout, pieces_of_parts(layout, new, rank), rank))


def rejoined(old: Tree, new: Tree) -> Tree:
    """Params that came out cut (``tree.map`` of them and cut gradients) whole again, as before."""
    if isinstance(new, Lazy) or not placed_nodes(new):
        return new
    return optree.tree_map(
        lambda node, was: node.join(was) if isinstance(node, Placed) else node,
        new,
        old,
        is_leaf=lambda x: isinstance(x, Placed),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
