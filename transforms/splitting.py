"""``split``: tensor parallelism.

Law: ``unplace(split(f)(place(s), batch)) == f(s, batch)`` up to the rounding of sums over ranks,
bitwise on one rank, where ``f`` computes with split leaves by the functions that are made for them
(``zf.column``, ``zf.row``, ``zf.embed``, ``zf.cross_entropy``), or by a module that was planned.
Whole leaves are the same on all ranks of the axis, bit for bit.

A leaf that a rule names is split along one of its dimensions before any other transform cuts or
sends it, so each of them acts on this rank's part: norms, checkpoints and ``zf.full`` know the full
leaf by its layout (:mod:`zfunc.layout.splits`).

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import optree
from torch import Tensor

from zfunc.engine.agreement import check_same
from zfunc.engine.context import Context
from zfunc.engine.entries import ROLES, Entries, Roles
from zfunc.engine.order import Order
from zfunc.engine.placement import Twins
from zfunc.engine.step import Transform, transform_of
from zfunc.errors import PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout, whole
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.splits import Cut, Part, Split, mark
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import Mesh, laid_out
from zfunc.ranks.world import MESH
from zfunc.trees import tree
from zfunc.trees.nodes import OPAQUE, Tree, leaves_in

__all__ = ["Splitting", "split"]

Rules = tuple[tuple[str, Cut | None], ...]


@dataclass(frozen=True)
class Splitting(Transform):
    """See :func:`split`."""

    rules: Rules = ()
    mesh: Mesh | None = None
    axis: str = "tensor"
    roles: Roles = ROLES
    sharded: bool = False  # shard keeps the state's parts
    of_tree: bool = False  # the state is a params tree itself
    _plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    position: ClassVar[int] = Order.SPLIT
    by_unit: ClassVar[bool] = True
    represents: ClassVar[bool] = True
    name: ClassVar[str] = "split"

    def __repr__(self) -> str:
        return f"split(axis={self.axis!r})"

    @property
    def group(self) -> Group:
        """The ranks over which leaves are split."""
        return group(self.mesh, self.axis)

    def beside(self, others: Sequence[Transform]) -> Splitting:
        roles = next((x.roles for x in others if x.name == "shard"), self.roles)  # type: ignore[attr-defined]
        return Splitting(
            self.rules,
            self.mesh,
            self.axis,
            roles,
            sharded=any(other.name == "shard" for other in others),
            of_tree=any(other.of_params for other in others),
        )

    # How the state is represented

    def place(self, state: Any) -> Any:
        mesh = laid_out(self.mesh)
        entries = Entries({"params": state} if self.of_tree else state)
        names = self.roles.found("params", entries, self.name)
        check_same(group(self.mesh, mesh.names), {name: entries[name] for name in entries.names})
        layouts = [make_layout(entries[name]) for name in names]
        parts = {id(layout): self._parts(layout) for layout in layouts}
        twins = Twins(layouts)

        def place(layout: Layout, node: Tree) -> Tree:
            return self._placed(layout, node, parts.get(id(layout)) or self._parts(layout))

        for name in entries.names:
            entries[name] = twins.replace(entries[name], place)
        return entries["params"] if self.of_tree else entries.rebuild()

    def _placed(self, layout: Layout, node: Tree, parts: Sequence[Part | None]) -> Tree:
        """This rank's parts of a tree, each of which says what it is a part of."""
        rank = self.group.rank
        leaves = zip(layout.spec.flatten_up_to(node), parts, strict=True)
        found = [x if part is None or x is None else _part(x, part, rank) for x, part in leaves]
        parted = optree.tree_unflatten(layout.spec, found)
        if self.sharded:
            return parted
        return packed(whole(make_layout(parted, by=(self.name, repr(self)))), parted)

    def _parts(self, layout: Layout) -> list[Part | None]:
        """For each leaf what is to become of it; nothing for one that has no value."""
        ways, mesh = self.group.size, laid_out(self.mesh)
        splits = splits_by_rules(layout, self.rules, ways)
        return [
            None if slot is None else Part(splits.get(slot.path), mesh, self.axis)
            for slot in layout.slots
        ]

    def unplace(self, state: Any) -> Any:
        return tree.full(state)

    def check(self, state: Any) -> None:
        entries = Entries({"params": state} if self.of_tree else state)
        for name in self.roles.named("params"):
            nodes = leaves_in(entries[name], OPAQUE) if name in entries else []
            for node in nodes:
                self._check_node(name, node)

    def _check_node(self, name: str, node: Any) -> None:
        along = node.layout.along if isinstance(node, Readable | Replicated) else None
        if along != self.axis:
            raise PlacementError(
                f"state entry {name!r} is not split along {self.axis!r}, and {self!r} splits it. "
                "Give the step a state that it placed itself: state = step.place(full_state)."
            )
        ways, size = {s.split.ways for s in node.layout.present if s.split}, self.group.size
        if ways and ways != {size}:
            raise PlacementError(
                f"state entry {name!r} was split over {ways.pop()} ranks, and axis {self.axis!r} "
                f"has {size} here. `unplace` it there and `place` the result here."
            )

    # One call

    def configure(self, running: Context, state: Any) -> None:
        running.notes["split"] = self
        if self.mesh is not None:
            MESH.set(self.mesh.closed())

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        return [f"split: over {self.group.size} ranks of axis {self.axis!r}"]


def splits_by_rules(layout: Layout, rules: Rules, ways: int) -> dict[str, Split]:
    """The splits of the leaves that rules name; the first rule that names a leaf counts.

    Raises:
        PlacementError: a rule names no leaf, or one that does not fall into so many parts.
    """
    found: dict[str, Split] = {}
    used: set[str] = set()
    for slot in layout.present:
        fitting = [row for row in rules if fnmatchcase(slot.path, row[0])]
        used.update(pattern for pattern, _ in fitting)
        if fitting and (rule := fitting[0][1]) is not None:
            made = rule.split(slot.shape, ways, slot.path)
            if ways > 1:
                found[slot.path] = made
    if idle := [pattern for pattern, _ in rules if pattern not in used]:
        raise PlacementError(
            f"rules={{{idle[0]!r}: ...}} names no leaf: the parameters are "
            f"{', '.join(slot.path for slot in layout.present[:8])}, ... Mend the pattern "
            "(as in fnmatch: * stands for any text)."
        )
    return found


def _part(leaf: Any, part: Part, rank: int) -> Any:
    """This rank's part of a leaf, with the leaf's marks and its own."""
    own = leaf.view_as(leaf) if part.split is None else part.split.local(leaf, rank)
    if isinstance(leaf, Tensor):
        own.__dict__.update({k: v for k, v in leaf.__dict__.items() if k.startswith("_zfunc")})
    return mark(own, part)


@transform_of
def split(
    rules: Mapping[str, Cut | None] | None = None,
    mesh: Mesh | None = None,
    axis: str = "tensor",
) -> Splitting:
    """Split a step's parameters, and the work with them, over the ranks of a mesh axis.

    Args:
        rules: for patterns of leaf paths (``fnmatch``) how these leaves are cut, ``None`` to leave
            them whole. The first pattern that fits counts; leaves that none fits stay whole.
        mesh: the ranks by named axes (``zf.mesh(data=2, tensor=2)``).
        axis: the mesh axis to split over.

    Returns:
        A :class:`~zfunc.Step`. Every rank of the axis passes the same rows of a batch.

    Raises:
        PlacementError: when a state is placed: a rule names no leaf, or one that does not fall
            into so many parts.
    """
    return Splitting(tuple((rules or {}).items()), mesh, axis)
