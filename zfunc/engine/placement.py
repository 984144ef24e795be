"""What placing a state needs to know of it: the layouts of its params, and what is like them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import optree
from torch import Tensor

from zfunc.engine.context import current
from zfunc.layout.freezing import is_frozen
from zfunc.layout.layout import Layout, Slot, Unit, find_layers
from zfunc.layout.pieces import leaves_of
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, boxed
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Lazy, Placed, Tree, leaves_in, opened
from zfunc.trees.tree import dotted

__all__ = [
    "Twins",
    "borrowed",
    "homes_of",
    "layout_for",
    "placed_nodes",
    "reassembled",
    "rejoined",
]


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


def placed_nodes(node: Any) -> list[Placed]:
    """All placed nodes in a tree, those aside that a lazy one hides."""
    return [x for x in leaves_in(node, OPAQUE) if isinstance(x, Placed)]


def homes_of(leaves: Sequence[Any]) -> list[tuple[Layout, int] | None]:
    """Where leaves live that a step was given in a whole tree with a layout."""
    running = current()
    wanted = {id(x) for x in leaves if x is not None}
    found: dict[int, tuple[Layout, int]] = {}
    for box in (*running.boxes, *running.looked_into) if running is not None else ():
        if isinstance(box, Replicated) and box.views():
            its = {id(x): (box.layout, i) for i, x in enumerate(box.leaves)}
            found.update({key: its[key] for key in wanted & its.keys()})
    return [found.get(id(x)) for x in leaves]


def layout_for(
    params: Tree, size: int, memo: dict[Any, Layout], make: Callable[[Tree], Layout]
) -> Layout:
    """The layout of a whole params tree: its own, that of the leaves put together, or a new one."""
    if isinstance(params, Replicated) and params.layout.world == size:
        return params.layout
    leaves, spec = optree.tree_flatten(opened(params), none_is_leaf=True, namespace=NAMESPACE)
    homes = homes_of(leaves)
    alive = [(i, homes[i]) for i, leaf in enumerate(leaves) if leaf is not None]
    if alive and all(home and home[0].world == size for _, home in alive):
        first = alive[0][1][0]  # type: ignore[index]
        complete = len(alive) == len(first.present) and first.spec == spec
        complete = complete and all(home == (first, i) for i, home in alive)
        return first if complete else borrowed(homes, spec)
    key = (spec, tuple(x if x is None else (x.shape, x.dtype, is_frozen(x)) for x in leaves))
    if key not in memo:
        memo[key] = make(params)
    return memo[key]


def borrowed(homes: Sequence[tuple[Layout, int] | None], spec: optree.PyTreeSpec) -> Layout:
    """The layout of a tree whose leaves live in other layouts: parts of params, or several."""
    keys, _, _ = optree.tree_flatten_with_path(
        optree.tree_unflatten(spec, list(range(len(homes)))), namespace=NAMESPACE
    )
    slots: list[Slot | None] = [None] * len(homes)
    flats: list[Any] = []
    units: list[Unit] = []
    base = None
    for base in dict.fromkeys(home[0] for home in homes if home):
        mine = {home[1]: i for i, home in enumerate(homes) if home and home[0] == base}
        kept = base.select(mine.__contains__)
        numbers: dict[int, int] = {}
        for old, new in mine.items():
            slot: Any = kept.slots[old]
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
                unit.chunk,
            )
            for unit in kept.units
            if any(f in numbers for f in unit.flats)
        )
    assert base is not None
    outer, layers = find_layers(optree.tree_unflatten(spec, list(range(len(homes)))))
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


def reassembled(old: Readable, new: Tree) -> Tree:
    """Params put together from parts (``{**params, "head": ...}``) as one node again."""
    if isinstance(new, Placed):
        return new
    nodes = [x for x in (old, *placed_nodes(new)) if isinstance(x, Readable)]
    guide = next((x for x in nodes if x.streams), old)
    return guide.reassembled(old.layout, new)


def rejoined(old: Tree, new: Tree) -> Tree:
    """Params that came out cut, or put together from parts, whole again like the old ones.

    Raises:
        PlacementError: they are of another structure.
    """
    if new is old or any(isinstance(x, Lazy) for x in leaves_in(new, OPAQUE)):
        return new  # what is lazy will be whole when it is computed
    if isinstance(new, Placed):
        new = new.join(old)
    elif placed_nodes(new):
        nodes, spec = optree.tree_flatten(opened(new), none_is_leaf=True, namespace=OPAQUE)
        parts = zip(nodes, spec.flatten_up_to(opened(old)), strict=True)
        joined = [x.join(was) if isinstance(x, Placed) else x for x, was in parts]
        new = optree.tree_unflatten(spec, joined)
    if not isinstance(old, Replicated) or isinstance(new, Replicated | Lazy):
        return new
    leaves_of(old.layout, new)  # raises if they do not fit
    return boxed(old.layout, new)
