"""How a tree is cut: leaves into units, units into flat buffers, buffers over ranks.

A *unit* (a layer, some tiny layers together, or a part of the root, which is
everything outside ``Layers``) is what is gathered, reduced and moved at once. Its
leaves lie one behind the other in one 1-D *flat* per dtype and kind (trainable or
frozen, cut or kept whole). Every rank owns one contiguous, equal part of a flat,
so a gathered flat yields zero-copy views of the leaves, and an elementwise
optimizer needs to know nothing of leaves at all.

Leaves start at multiples of 64 elements and so do cuts: matrix kernels find
aligned rows, and a vectorised update rounds an element in the same way however
the tree is cut. The padding is zero, and visible nowhere outside this module and
``sharded``.

A :class:`Layout` is static: it is hashable, comparable, knows shapes and offsets,
and holds no data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.layout.pool import empty
from zfunc.layout.splits import Part, Split, mark
from zfunc.ranks.axes import alone
from zfunc.ranks.axes import group as group_of
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Axes, Mesh, laid_out
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import NAMESPACE, Layers, Tree
from zfunc.trees.squares import zeros
from zfunc.trees.tree import dotted

__all__ = ["ALIGN", "Flat", "Layer", "Layout", "Slot", "Unit", "aligned", "find_layers", "whole"]

ALIGN = 64
SMALL = 1 << 20  # bytes of a flat that are zeroed sooner than its gaps one by one
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and start of a leaf in its flat: what a view of it takes."""


@dataclass(frozen=True)
class Slot:
    """Where one leaf lies: ``flat[start : start + numel]``, ``shape`` outside.

    ``code`` makes the leaf of what lies there, if it is stored as bytes (``splits.Encoded``);
    ``split`` says which part of the full leaf it is, if it is one.
    """

    path: str
    shape: tuple[int, ...]
    flat: int
    start: int
    index: int
    code: Any = None
    split: Split | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def full(self) -> tuple[int, ...]:
        """The shape of the full leaf."""
        return self.shape if self.split is None else self.split.full(self.own)

    @property
    def own(self) -> tuple[int, ...]:
        """The shape of the leaf itself, also where it lies in other elements."""
        return self.shape if self.code is None else tuple(self.code.shape)


@dataclass(frozen=True)
class Flat:
    """One 1-D buffer; rank r owns ``[cuts[r], cuts[r + 1])``, or all of it if ``whole``."""

    dtype: torch.dtype
    trainable: bool
    whole: bool
    cuts: tuple[int, ...]

    @cached_property
    def length(self) -> int:
        return self.cuts[-1]

    def bounds(self, rank: int) -> tuple[int, int]:
        return (0, self.cuts[-1]) if self.whole else (self.cuts[rank], self.cuts[rank + 1])


@dataclass(frozen=True)
class Unit:
    """What travels together: ``flats`` and ``slots`` are indices into the layout's.

    ``chunk`` says which part of a model it is in, where the stages of a pipeline have parts.
    """

    name: str
    flats: tuple[int, ...]
    slots: tuple[int, ...]
    chunk: int = 0


@dataclass(frozen=True)
class Layer:
    """One child of a ``Layers``: its leaves are ``[start, stop)`` of the tree's."""

    name: str
    start: int
    stop: int
    spec: optree.PyTreeSpec


