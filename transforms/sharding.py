"""``shard``: ZeRO stages 0 to 3.

Law: ``unplace(shard(f)(place(s), local batch)) == f(s, batch)`` up to the rounding of
sums over ranks, bitwise on one rank, for every stage, world, layout and step.

A stage is only which of three trees is cut (Rajbhandari et al. 2020, "ZeRO"):

=====  ======  =========  =========  ==========================================
stage  params  gradients  opt_state  elements sent per rank and step, N ranks
=====  ======  =========  =========  ==========================================
0      whole   whole      whole      2 (N-1)/N: all-reduce
1, 2   whole   cut        cut        2 (N-1)/N: reduce-scatter, all-gather
3      cut     cut        cut        3 (N-1)/N: two all-gathers, reduce-scatter
=====  ======  =========  =========  ==========================================

Stages 1 and 2 differ only under ``accumulate``: stage 1 sums whole gradients and
reduces once, stage 2 keeps cut sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

from torch import Tensor

from zfunc.engine.agreement import check_same
from zfunc.engine.communication import Communication, communication
from zfunc.engine.context import PLACING, Context
from zfunc.engine.entries import ROLES, Entries, Roles
from zfunc.engine.hooks import Order, Pending
from zfunc.engine.meshed import Meshed
from zfunc.engine.placement import Twins, layout_for, placed_nodes, reassembled, rejoined
from zfunc.engine.plans import there_and_back
from zfunc.engine.same_rows import look_anew, with_same_rows
from zfunc.engine.step import Transform, transform_of
from zfunc.engine.unit_info import UnitInfo, Waiting
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout, whole
from zfunc.layout.pool import empty, pool
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.rounds import ReplicaSum, Rounds, in_rounds
from zfunc.layout.sharded import Sharded, cut, present
from zfunc.layout.stages import Stages
from zfunc.ranks.axes import alone, group
from zfunc.ranks.comm import Group, Handle
from zfunc.ranks.meshes import BATCH, Axes, Mesh
from zfunc.ranks.world import MESH
from zfunc.trees import tree
from zfunc.trees.nodes import OPAQUE, Lazy, Tree, leaves_in, opened

__all__ = ["Shard", "shard"]

CUT = ("nothing", "optimizer state", "gradients and optimizer state", "the whole state")
FIRST = 1 << 20  # bytes of layers whose gradients leave together before all others


class Staged(Protocol):
    """A transform whose ranks have different layers (``pipeline``).

    Attributes:
        has_stages: whether there may be several of them.
    """

    has_stages: bool

    @property
    def axis(self) -> str:
        """The mesh axis along which they have."""

    def stages(self, params: Tree, ranks: Group) -> Stages:
        """Which of some ranks have which leaves of a params tree."""

    def agree(self) -> None:
        """Raise if ranks were given other arguments; a collective."""

    @property
    def followed(self) -> str:
        """The arguments that each call follows."""

    def read(self, params: Any) -> Tree:
        """Params of which each rank has read what it needs, where files are given."""


@dataclass(frozen=True)
class Shard(Meshed):
    """See :func:`shard`."""

    stage: int = 3
    mesh: Mesh | None = None
    axis: Axes = "data"
    unit_bytes: int = 1 << 26
    persist_below: int = 0
    prefetch: int = 1
    roles: Roles = ROLES
    replica: Axes | None = None
    merge: bool = True  # tiny layers into one unit
    of_tree: bool = False  # the state is a params tree itself
    staged: Staged | None = field(default=None, compare=False, repr=False)
    by: tuple[str, str] | None = None  # the transform that it stands in

    position: ClassVar[int] = Order.SHARD
    represents: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = True
    name: ClassVar[str] = "shard"

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"stage={self.stage!r}: ZeRO has stages 0 (nothing cut), 1 (optimizer state), "
                "2 (and gradients) and 3 (and parameters)."
            )
        if self.prefetch < 0 or self.unit_bytes <= 0 or self.persist_below < 0:
            raise ValueError(
                f"prefetch={self.prefetch}, unit_bytes={self.unit_bytes}, persist_below="
                f"{self.persist_below}: expected prefetch >= 0, unit_bytes > 0, persist_below >= 0."
            )

        self._check_axes()

    def _check_axes(self) -> None:
        if both := [name for name in self._axes if name in self._copies]:
            raise ValueError(f"axis={self.axis!r}, replica={self.replica!r}: {both[0]!r} is both.")
        self._check_mesh(self.mesh)

    def _check_mesh(self, mesh: Mesh | None) -> None:
        """Raise if ranks have other rows along an axis over which nothing is averaged."""
        over = self.averages
        for name, size in mesh.axes if mesh is not None else ():
            if size > 1 and name in BATCH and name not in over:
                raise CompositionError(
                    f"ranks of {mesh} have other rows along {name!r}, but shard cuts along "
                    f"{self.axis!r} and averages over replica={self.replica!r}, so they would "
                    f"drift apart. Make {name!r} an axis of the cut, or of replica=."
                )

    def __repr__(self) -> str:
        return f"shard(stage={self.stage})"

    @cached_property
    def _axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    @cached_property
    def _copies(self) -> tuple[str, ...]:
        """The axes along which ranks have the same part of a state."""
        if self.replica is not None:
            return (self.replica,) if isinstance(self.replica, str) else tuple(self.replica)
        sizes = {} if self.mesh is None else dict(self.mesh.axes)
        several = sizes.get("replica", 1) != 1 and "replica" not in self._axes
        return ("replica",) if several else ()

    @cached_property
    def averages(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self._axes, *self._copies)

    @property
    def replicated(self) -> bool:
        """Whether several ranks may have the same part of a state."""
        sizes = {} if self.mesh is None else dict(self.mesh.axes)
        return any(sizes.get(name) != 1 for name in self._copies)

    @cached_property
    def cut_along(self) -> Axes:
        """The axes along which ranks have different parts of a state."""
        if self.staged is None:
            return self.axis
        return (self.staged.axis, *self._axes) if self.stage else self.staged.axis

    @property
    def cuts_params(self) -> bool:
        """Whether ranks have different parts of the parameters between steps."""
        return self.stage == 3 or self.staged is not None

    @property
    def group(self) -> Group:
        """The ranks over which states are cut."""
        return group(self.mesh, self.cut_along)

    @property
    def within(self) -> Group:
        """Those over which a unit is cut: of a pipeline, the ranks of one stage."""
        if self.staged is not None and self.stage == 0:
            return alone()
        return group(self.mesh, self.axis)

    @property
    def replicas(self) -> Group:
        """The ranks that have the same part of a state as this one."""
        copies = self.averages if self.staged is not None and self.stage == 0 else self._copies
        return group(self.mesh, copies) if copies else alone()

    @property
    def everyone(self) -> Group:
        """The ranks over which losses and gradients are averaged."""
        self._check_mesh(self.mesh and self.mesh.closed())
        return group(self.mesh, self.averages if self._copies else self.axis)

    @property
    def deciding(self) -> Group:
        """All ranks that start from the same state."""
        if self.staged is None:
            return self.everyone
        return group(self.mesh, (self.staged.axis, *self.averages))

    @property
    def params(self) -> list[str]:
        """The entries of a state that are parameters."""
        return self.roles.named("params")

    @property
    def _room(self) -> int:
        """Layers that are not merged may be there together if they could have been."""
        return 0 if self.merge else self.unit_bytes // 8

    def beside(self, others: Sequence[Transform]) -> Shard:
        merge = not any(other.by_layer for other in others)
        staged = next((other for other in others if getattr(other, "has_stages", False)), None)
        return replace(
            self,
            merge=merge,
            of_tree=any(other.of_params for other in others),
            staged=staged,  # type: ignore[arg-type]
        )

    # How the state is represented

    def layout(self, params: Tree) -> Layout:
        """How a plain params tree is cut here."""
        return make_layout(
            params,
            world=self.group.size,
            mesh=self.mesh and self.mesh.closed(),
            axis=self.cut_along,
            unit_bytes=self.unit_bytes,
            persist_below=self.persist_below if self.stage == 3 and self.staged is None else 0,
            merge=self.merge,
            first=FIRST if self.stage < 3 and self.group.size > 1 else None,
            by=self.by or (self.name, repr(self)),
            stages=None if self.staged is None else self.staged.stages(params, self.group),
        )

    def place(self, state: Any) -> Any:
        if self.staged is not None:
            self.staged.agree()  # before anything follows from them
        if self.of_tree:
            state = state if self.staged is None else self.staged.read(state)
            check_same(self.deciding, {"params": state})
            if not self.cuts_params:
                return state
            params = opened(state)  # of which split has taken parts
            return present(cut(self.layout(params), params, self.group.rank, True))
        entries = Entries(state)
        names = self.roles.found("params", entries, self.name)
        for name, _ in self.roles:
            if name not in entries and name not in dict(ROLES):
                raise PlacementError(
                    f"roles name the entry {name!r}, which the state ({entries}) does not have."
                )
        layouts = {name: self.layout(entries[name]) for name in names}
        check_same(self.deciding, {name: entries[name] for name in entries.names})
        rank, twins = self.group.rank, Twins(layouts.values())
        for name in entries.names:
            if name not in layouts:
                entries[name] = twins.replace(
                    entries[name],
                    lambda layout, node: self._whole_or_cut(self._cuts_rest, layout, node, rank),
                )
            elif self.cuts_params:
                entries[name] = self._whole_or_cut(True, layouts[name], entries[name], rank)
            else:
                entries[name] = packed(layouts[name], entries[name])
        return entries.rebuild()

    def _whole_or_cut(self, cutting: bool, layout: Layout, node: Tree, rank: int) -> Tree:
        placing, lies = PLACING.get(), layout if cutting else whole(layout)
        for transform in placing.transforms if placing is not None else ():
            if (held := transform.hold(lies, node)) is not None:
                return held
        return cut(layout, node, rank, copy=True) if cutting else packed(layout, node)

    @property
    def _cuts_rest(self) -> bool:
        """Whether ranks have different parts of what is shaped like the parameters."""
        return self.stage >= 1 or self.staged is not None

    def unplace(self, state: Any) -> Any:
        return tree.full(state)

    def check(self, state: Any) -> None:
        if self.of_tree and isinstance(state, Sharded) == self.cuts_params:
            return
        entries = Entries({"params": state} if self.of_tree else state)
        params = [name for name in self.roles.named("params") if name in entries]
        others = [name for name in self.roles.named("opt_state") if name in entries]
        checked: set[int] = set()  # layouts: most entries have one
        for name in params:
            self._check_entry(name, entries[name], self.cuts_params, checked)
        for name in others:
            if self._represents(entries, entries[name]):
                self._check_entry(name, entries[name], self._cuts_rest, checked)

    def _represents(self, entries: Entries, entry: Any) -> bool:
        """Whether an entry has something placed in it, or something that should have been."""
        if placed_nodes(entry):
            return True
        if not self._cuts_rest or not any(
            isinstance(x, Tensor) and x.ndim for x in leaves_in(entry)
        ):
            return False
        params = [entries[name] for name in self.params if name in entries]
        layouts = [self._layout_of(p) for p in params]
        return Twins(layouts).holds(entry)

    def _check_entry(self, name: str, entry: Any, cut: bool, checked: set[int]) -> None:
        leaves = leaves_in(entry, OPAQUE)
        nodes = [node for node in leaves if isinstance(node, Readable) and node.layout.axis != ()]
        if bool(nodes) != cut:
            pair = ("whole", "cut over the ranks")
            is_, should = reversed(pair) if nodes else pair
            raise PlacementError(
                f"state entry {name!r} is {is_}, but {self!r} keeps it {should}. Give the step a "
                "state that it placed itself: state = step.place(full_state); a state of another "
                "step becomes full by that step's `unplace`."
            )
        for node in nodes:
            if id(node.layout) not in checked:
                self._check_ranks(name, node.layout)
                checked.add(id(node.layout))
        if not cut and name in self.params:
            self._check_whole(name, entry)

    def _check_ranks(self, name: str, layout: Layout) -> None:
        """Raise if a state entry belongs to other ranks than those that take part here."""
        theirs = Sharded(layout, ()).group  # raises if it is from a world of another size
        if theirs is not self.group:
            raise PlacementError(
                f"state entry {name!r} was placed along axis {layout.axis!r} of "
                f"{layout.mesh or 'all ranks'}, but {self!r} works along {self.cut_along!r} of "
                f"{self.mesh or 'all ranks'}. `unplace` it with the step that placed it, and "
                "`place` the result here."
            )

    def _check_whole(self, name: str, params: Tree) -> None:
        if isinstance(params, Lazy):
            return
        if not isinstance(params, Replicated):
            path = next(iter(tree.paths(params)), "")
            raise PlacementError(
                f"{tree.dotted(name, path)} is not from a state that {self!r} has placed: call "
                "state = step.place(full_state) first. (What a step returns is placed, and "
                "zf.tree.map and zf.tree.set keep it so; a dict put together by hand is not.)"
            )
        layout, size = params.layout, self.group.size
        if layout.world != size:
            raise PlacementError(
                f"{tree.dotted(name, layout.present[0].path)} was placed on {layout.world} ranks, "
                f"the current world has {size}. `unplace` the state there and `place` it here."
            )
        if layout.axis != ():
            self._check_ranks(name, layout)

    # One call

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        beside = "" if self.staged is None else self.staged.followed
        return with_same_rows(self.mesh, self.averages, call, state, args, kwargs, beside)

    def configure(self, running: Context, state: Any) -> None:
        over, memo = communication(running), running.memo
        if "ranks of shard" not in memo:
            memo["ranks of shard"] = self.within, self.replicas, self.everyone
        over.group, over.replicas, over.everyone = memo["ranks of shard"]
        over.reduce_once, over.gathers_anew = self.stage < 2, self.stage == 3
        over.prefetch, over.room = self.prefetch, self._room
        layouts = memo.setdefault("layouts", {})
        over.layout_for = lambda params: self._layout_for(params, layouts)
        if self.mesh is not None:
            MESH.set(self.mesh.closed())

    def _layout_for(self, params: Tree, memo: dict[Any, Layout]) -> tuple[Layout, bool]:
        """The layout of a plain params tree, and whether its gradients are cut."""
        return layout_for(params, self.group.size, memo, self.layout), self._cuts_rest

    def leave(self, value: Pending, unit: UnitInfo) -> Pending:
        """Start the reduction of a unit's gradients: to all ranks, or to their owners."""
        over = communication(unit.running)
        if over.keeps is not None and over.keeps(unit):
            return value
        rows = zip(unit.trainable, value.wait(), strict=True)
        if over.everyone.size == 1:
            return Waiting([full for _, full in rows])
        return Waiting([self._reduced(full, i, unit, over) for i, full in rows])

    def _reduced(self, full: Tensor, i: int, unit: UnitInfo, over: Communication) -> Any:
        """The sum over everyone of a full flat, under way."""
        spec, label = unit.layout.flats[i], f"reduce {unit.name}"
        replicated = over.replicas.size > 1
        if unit.cut and not spec.whole:
            cuts = unit.cuts(i)
            if unit.group.size == 1:  # of a pipeline: there is nothing to sum but over replicas
                own = full.clone() if unit.borrowed(i, full) else full
                return ReplicaSum(over.replicas, Handle(own), label)
            low, high = cuts[unit.group.rank], cuts[unit.group.rank + 1]
            # Recycled gradients lie idle in the next forward pass: not where memory is scarce.
            recycled = pool(unit.group).take if self.stage < 3 else empty
            own = recycled(high - low, full.dtype, full.device)
            part = unit.group.reduce_scatter(full, cuts=cuts, out=own, label=label)
            return ReplicaSum(over.replicas, part, label) if replicated else part
        borrowed = unit.borrowed(i, full)
        out = pool(unit.group).take(full.numel(), full.dtype, full.device) if borrowed else full
        if in_rounds(spec, full.device, replicated):
            return Rounds(unit.group, over.replicas, spec, full, out, label)
        return over.everyone.all_reduce(out.copy_(full) if borrowed else full, label=label)

    def finish(self, old: Any, out: Any) -> Any:
        if isinstance(out, tuple) and out and type(out[0]) is type(old):
            return (self._sealed(old, out[0]), *out[1:])
        return self._sealed(old, out) if type(out) is type(old) else out

    def _sealed(self, old: Any, new: Any) -> Any:
        """A state whose params are put together from parts, or cut, as they were before."""
        before, after = Entries(old), Entries(new)
        for name in self.roles.named("params"):
            if name in before and name in after:
                old_params, new_params = before[name], after[name]
                if isinstance(old_params, Readable):
                    after[name] = reassembled(old_params, new_params)
                elif isinstance(old_params, Replicated):
                    after[name] = self._whole(rejoined(old_params, new_params))
        return after.rebuild()

    def _whole(self, params: Tree) -> Tree:
        """Params of which a step has changed dtypes lie otherwise from now on."""
        lies = isinstance(params, Replicated) or any(
            isinstance(x, Lazy) for x in leaves_in(params, OPAQUE)
        )
        return params if lies else packed(self.layout(params), params)

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        """Until a step has run: every params tree is differentiated once, all layers in order."""
        look_anew(self.mesh)
        if self.staged is not None:  # which counts what it sends
            return
        entries = Entries(state)
        placed = [entries[name] for name in self.params if name in entries]
        memo["reduce once"] = self.stage < 2
        for call, params in enumerate(placed):
            layout = self._layout_of(params)
            memo["sources", call] = [(layout, self.stage >= 1)]
            memo["plan", "grad", call] = there_and_back([layout])

    def _layout_of(self, params: Tree) -> Layout:
        return params.layout if isinstance(params, Readable | Replicated) else self.layout(params)

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        size, what = self.within.size, CUT[self.stage]
        lines = [f"shard: {what} cut over {size} rank{'s' * (size > 1)} of axis {self.axis!r}"]
        if (copies := self.replicas.size) > 1:
            lines[0] += f", averaged over {copies} replicas"
        for layout in dict.fromkeys(layout for layout, _ in _sources(memo)):
            sizes = {
                unit.name: sum(
                    layout.flats[i].length * layout.flats[i].dtype.itemsize for i in unit.flats
                )
                for unit in layout.units
            }
            largest = max(sizes, key=lambda name: sizes[name], default="none")
            lines.append(
                f"units: {len(sizes)}, the largest {largest} of {sizes.get(largest, 0)} bytes; "
                f"{self.prefetch} layer{'s' * (self.prefetch != 1)} gathered ahead"
            )
        if most := [row for key, row in memo.items() if key[0] == "most under way"]:
            ahead, leaving = (max(column) for column in zip(*most, strict=True))
            lines.append(f"under way at most: {ahead} bytes ahead, {leaving} of gradients")
        return lines


