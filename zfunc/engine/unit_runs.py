"""Trees of parameters during one pass, and their units: how each enters, is saved, and leaves.

Nothing keeps gathered memory alive after a layer but autograd, and there a saved-tensor
hook puts a :class:`Ticket` in the place of every tensor that lies in that memory.
Backward redeems tickets by letting the unit enter once more. Nothing calls a global hook:
autograd Functions carry their unit with them, so that backward may run on a thread of its own
(as it does on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zfunc.engine.context import RECOMPUTED, LayerInfo
from zfunc.engine.primitives import Ref
from zfunc.engine.seams import Pending, Ready, UnitInfo
from zfunc.engine.versions import check, versions
from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import leaves_of
from zfunc.layout.pool import pool
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import Tree, opened, register

__all__ = [
    "AGAIN",
    "ENTER",
    "LEAVE",
    "RELEASE",
    "LayerRef",
    "Running",
    "Source",
    "UnitRun",
    "dense",
]

ENTER, AGAIN, RELEASE, LEAVE = "enter", "again", "release", "leave"  # what happens to a unit
BYTES_ON_A_GPU = 2**30  # that may be under way at once


class Running(Protocol):
    """A pass as its trees and units see it (:class:`zfunc.engine.passes.Pass`).

    Attributes:
        plan: in which order units are expected (:class:`zfunc.engine.plans.Plan`).
        accord: how the ranks agree on what comes next (:class:`zfunc.engine.accord.Accord`).
        running: the context of the call, if there is one.
        spill: where gradients go that are not to stay in memory.
        tick: what backward runs towards, beside ``ends``.
        ends: leaves that hand over their gradients by themselves, and the hooks by which they do.
        holding: whether gradients are kept back for a later pass.
        lingering: units that are kept for a neighbour's sake.
        results: what has come of each unit's gradient.
    """

    plan: Any
    accord: Any
    running: Any
    spill: Callable[[Layout, bool], Any] | None
    tick: Tensor
    ends: list[tuple[Tensor, Any]]
    holding: bool
    lingering: list[UnitRun]
    results: dict[tuple[int, int], Pending]

    @property
    def asking(self) -> bool:
        """Whether ranks ask each other before each collective."""

    @property
    def beside(self) -> bool:
        """Whether this rank does what is not in the script."""

    @property
    def keeps(self) -> bool:
        """Whether gradients of several passes are added up."""

    def entering(self, source: Source) -> list[Any]:
        """The ``enter`` seams of a tree."""

    def leaving(self) -> list[Any]:
        """The ``leave`` seams."""

    def look_ahead(self, run: UnitRun) -> None:
        """Start the entry of what comes behind a unit."""

    def close_others(self, runs: Sequence[UnitRun]) -> None:
        """Release units of earlier layers that were kept."""

    def drop_transient(self, run: UnitRun) -> None:
        """Let go of what backward regathered for a unit without gradients."""

    def sent(self, run: UnitRun, value: Pending, nbytes: int) -> None:
        """Remember a gradient on its way."""


class UnitRun:
    """One unit during one pass."""

    def __init__(self, owner: Running, source: Source, index: int, stored: list[Tensor]) -> None:
        self.owner = owner
        self.source = source
        self.info = UnitInfo(
            source.layout, index, source.group, source.cut, source.index, owner.running
        )
        self.stored = stored
        self.values: list[Tensor] | None = None
        self.pending: Pending | None = None
        self.fetched: Pending | None = None  # on its way from the disk
        self.entered: dict[int, Tensor] | None = None
        self.seen: tuple[list[Tensor], list[int] | None] = [], None  # what entered, as it was
        self.tracked = False  # whether what entered is differentiable
        self.foreign: dict[int, int] = {}
        self.open = 0
        self.awaited = 0  # entries of this rank's own whose gradients may still come
        self.spare: list[Tensor] | None = None  # from before its turn, see `Accord`
        self.aside = self.spare_used = False
        self.touched = False
        self.served: set[int] = set()  # its layers that have run since it entered
        self.partial: list[Tensor | None] | None = None
        self.leaf_indices, live = source.layout.leaves_of_unit(index)
        self.live = live if source.differentiated else (False,) * len(live)
        # Whether what enters is an end of the graph, which autograd comes to as soon as it can. Not
        # where units are gathered once more: ranks on other paths could not tell their order.
        root = source.layout.layer_of_unit[index] < 0
        self.is_end = root and sum(self.live) == 1 and not source.sharded

    @property
    def key(self) -> tuple[int, int]:
        return self.info.key

    @property
    def gathers(self) -> bool:
        """Whether the ranks that agree on what comes next all take part when it enters."""
        return self.source.gathers

    @property
    def arriving(self) -> bool:
        """Whether what is stored has still to be waited for."""
        return self.source.arriving(self.info.index)

    def start(self) -> None:
        """Begin to enter, unless it is under way or done."""
        if self.values is None and self.pending is None:
            if self.owner.accord is not None and self.gathers:
                self.owner.accord.gather((self,))
            else:
                self.begin()

    def begin(self) -> None:
        """Begin to enter, with all ranks."""
        self.pending = self._entering()

    def begin_in_vain(self) -> None:
        """Take part in a gather that others need."""
        self._entering().wait()

    def _entering(self) -> Pending:
        if self.source.box is not None:
            self.source.box.wait(self.info.flats)
        value: Pending = Ready(self.stored)
        if self.source.node is not None:
            value = self.fetched or self.source.node.fetch(self.info.index)
        self.fetched = None
        for seam in self.owner.entering(self.source):
            value = seam(value, self.info)
        return value

    def fetch(self) -> None:
        """Begin to read the unit, if it is not in memory and there is room for it."""
        node = self.source.node
        if node is not None and self.values is None and self.pending is None and not self.fetched:
            self.fetched = node.fetch(self.info.index, must=False)

    def acquire(self) -> list[Tensor]:
        """The unit's values as the last ``enter`` seam made them."""
        if self.spare is not None and self.owner.beside:
            self.aside = self.spare_used = True
            self._find_foreign(self.spare)
            return self.spare
        self.owner.plan.record(self.key, follows=not self.owner.beside)
        if self.values is None:
            if self.pending is not None and self.owner.asking and self.gathers:
                self.owner.accord.gather((self,))
            self.start()
            assert self.pending is not None
            self.values, self.pending = self.pending.wait(), None
            self._find_foreign(self.values)
        self.owner.look_ahead(self)
        return self.values

    def _find_foreign(self, values: Sequence[Tensor]) -> None:
        own = {x.untyped_storage().data_ptr() for x in self.stored}
        where = [x.untyped_storage().data_ptr() for x in values]
        self.foreign = {at: i for i, at in enumerate(where) if at not in own}

    def acquire_again(self) -> list[Tensor]:
        """Values for backward: they stay until the unit's gradients have left."""
        if not self.touched:
            if self.owner.accord is not None:
                there = self.owner.accord.happens(AGAIN, self)
                if not there and self.spare is not None:
                    return self.spare
            self.touched = True
            self.owner.drop_transient(self)
            return self.acquire()
        assert self.values is not None
        return self.values

    def leaves(self) -> dict[int, Tensor]:
        """The entered leaves by leaf index, differentiable where they are trainable."""
        tracked = any(self.live) and torch.is_grad_enabled()
        if self.entered is None or (tracked and not self.tracked):
            self._check_eager()
            again = tracked and RECOMPUTED.get() == "again"
            if self.owner.accord is not None:
                self.owner.accord.happens(ENTER, self, tracked and not again)
            values = self.acquire()
            self.seen = values, versions(values)
            views = self._views(values)
            if again:
                return self._stand_ins(views)
            self.tracked = tracked
            if tracked:
                self.open += 1
                if self.owner.accord is not None:
                    self.owner.accord.entered(self)
                views = self._tracked(views)
            self.entered = dict(zip(self.leaf_indices, views, strict=True))
        return self.entered

    def check_unwritten(self) -> None:
        """Raise ``PlacementError`` if the function that was given the unit has written to it."""
        values, before = self.seen
        check(values, before, self._called)

    def _called(self, value: int) -> str:
        """The leaves in one of the unit's values."""
        layout = self.source.layout
        if self.source.flat:
            slots = [*layout.by_flat[self.info.flats[value]]]
        else:
            slots = [[s for i in self.info.flats for s in layout.by_flat[i]][value]]
        names = [self.source.name_of(slot.path) for slot in slots]
        kind = "parameter" if len(names) == 1 else "one of the parameters"
        return f"{kind} {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"

    def _tracked(self, views: list[Tensor]) -> list[Tensor]:
        if self.is_end:
            return [self._ending(v) if on else v for v, on in zip(views, self.live, strict=True)]
        if all(self.live):
            return list(_Enter.apply(self.owner.tick, self, views))
        pairs = zip(views, self.live, strict=True)
        outs = iter(_Enter.apply(self.owner.tick, self, [v for v, on in pairs if on]))
        return [next(outs) if on else v for v, on in zip(views, self.live, strict=True)]

    def _ending(self, view: Tensor) -> Tensor:
        """The one leaf of a unit outside all layers, as an end of the graph.

        Autograd comes to nodes in the reverse order of their making, so that a head's gradient
        would leave behind those of the layers, whose parameters enter later.
        """

        def leave(grad: Tensor) -> Tensor | None:
            self.leave([grad])
            if grad.layout != torch.strided:
                return None
            return grad.new_empty(()).expand(grad.shape)  # autograd keeps it to the end

        end = view.requires_grad_()
        self.owner.ends.append((end, end.register_hook(leave)))
        return end

    def _stand_ins(self, views: list[Tensor]) -> dict[int, Tensor]:
        """Leaves for a second forward pass, whose graph goes nowhere: the first one's has the
        gradients."""
        pairs = zip(views, self.live, strict=True)
        leaves = [v.detach().requires_grad_() if on else v for v, on in pairs]
        return dict(zip(self.leaf_indices, leaves, strict=True))

    def _check_eager(self) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise PlacementError(
                f"unit {self.info.name} would enter inside torch.func (vmap, grad, jvp, ...), "
                "which cannot follow parameters that are gathered on the way. Let them enter "
                "before: params = zf.tree.map(lambda p: p, params), outside of torch.func."
            )

    def _views(self, values: list[Tensor]) -> list[Tensor]:
        if not self.source.flat:
            return [x.detach() for x in values]
        layout = self.source.layout
        out: list[Tensor] = []
        for i, full in zip(self.info.flats, values, strict=True):
            out.extend(x.detach() for x in layout.views(i, full.detach()))
        return out

    def release(self) -> None:
        """Let the values go, unless they are used again at once."""
        if self.owner.accord is not None and not self.aside:
            self.owner.accord.happens(RELEASE, self)
        self.aside = False
        self.entered = None
        if self.source.sharded:
            self.seen = [], None
        self.touched = False
        self.served.clear()
        if self.foreign and self.owner.plan.soon(self) and torch.is_grad_enabled():
            pool().trim()  # the turning point: activations are at their largest
        else:
            self.values = None

    def pack(self, x: Tensor) -> Any:
        """A ticket for a saved tensor that lies in the entered memory; others as they are."""
        i = self.foreign.get(x.untyped_storage().data_ptr())
        if i is None:
            return x
        accord = self.owner.accord
        height = 0 if accord is None else accord.height
        return Ticket(self, i, x.dtype, x.shape, x.stride(), int(x.storage_offset()), height)

    def leave(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients of one entry's trainable leaves; the last entry's send them off."""
        running = self.owner.running
        if running is not None and running.reached is not None:
            running.reached.update(self._reached(grads))
        grads = [g if g is None else dense(g) for g in grads]
        if self.partial is None:
            self.partial = list(grads)
        else:
            self.partial = [_add(a, b) for a, b in zip(self.partial, grads, strict=True)]
        accord = self.owner.accord
        due: bool | None = self.open == 1
        if accord is not None:
            due = accord.leaves(self, self.awaited == 1)
        if due is None:
            return
        self.left()
        if due:
            self.send()
        if accord is not None and due:
            accord.catch_up()

    def _reached(self, grads: Sequence[Tensor | None]) -> Iterator[str]:
        """Paths, within all parameters, of the leaves that have a gradient."""
        slots = self.source.layout.slots
        live = (i for i, on in zip(self.leaf_indices, self.live, strict=True) if on)
        for i, g in zip(live, grads, strict=True):
            if g is not None and (slot := slots[i]) is not None:
                yield self.source.name_of(slot.path)

    def left(self) -> None:
        """One entry less."""
        self.open = max(self.open - 1, 0)
        self.touched = False
        if not self.owner.plan.soon(self):
            self.values = None
            if self.source.sharded and self.owner.keeps and self.owner.plan.ends:
                pool().trim()  # nothing is gathered any more, and soon two sets of gradients exist

    def send(self) -> None:
        """Hand the unit's full gradient to the ``leave`` seams."""
        if self.owner.accord is None or self.owner.holding:
            self.part(self.packed())
        else:
            self.owner.accord.reduce(self, self.packed())

    def packed(self) -> list[Tensor]:
        """The full flats of the gradient that has come so far, which is forgotten."""
        layout = self.source.layout
        grads, self.partial = self.partial, None
        assert grads is not None
        flats = []
        for i in self.info.trainable:
            count = len(layout.by_flat[i])
            row, grads = grads[:count], grads[count:]
            flats.append(layout.pack(i, row, pool().take))
            del row
        return flats

    def part(self, flats: list[Tensor]) -> None:
        """Send a full gradient, which is taken out of the list, through the ``leave`` seams."""
        value: Pending = Ready([*flats])
        nbytes = sum(x.nbytes for x in flats)
        flats.clear()
        for seam in self.owner.leaving():
            if (value := seam(value, self.info)) is None:
                return  # kept back
        self.owner.sent(self, value, nbytes)


def dense(grad: Tensor) -> Tensor:
    """A gradient whose every element lies in memory (``nn.Embedding(sparse=True)`` has others)."""
    return grad.to_dense() if grad.layout != torch.strided else grad


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@dataclass(frozen=True)
class Ticket:
    """Stands for a saved tensor inside a unit's entered memory."""

    run: UnitRun
    value: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    height: int

    def redeem(self) -> Tensor:
        if (accord := self.run.owner.accord) is not None:
            accord.passed(self.height)
        full = self.run.acquire_again()[self.value]
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, self.offset)