@dataclass(frozen=True)
class Layout:
    """The cut of one tree.

    Attributes:
        spec: structure of the tree, ``None`` being a leaf.
        slots: one per leaf in leaf order; ``None`` where the tree has no value.
        flats, units: see the module's docstring.
        outer: the structure with a hole at each layer.
        layers: the holes, in order.
        mesh, axis: over which ranks the flats are cut.
        along: the axis over which leaves are split before they lie in flats, if some are.
        plan: what a model needs to know to compute with such leaves.
        by: the transform that made it: its name, and how it writes itself.
    """

    spec: optree.PyTreeSpec
    slots: tuple[Slot | None, ...]
    flats: tuple[Flat, ...]
    units: tuple[Unit, ...]
    outer: optree.PyTreeSpec
    layers: tuple[Layer, ...]
    mesh: Mesh | None
    axis: Axes
    world: int
    along: str | None = None
    plan: Any = field(default=None, compare=False, repr=False)
    by: tuple[str, str] | None = field(default=None, compare=False, repr=False)
    _memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False, hash=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # each step looks something up by its layout, and leaves are many
        return hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare))

    def __getstate__(self) -> dict[str, Any]:
        # Other processes hash strings otherwise.
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    @property
    def ranks(self) -> Group:
        """Those over which it is cut."""
        return alone() if self.axis == () else group_of(self.mesh, self.axis)

    @property
    def parts(self) -> Group:
        """Those over which leaves are split."""
        return alone() if self.along is None else group_of(self.mesh, self.along)

    @property
    def holders(self) -> Group:
        """All that together have every element: those over which it is cut, or leaves are split."""
        if self.along is None:
            return self.ranks
        axes = () if self.axis == () else laid_out(self.mesh).checked(self.axis)
        return group_of(self.mesh, (*axes, self.along))

    @property
    def everyone(self) -> Group:
        """Those, and ranks along the mesh's other axes that have other rows of a batch."""
        if self.mesh is None or self.axis == ():
            return self.ranks
        return group_of(self.mesh, (*self.mesh.checked(self.axis), *self.mesh.batch))

    @cached_property
    def present(self) -> tuple[Slot, ...]:
        """The slots that exist."""
        return tuple(slot for slot in self.slots if slot is not None)

    @cached_property
    def by_flat(self) -> tuple[tuple[Slot, ...], ...]:
        """For each flat its slots, in order of their offset."""
        rows: list[list[Slot]] = [[] for _ in self.flats]
        for slot in self.present:
            rows[slot.flat].append(slot)
        return tuple(tuple(sorted(row, key=lambda slot: slot.start)) for row in rows)

    @cached_property
    def places(self) -> tuple[tuple[Place, ...], ...]:
        """For each flat the places of its slots, in the order of ``by_flat``."""
        return tuple(
            tuple((slot.shape, _strides(slot.shape), slot.start) for slot in row)
            for row in self.by_flat
        )

    @cached_property
    def shapes(self) -> tuple[list[tuple[int, ...]], ...]:
        """For each flat the shapes of its leaves, in the order of ``by_flat``."""
        return tuple([slot.shape for slot in row] for row in self.by_flat)

    @cached_property
    def trains(self) -> bool:
        """Whether any leaf gets a gradient."""
        return any(flat.trainable for flat in self.flats)

    @cached_property
    def gaps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each flat the padding, ``(start, stop)``."""
        rows = []
        for spec, row in zip(self.flats, self.by_flat, strict=True):
            starts = [*(slot.start for slot in row), spec.length]
            stops = [0, *(slot.start + slot.numel for slot in row)]
            rows.append(tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b))
        return tuple(rows)

    @cached_property
    def unit_of_flat(self) -> tuple[int, ...]:
        owner = {flat: i for i, unit in enumerate(self.units) for flat in unit.flats}
        return tuple(owner[i] for i in range(len(self.flats)))

    @cached_property
    def trainable_of_units(self) -> tuple[tuple[int, ...], ...]:
        """The indices of each unit's flats that are trained."""
        return tuple(tuple(i for i in u.flats if self.flats[i].trainable) for u in self.units)

    @cached_property
    def encoded(self) -> frozenset[int]:
        """The units of which a leaf that is trained is stored as bytes."""
        return frozenset(
            u
            for u, flats in enumerate(self.trainable_of_units)
            if any(slot.code is not None for i in flats for slot in self.by_flat[i])
        )

    @cached_property
    def _outline(self) -> tuple[int, ...]:
        """What ``outer`` has, in order: the index of a leaf, or ``-1 - k`` for layer ``k``."""
        at, found = 0, list[int]()
        for k, layer in enumerate(self.layers):
            found += *range(at, layer.start), -1 - k
            at = layer.stop
        return (*found, *range(at, len(self.slots)))

    def tree(self, leaves: Mapping[int, Any], layer: Callable[[int], Any]) -> Tree:
        """The tree of these leaves outside of layers, by index, and of what ``layer`` gives for the
        index of each layer."""
        if not self.layers and self.spec.is_leaf():
            return leaves.get(0)
        items = [leaves.get(at) if at >= 0 else layer(-1 - at) for at in self._outline]
        return optree.tree_unflatten(self.outer, items)

    @cached_property
    def units_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer its units."""
        rows = (self.slots[layer.start : layer.stop] for layer in self.layers)
        return tuple(
            tuple(sorted({self.unit_of_flat[s.flat] for s in row if s is not None})) for row in rows
        )

    @cached_property
    def layer_of_unit(self) -> tuple[int, ...]:
        """For each unit the last layer that it serves; -1 for the root's."""
        last = {unit: k for k, units in enumerate(self.units_of_layers) for unit in units}
        return tuple(last.get(i, -1) for i in range(len(self.units)))

    @cached_property
    def layers_of_unit(self) -> tuple[int, ...]:
        """For each unit how many layers it serves."""
        served = Counter(unit for units in self.units_of_layers for unit in units)
        return tuple(served[i] for i in range(len(self.units)))

    @cached_property
    def root_leaves(self) -> tuple[int, ...]:
        """Indices of the leaves outside every layer."""
        inside = {i for layer in self.layers for i in range(layer.start, layer.stop)}
        return tuple(i for i in range(len(self.slots)) if i not in inside)

    @cached_property
    def stacks(self) -> tuple[tuple[str, int, int], ...]:
        """For each layer its stack's path, its depth in the stack (from 0), and how many it has."""
        parents = [layer.name.rpartition(".")[0] for layer in self.layers]
        return tuple(
            (parent, parents[:k].count(parent), parents.count(parent))
            for k, parent in enumerate(parents)
        )

    @cached_property
    def leaves_of_units(self) -> tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]:
        """For each unit the indices of its leaves, flat by flat, and which are trainable."""
        rows = [[slot for i in unit.flats for slot in self.by_flat[i]] for unit in self.units]
        return tuple(
            (tuple(s.index for s in row), tuple(self.flats[s.flat].trainable for s in row))
            for row in rows
        )

    def segments(self, flat: int, rank: int) -> list[tuple[Slot, int, int, int]]:
        """This rank's pieces of a flat's leaves: ``(slot, start, stop, offset)``.

        ``local[start:stop]`` is ``leaf.view(-1)[offset : offset + stop - start]``.
        """
        key = (flat, rank)
        if key not in self._memo:
            low, high = self.flats[flat].bounds(rank)
            rows = []
            for slot in self.by_flat[flat]:
                a, b = max(slot.start, low), min(slot.start + slot.numel, high)
                if a < b:
                    rows.append((slot, a - low, b - low, a - slot.start))
            self._memo[key] = rows
        return self._memo[key]

    def counts(self, index: int, leaf: Tensor) -> Tensor:
        """Those elements of this rank's part of a leaf that count when ranks with parts add up."""
        slot = self.slots[index]
        return leaf if self.along is None or slot is None else self.part(slot).counted(leaf)

    def complete(self, slot: Slot, leaf: Any) -> Any:
        """The full leaf, from this rank's part; a collective where it is split."""
        if slot.split is None:
            return leaf
        return slot.split.gathered(leaf, self.parts, f"full {slot.path}")

    def own(self, slot: Slot, value: Any) -> Any:
        """This rank's part of a full leaf."""
        return value if slot.split is None else slot.split.local(value, self.parts.rank)

    def marked(self, slot: Slot | None, leaf: Tensor) -> Tensor:
        """A leaf that tells functions of a model which part of the full one it is."""
        return leaf if self.along is None or slot is None else mark(leaf, self.part(slot))

    def part(self, slot: Slot) -> Part:
        """Which part of the full leaf a slot has."""
        assert self.along is not None
        return Part(slot.split, self.mesh, self.along, self.plan)

    def views(self, flat: int, full: Tensor) -> list[Tensor]:
        """Zero-copy leaves of a full flat, in the order of ``by_flat``."""
        parts = self._parts(flat, full)
        if all(slot.code is None for slot in self.by_flat[flat]):
            return parts
        return [
            part if slot.code is None else slot.code.read(part)
            for slot, part in zip(self.by_flat[flat], parts, strict=True)
        ]

    def _parts(self, flat: int, full: Tensor) -> list[Tensor]:
        strided, at = full.as_strided, full.storage_offset()
        return [strided(shape, stride, at + start) for shape, stride, start in self.places[flat]]

    def pack(
        self,
        flat: int,
        leaves: Sequence[Tensor | None],
        take: Callable[[int, torch.dtype, torch.device | None], Tensor] | None = None,
    ) -> Tensor:
        """A full flat with the leaves (in the order of ``by_flat``); ``None`` is zero.

        A copy in memory that ``take`` provides, except that a leaf which is a whole flat
        by itself stays where it is if ``take`` is given.
        """
        spec = self.flats[flat]
        some = next((x for x in leaves if x is not None), None)
        dtype, device = (some.dtype, some.device) if some is not None else (spec.dtype, None)
        alone = take is not None and len(leaves) == 1
        if alone and some is not None and some.is_contiguous() and some.numel() == spec.length:
            return some.detach().view(-1)
        full = (take or empty)(spec.length, dtype, device)
        if full.nbytes <= SMALL and self._concatenated(flat, leaves, full):
            return full
        targets = self._parts(flat, full)
        lacking = any(leaf is None for leaf in leaves)
        if full.nbytes <= SMALL:
            full.zero_()
        else:
            for start, stop in self.gaps[flat]:
                full[start:stop].zero_()
            for target, leaf in zip(targets, leaves, strict=True) if lacking else ():
                if leaf is None:
                    target.zero_()
        pairs = [(t, x) for t, x in zip(targets, leaves, strict=True) if x is not None]
        if pairs:
            torch._foreach_copy_([t for t, _ in pairs], [x for _, x in pairs])
        return full

    def add(
        self, flats: Sequence[int], sums: Sequence[Tensor], leaves: Sequence[Tensor | None]
    ) -> None:
        """Add leaves (in the order of ``by_flat``, flat by flat) to full flats; None is zero."""
        parts = self.parts_of(flats, sums)
        targets, come = [], []
        for part, x in zip(parts, leaves, strict=True):
            if x is not None:
                targets.append(part)
                come.append(x)
        if targets:
            torch._foreach_add_(targets, come)

    def parts_of(self, flats: Sequence[int], full: Sequence[Tensor]) -> list[Tensor]:
        """The memory of each leaf in some full flats, in the order of ``by_flat``, flat by flat."""
        found: list[Tensor] = []
        for i, x in zip(flats, full, strict=True):
            found += self._parts(i, x)
        return found

    def _concatenated(self, flat: int, leaves: Sequence[Tensor | None], full: Tensor) -> bool:
        """Fill a full flat in one operation of a CPU; false, with nothing done, if that can't be.

        For small leaves half the time goes into making the views that they are copied to.
        """
        if not leaves or kind(full.device) != "cpu" or any(x.code for x in self.by_flat[flat]):
            return False
        row: list[Tensor] = []
        for leaf, short in zip(leaves, self._shortages(flat), strict=True):
            if leaf is None or leaf.dtype != full.dtype:
                return False
            row.append(leaf if leaf.dim() == 1 else leaf.reshape(-1))
            if short:
                row.append(zeros(full.dtype, short))
        with torch.no_grad():
            torch.cat(row, out=full)
        return True

    def _shortages(self, flat: int) -> list[int]:
        """How many elements of padding follow each leaf of a flat."""
        key = ("shortages", flat)
        if key not in self._memo:
            stops = [slot.start for slot in self.by_flat[flat][1:]] + [self.flats[flat].length]
            rows = zip(self.by_flat[flat], stops, strict=True)
            self._memo[key] = [stop - slot.start - slot.numel for slot, stop in rows]
        return self._memo[key]

    def cut(self, flat: int, leaves: Sequence[Tensor], rank: int, copy: bool = False) -> Tensor:
        """This rank's part of a flat, from full leaves in the order of ``by_flat``.

        Unless ``copy``, a view where the leaves already lie in one buffer of this layout.
        """
        spec = self.flats[flat]
        low, high = spec.bounds(rank)
        base = None if copy else self.buffer_under(flat, leaves)
        if base is not None:
            return base.narrow(0, low, high - low)
        by_index = {s.index: x for s, x in zip(self.by_flat[flat], leaves, strict=True)}
        if (row := self._row(flat, by_index, rank)) is not None:
            with torch.no_grad():
                return torch.cat(row)
        local = torch.zeros(high - low, dtype=leaves[0].dtype, device=leaves[0].device)
        targets, sources = [], []
        for slot, a, b, offset in self.segments(flat, rank):
            x, target = by_index[slot.index], local.as_strided((b - a,), (1,), a)
            whole = b - a == slot.numel
            targets.append(target.view(slot.shape) if whole else target)
            sources.append(x if whole else x.reshape(-1)[offset : offset + b - a])
        if targets:
            torch._foreach_copy_(targets, sources)
        return local

    def _row(self, flat: int, leaves: Mapping[int, Tensor], rank: int) -> list[Tensor] | None:
        """What follows what in a rank's part of a flat; nothing if it cannot be concatenated.

        That takes leaves of one dtype on a CPU, and half the time of copying leaf by leaf.
        """
        low, high = self.flats[flat].bounds(rank)
        kinds = {(x.dtype, x.device.type) for x in leaves.values()}
        dtype = next(iter(kinds))[0]
        if kinds != {(dtype, "cpu")} or high == low:
            return None
        row: list[Tensor] = []
        at = 0
        for slot, a, b, offset in self.segments(flat, rank):
            x = leaves[slot.index]
            x = x if x.dim() == 1 else x.reshape(-1)
            if a > at:
                row.append(zeros(dtype, a - at))
            row.append(x if b - a == slot.numel else x[offset : offset + b - a])
            at = b
        if at < high - low:
            row.append(zeros(dtype, high - low - at))
        return row

    def buffer_under(self, flat: int, leaves: Sequence[Tensor]) -> Tensor | None:
        """The full flat that the leaves are views of, if they are; an empty leaf lies anywhere."""
        spec, row = self.flats[flat], self.by_flat[flat]
        k = next((k for k, x in enumerate(leaves) if x.numel()), 0)
        first, steps = leaves[k], self._steps(flat, leaves[k].itemsize)
        start = first.storage_offset() - row[k].start
        if start < 0 or (start + spec.length) * first.itemsize > first.untyped_storage().nbytes():
            return None
        base = first.data_ptr() - steps[k]
        places = [x.data_ptr() - base for x in leaves]
        if places != steps and any(
            x.numel() and a != b for x, a, b in zip(leaves, places, steps, strict=True)
        ):
            return None
        if not all(x.is_contiguous() for x in leaves) or len({x.dtype for x in leaves}) > 1:
            return None
        return first.detach().as_strided((spec.length,), (1,), start)

    def _steps(self, flat: int, size: int) -> list[int]:
        """How many bytes after the first leaf of a flat each one begins, of elements that large."""
        key = ("steps", flat, size)
        if key not in self._memo:
            row = self.by_flat[flat]
            self._memo[key] = [(slot.start - row[0].start) * size for slot in row]
        return self._memo[key]

    def select(self, keep: Callable[[int], bool]) -> Layout:
        """The layout of the kept leaves alone, every piece staying on its rank."""
        slots: list[Slot | None] = [None] * len(self.slots)
        flats = []
        for spec, row in zip(self.flats, self.by_flat, strict=True):
            kept = [slot for slot in row if keep(slot.index)]
            if len(kept) == len(row):
                flats.append(spec)
                moved = kept
            else:
                flats.append(replace(spec, cuts=tuple(_before(kept, at) for at in spec.cuts)))
                moved = [replace(slot, start=_before(kept, slot.start)) for slot in kept]
            for slot in moved:
                slots[slot.index] = slot
        return replace(self, slots=tuple(slots), flats=tuple(flats), _memo={})

    def subtree(self, entry: Any) -> tuple[Layout, Layout, tuple[int, ...]]:
        """The layout of the child under a key, an index or an attribute name.

        Returns:
            ``(child, selected, flats)``: the child's own layout, this layout
            restricted to the child's leaves, and which of its flats the child has.

        Raises:
            KeyError: there is no such child.
        """
        entries, children = self.spec.entries(), self.spec.children()
        if isinstance(entry, int) and entry not in entries and -len(entries) <= entry < 0:
            entry += len(entries)
        if entry not in entries:
            raise KeyError(entry)
        k = entries.index(entry)
        start = sum(child.num_leaves for child in children[:k])
        stop = start + children[k].num_leaves
        kept = self.select(lambda i: start <= i < stop)
        used = tuple(sorted({slot.flat for slot in kept.slots[start:stop] if slot}))
        renumber = {old: new for new, old in enumerate(used)}
        cut = len(str(entry)) + 1 if str(entry) else 0
        slots = tuple(
            slot
            and replace(
                slot, path=slot.path[cut:], index=slot.index - start, flat=renumber[slot.flat]
            )
            for slot in kept.slots[start:stop]
        )
        units = tuple(
            Unit(
                unit.name,
                tuple(renumber[f] for f in unit.flats if f in renumber),
                tuple(i - start for i in unit.slots if start <= i < stop),
                unit.chunk,
            )
            for unit in self.units
            if any(f in renumber for f in unit.flats)
        )
        outer, layers = find_layers(optree.tree_unflatten(children[k], list(range(stop - start))))
        child = replace(
            kept,
            spec=children[k],
            slots=slots,
            flats=tuple(kept.flats[f] for f in used),
            units=units,
            outer=outer,
            layers=layers,
            _memo={},
        )
        return child, kept, used

    def unit_nbytes(self, unit: int) -> int:
        """Bytes of a unit's leaves, as its merging with others goes by."""
        key = ("bytes of unit", unit)
        if key not in self._memo:
            slots = [slot for i in self.units[unit].slots if (slot := self.slots[i])]
            sizes = [slot.numel * self.flats[slot.flat].dtype.itemsize for slot in slots]
            self._memo[key] = sum(sizes)
        return self._memo[key]

    def state_bytes(self, rank: int) -> int:
        """Bytes that one tree of this layout takes on a rank."""
        return sum(
            (b - a) * flat.dtype.itemsize for flat in self.flats for a, b in [flat.bounds(rank)]
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor.

    >>> _strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def aligned(numel: int) -> int:
    """``numel`` and its padding."""
    return -(-numel // ALIGN) * ALIGN


def _before(kept: Sequence[Slot], at: int) -> int:
    """How many elements of the kept slots lie before ``at``, padding included."""
    return sum(min(max(at - slot.start, 0), aligned(slot.numel)) for slot in kept)


class _Hole:
    """Stands for a layer in ``Layout.outer``."""


def whole(layout: Layout) -> Layout:
    """The same units, kept whole on every rank: cut over no axis."""
    if layout.axis == ():
        return layout
    if "whole" not in layout._memo:
        flats = tuple(replace(flat, cuts=(0, flat.length)) for flat in layout.flats)
        mesh = None if layout.along is None else layout.mesh
        layout._memo["whole"] = replace(layout, flats=flats, mesh=mesh, axis=(), world=1, _memo={})
    made: Layout = layout._memo["whole"]
    return made


def find_layers(tree: Tree) -> tuple[optree.PyTreeSpec, tuple[Layer, ...]]:
    """The outermost ``Layers``' children, and the structure with holes in their place."""
    layers: list[Layer] = []
    at = 0

    def visit(name: str, node: Any) -> Any:
        nonlocal at
        if not isinstance(node, Layers):
            at += 1
            return node
        holes = Layers()
        for i, child in enumerate(node):
            spec = optree.tree_structure(child, none_is_leaf=True, namespace=NAMESPACE)
            label = f"{name}.{i}" if name else str(i)
            layers.append(Layer(label, at, at + spec.num_leaves, spec))
            at += spec.num_leaves
            holes.append(_Hole())
        return holes

    keys, items, spec = optree.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, Layers), none_is_leaf=True, namespace=NAMESPACE
    )
    nodes = [visit(dotted(*key), item) for key, item in zip(keys, items, strict=True)]
    holed = optree.tree_unflatten(spec, nodes)
    return optree.tree_structure(holed, none_is_leaf=True, namespace=NAMESPACE), tuple(layers)