def _sources(memo: Mapping[Any, Any]) -> list[tuple[Layout, bool]]:
    rows: list[Any] = []
    while ("sources", len(rows)) in memo:
        rows.append(memo["sources", len(rows)])
    return [source for row in rows for source in row]


@transform_of
def shard(
    stage: int = 3,
    mesh: Mesh | None = None,
    axis: Axes = "data",
    unit_bytes: int = 1 << 26,
    persist_below: int = 0,
    prefetch: int = 1,
    roles: Mapping[str, str] | None = None,
    replica: Axes | None = None,
) -> Shard:
    """Run a step on all ranks of a mesh axis, with its state sharded over them (ZeRO).

    Call it as ``shard(step, stage=3)`` or as the decorator ``@shard(stage=3)``.

    Args:
        stage: 0 shards nothing (plain data parallelism), 1 the optimizer state, 2 also
            the gradients, 3 also the parameters.
        mesh: the ranks by named axes (``zf.mesh``); the whole world on ``"data"`` if None.
        axis: the mesh axis, or axes, to shard over and to average over.
        unit_bytes: larger units (layers) are split between leaves; consecutive layers
            are merged up to an eighth of it (below stage 3 the last ones, whose gradients
            are ready first, up to 1 MiB, those before them up to twice that, and so on; and
            leaves that are a good part of what is outside all layers, such as a head, are units
            of their own).
            Where each layer has to be a unit of its own (under ``drop_layers``), as many are
            gathered ahead and kept for backward.
        persist_below: stage 3 keeps leaves of fewer elements replicated. Units
            travel as one buffer, in which small leaves cost no messages of their own, so
            this is off by default.
        prefetch: how many layers ahead parameters are gathered; on a CPU no more than 64 MiB
            of them, or a single unit.
        roles: which entries of the state are ``"params"`` and ``"opt_state"``, beside
            those of that name. Other entries that hold trees shaped like the params
            (averages, teachers) are sharded like optimizer state.
        replica: the axis, or axes, to average over without sharding (HSDP): ranks along it have the
            same part of the state. By default ``"replica"``, where the mesh has several. What is
            gathered then stays within an axis of fast links, such as those in a node; between
            replicas goes the sum of this rank's part of the gradients.

    Returns:
        A :class:`~zfunc.Step`. Every rank passes its own part of the batch.

    Raises:
        ValueError: a stage outside 0 to 3, or another argument out of range.
        CompositionError: the step is sharded already; ranks along ``data`` or ``replica`` of the
            mesh, which have other rows, would not be averaged over.
    """
    return Shard(stage, mesh, axis, unit_bytes, persist_below, prefetch, Roles.of(roles), replica)