def redeem(x: Any) -> Tensor:
    """The unpack hook: the tensor behind a ticket, or the tensor itself."""
    return x.redeem() if isinstance(x, Ticket) else x


class _Enter(torch.autograd.Function):
    """The identity on a unit's leaves; backward hands their gradients to the unit.

    ``tick`` carries no value: it is the one tensor that backward runs towards, so
    that gradients leave unit by unit instead of through autograd's outputs.
    """

    @staticmethod
    def forward(ctx: Any, tick: Tensor, run: UnitRun, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        # No `setup_context`: torch looks up the signature of such a function at each call, which
        # takes a tenth of a step of small units. (Nothing enters inside torch.func.)
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(leaves)  # new tensors, which nobody else has

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.run.leave(grads)
        return None, None, None


class LayerRef(Ref):
    """One layer's parameters within a pass."""

    def __init__(self, source: Source, layer: int) -> None:
        self.source = source
        self.layer = layer
        self.span = source.layout.layers[layer]
        self.runs = [source.runs[i] for i in source.layer_units[layer]]
        self.differentiated = source.differentiated

    def force(self) -> Tree:
        indices = range(self.span.start, self.span.stop)
        found: dict[int, Tensor] = {}
        self.source.start(self.runs)
        if len(self.runs) == 1:
            found = self.runs[0].leaves()
        else:
            for run in self.runs:
                found.update(run.leaves())
        return optree.tree_unflatten(self.span.spec, [found.get(i) for i in indices])

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        owner = self.source.owner
        owner.close_others(self.runs)
        params = self.force()
        try:
            # What a recomputed layer saves is not kept, so there is nothing to redeem.
            if RECOMPUTED.get() or not any(run.foreign for run in self.runs):
                out = fn(params, *xs, **kw)
            else:
                with saved_tensors_hooks(self._pack, redeem):
                    out = fn(params, *xs, **kw)
            for run in self.runs:
                if run.source.sharded:  # whole ones stay: they are looked at once, in the end
                    run.check_unwritten()
            return out
        finally:
            del params
            for run in self.runs:
                run.served.add(self.layer)
                if len(run.served) == self.source.layout.layers_of_unit[run.info.index]:
                    run.release()
                else:
                    owner.lingering.append(run)

    def _pack(self, x: Tensor) -> Any:
        for run in self.runs:
            ticket = run.pack(x)
            if ticket is not x:
                return ticket
        # A node that held its own output, grad_fn and all, would keep a dropped graph for ever.
        return x if x.grad_fn is None else x.detach()

    def told(self, info: LayerInfo) -> LayerInfo:
        stack, depth, of = self.source.layout.stacks[self.layer]
        return LayerInfo(info.index, info.name, stack, depth, of, (self.source, self.layer))

    def __repr__(self) -> str:
        return f"Ref({self.span.name})"


register(
    LayerRef,
    lambda ref: ((ref.force(),), None, ("",)),
    lambda _, children: children[0],
)


class Source:
    """One tree of parameters in a pass: a placed node, or a plain tree cut into units."""

    def __init__(
        self,
        owner: Running,
        index: int,
        layout: Layout,
        stored: Tree,
        group: Group,
        cut: bool,
        differentiated: bool,
        spills: bool = True,
    ) -> None:
        self.owner, self.index, self.layout, self.group = owner, index, layout, group
        self.cut, self.differentiated = cut, differentiated
        self.name_of: Callable[[str], str] = str  # from a leaf's path here to that in all params
        self.sharded = isinstance(stored, Readable)
        units_apart = isinstance(stored, Readable) and stored.streams
        self.node: Any = stored if units_apart else None
        self.box = stored if isinstance(stored, Replicated) else None
        columns = stored.flats if self.box is not None or isinstance(stored, Sharded) else None
        self.flat = self.node is not None or columns is not None
        spill = owner.spill if differentiated and spills else None
        self.sink = None if spill is None else spill(layout, cut)
        plain = [] if self.flat else leaves_of(layout, opened(stored))
        self.runs: list[UnitRun] = []
        for i, unit in enumerate(layout.units):
            if self.node is not None:
                mine = []
            elif columns is not None:
                mine = [columns[f] for f in unit.flats]
            else:
                mine = [plain[s.index] for f in unit.flats for s in layout.by_flat[f]]
            self.runs.append(UnitRun(owner, self, i, mine))
        self.layer_units = _units_of_layers(layout)
        stored_at = next((x.device for run in self.runs for x in run.stored), None)
        self.device = stored_at if self.node is None else self.node.device

    @property
    def gathers(self) -> bool:
        """Whether the ranks of the pass's accord take part when a unit enters."""
        accord = self.owner.accord
        return self.sharded and self.cut and accord is not None and self.group is accord.ranks

    @property
    def direct(self) -> bool:
        """Whether layers need no references: nothing is done to what they hold, nor to a call
        of theirs, and their gradients go nowhere, so that it does not matter when they leave."""
        running = self.owner.running
        if running is None or self.sharded or self.group.size > 1 or self.owner.entering(self):
            return False
        return not running.around and not any(t.by_unit for t in running.transforms)

    def view(self) -> Tree:
        """The tree for the loss: root leaves entered, a reference for each layer."""
        layout = self.layout
        found: dict[int, Tensor] = {}
        if self.direct:
            for run in self.runs:
                found.update(run.leaves())
            indices = range(len(layout.slots))
            return optree.tree_unflatten(layout.spec, [found.get(i) for i in indices])
        root = {layout.unit_of_flat[s.flat] for j in layout.root_leaves if (s := layout.slots[j])}
        runs = [self.runs[i] for i in sorted(root)]
        self.start(runs)
        for run in runs:
            found.update(run.leaves())
        if not layout.layers and layout.spec.is_leaf():
            return found.get(0)
        items: list[Any] = []
        at, k = 0, 0
        while at < len(layout.slots) or k < len(layout.layers):
            if k < len(layout.layers) and layout.layers[k].start == at:
                items.append(LayerRef(self, k))
                at, k = layout.layers[k].stop, k + 1
            else:
                items.append(found.get(at))
                at += 1
        return optree.tree_unflatten(layout.outer, items)

    def arriving(self, unit: int) -> bool:
        """Whether what is stored of a unit has still to be waited for."""
        flats = self.layout.units[unit].flats
        return self.box is not None and not self.box.under_way.keys().isdisjoint(flats)

    def start(self, runs: Sequence[UnitRun]) -> None:
        """Start the entry of units that are needed together, before any is waited for."""
        if self.sharded and self.node is None:
            if self.gathers:
                self.owner.accord.approach(runs)
            for run in runs:
                if run.entered is None:
                    run.start()

    def limit(self, on_a_host: int) -> int:
        """How many bytes may be under way at once."""
        on_host = self.device is None or self.device.type == "cpu"
        return on_a_host if on_host else BYTES_ON_A_GPU

    def gradients(self) -> Tree:
        """What arrived, cut or whole."""
        if self.sink is not None:
            return self.sink.node()
        layout = self.layout
        flats: list[Tensor | None] = [None] * len(layout.flats)
        for run in self.runs:
            pending = self.owner.results.get(run.key)
            arrived = None if pending is None else pending.wait()
            for k, i in enumerate(run.info.trainable):
                flats[i] = self._zeros(run, i) if arrived is None else arrived[k]
        return Sharded(layout, flats) if self.cut else Replicated(layout, flats=flats)

    def _zeros(self, run: UnitRun, flat: int) -> Tensor:
        """The gradient of a unit that no rank has used."""
        spec = self.layout.flats[flat]
        low, high = spec.bounds(self.group.rank) if self.cut else (0, spec.length)
        return torch.zeros(high - low, dtype=spec.dtype, device=run.stored[0].device)


def _units_of_layers(layout: Layout) -> list[list[int]]:
    """For each layer its units."""
    if "layers" not in layout._memo:
        layout._memo["layers"] = [
            sorted({layout.unit_of_flat[s.flat] for s in layout.slots[k.start : k.stop] if s})
            for k in layout.layers
        ]
    return layout._memo["layers"]
