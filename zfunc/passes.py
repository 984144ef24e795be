"""One pass of parameters through a computation, unit by unit, forward and backward.

Forward, a unit *enters*: what the state stores goes through the ``enter`` seams in
data-flow order (gather, cast, ...) and comes out as the leaves that the layer sees.
Backward, as soon as the gradients of all its leaves are there, they *leave* through
the ``leave`` seams, asynchronously.

The order in which units enter is recorded; the next pass starts the entry of the next
layer's units while this one computes. The record is a hint and never a law: a pass that
takes another path gathers what it needs when it needs it. Ranks that take different paths
from each other agree on what comes next: see :mod:`zfunc.accord`.

Nothing here calls a global hook: autograd Functions carry their unit with them, so
that backward may run on a thread of its own (as it does on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zfunc import context
from zfunc.accord import Accord
from zfunc.comm import Group
from zfunc.context import RECOMPUTED, LayerInfo
from zfunc.errors import PlacementError
from zfunc.nodes import Placed, Tree, opened, register
from zfunc.placed.layout import Layout
from zfunc.placed.pieces import leaves_of
from zfunc.placed.replicated import Replicated
from zfunc.placed.sharded import Sharded
from zfunc.placed.streamed import Streamed
from zfunc.plans import Plan
from zfunc.pool import pool
from zfunc.primitives import Ref, on_enter
from zfunc.seams import Pending, Total, gather
from zfunc.unit_runs import UnitRun, redeem

__all__ = ["Pass", "Source"]

# Bytes of full gradients that wait for the network: one unit's are always there. Where parameters
# are cut a host's memory is scarce; a GPU must be kept busy.
IN_FLIGHT_BYTES, IN_FLIGHT_BYTES_LEAN = 2**26, 2**24
BYTES_ON_A_GPU = 2**30


class LayerRef(Ref):
    """One layer's parameters within a pass."""

    def __init__(self, source: Source, layer: int) -> None:
        self.source = source
        self.layer = layer
        self.span = source.layout.layers[layer]
        self.runs = [source.runs[i] for i in source.layer_units[layer]]
        self.differentiated = source.differentiated

    def _subtree(self) -> Tree:
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
        params = self._subtree()
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

    def resolve(self) -> Tree:
        return self._subtree()

    def told(self, info: LayerInfo) -> LayerInfo:
        stack, depth, of = self.source.layout.stacks[self.layer]
        return LayerInfo(info.index, info.name, stack, depth, of, (self.source, self.layer))

    def __repr__(self) -> str:
        return f"Ref({self.span.name})"


register(
    LayerRef,
    lambda ref: ((ref.resolve(),), None, ("",)),
    lambda _, children: children[0],
)


class Source:
    """One tree of parameters in a pass: a placed node, or a plain tree cut into units."""

    def __init__(
        self,
        owner: Pass,
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
        self.sharded = isinstance(stored, Sharded | Streamed)
        self.node = stored if isinstance(stored, Streamed) else None  # units come one by one
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
                self.owner.accord.approach(runs)  # type: ignore[union-attr]
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


@dataclass
class Pass:
    """The state of one pass on one rank.

    Attributes:
        before, after: ``enter`` seams on the way to, and behind, the gather.
        leave: ``leave`` seams, first to last.
        plan: in which order units are expected to enter.
        thinned: whether layers are left out on purpose, perhaps all of them.
        waiting: units whose gradients an earlier pass kept back for this one.
        holding: whether the gradients of this one are kept back.
        idle: units that no rank uses in this pass, by a common decision.
        memory, place: where, and under which name, a pass leaves the script of the next one.
        accord: how the ranks agree on what comes next; ``None`` on one rank.
        running: the context of the call, if there is one.
        most_in_flight: bytes of gradients that were on their way at once.
        spill: where gradients go that are not to stay in memory: a function of their layout
            and whether they are cut.
    """

    before: Sequence[Any] = ()
    after: Sequence[Any] = ()
    leave: Sequence[Any] = ()
    plan: Plan = field(default_factory=Plan)
    running: Any = None
    spill: Callable[[Layout, bool], Any] | None = None
    sources: list[Source] = field(default_factory=list)
    lingering: list[UnitRun] = field(default_factory=list)
    arrivals: list[tuple[UnitRun, Pending, int]] = field(default_factory=list)
    results: dict[tuple[int, int], Pending] = field(default_factory=dict)
    evaluating: bool = False
    thinned: bool = False
    transient: list[UnitRun] = field(default_factory=list)
    waiting: Mapping[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    holding: bool = False
    idle: set[tuple[int, int]] = field(default_factory=set)
    memory: dict[Any, Any] | None = None
    place: Any = None
    accord: Accord | None = None
    in_flight: int = 0
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.tick = torch.zeros((), requires_grad=True)

    def add(
        self,
        layout: Layout,
        stored: Tree,
        group: Group,
        *,
        cut: bool,
        differentiated: bool,
        spills: bool = True,
    ) -> Source:
        """Let one more tree take part; ``spills``: its gradients may leave memory."""
        source = Source(self, len(self.sources), layout, stored, group, cut, differentiated, spills)
        self.sources.append(source)
        self.plan.runs.append(source.runs)
        if self.accord is not None:
            self.accord.admit(source)
        return source

    def agree(self, ranks: Group) -> None:
        """From now on the ranks of a group agree on what comes next."""
        if self.accord is None and ranks.size > 1:
            script = None if self.memory is None else self.memory.get(self.place)
            if script is not None and not all(map(script.has, self.sources)):
                script = None
            self.accord = Accord(self, ranks, script, learns=self.memory is not None)

    @property
    def asking(self) -> bool:
        """Whether ranks ask each other before each collective."""
        return self.accord is not None and self.accord.asking

    @property
    def beside(self) -> bool:
        """Whether this rank does what is not in the script."""
        return self.accord is not None and self.accord.beside

    @property
    def sends(self) -> bool:
        """Whether ranks take part when units enter."""
        return any(source.gathers for source in self.sources)

    @property
    def differentiates(self) -> bool:
        """Whether gradients leave."""
        return not self.holding and any(source.differentiated for source in self.sources)

    def entering(self, source: Source) -> list[Any]:
        middle = [gather] if source.sharded else []
        return [*(t.enter for t in self.before), *middle, *(t.enter for t in self.after)]

    def leaving(self) -> list[Any]:
        return [t.leave for t in self.leave]

    def look_ahead(self, run: UnitRun) -> None:
        """Start the entry of what comes behind a unit, unless ranks have to ask each other."""
        if not (self.asking or self.beside):
            self.plan.look_ahead(run)

    def close_others(self, runs: Sequence[UnitRun]) -> None:
        """Release units of earlier layers that were kept for a neighbour's sake."""
        for run in self.lingering:
            if run not in runs:
                run.release()
        self.lingering = [run for run in self.lingering if run in runs]

    def drop_transient(self, run: UnitRun) -> None:
        """Let go of what backward regathered for a unit that has no gradient to wait for."""
        for other in self.transient:
            if other is not run and not self.plan.soon(other):
                other.values, other.touched = None, False
        self.transient = [] if run.open else [run]

    def sent(self, run: UnitRun, value: Pending, nbytes: int) -> None:
        """Remember a gradient of so many bytes on its way; hold few at once."""
        self.arrivals.append((run, value, nbytes))
        self.in_flight += nbytes
        lean = any(source.sharded for source in self.sources)  # memory is scarce
        limit = run.source.limit(IN_FLIGHT_BYTES_LEAN if lean else IN_FLIGHT_BYTES)
        while self.in_flight > limit and len(self.arrivals) > 1:
            self._arrive()
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _arrive(self) -> None:
        run, value, nbytes = self.arrivals.pop(0)
        self.in_flight -= nbytes
        value.advance()
        before = self.results.get(run.key)
        if run.source.sink is not None:
            if before is not None:
                raise PlacementError(
                    f"the gradient of unit {run.info.name} came in two parts, since ranks ran "
                    "layers in different orders or numbers; where gradients leave the device's "
                    "memory (offload) they cannot be added up. Run the layers alike on all ranks."
                )
            value = run.source.sink.put(run.info.index, value.wait())
        self.results[run.key] = value if before is None else Total(before, value)

    def computed(self) -> None:
        """Forward is done: what backward still needs is held by autograd, or gathered again."""
        self.close_others(())
        for source in self.sources:
            for run in source.runs:
                run.check_unwritten()
                if run.entered is not None:
                    run.release()
        if any(source.sharded for source in self.sources):
            pool().trim()  # memory is fullest here
        if self.accord is not None:
            self.accord.turn()

    def finish(self) -> None:
        """Wait for everything under way, also for what was started in vain."""
        accord = self.accord
        if accord is not None:
            accord.rest()
        for source in self.sources:
            for run in source.runs:
                self._send_late(run)
        if accord is None:
            self._arrive_all()
        else:
            script = accord.end()
            accord.own(self._arrive_all)
            if self.memory is not None:
                self.memory[self.place] = script
        for source in self.sources:
            for run in source.runs:
                if run.pending is not None:
                    run.pending.wait()
                run.pending = run.values = run.entered = run.fetched = None

    def _send_late(self, run: UnitRun) -> None:
        """Send what not all entries have left, or an earlier pass kept back and this one did not
        add to."""
        kept = self.waiting.get(run.key)
        if run.partial is None and kept is None:
            return
        if self.accord is not None:
            self.accord.leaves(run, True)
        if run.partial is not None:
            run.send()
        elif kept is not None and self.accord is not None:
            self.accord.reduce(run, [torch.zeros_like(x) for x in kept])
        elif kept is not None:
            run.part([torch.zeros_like(x) for x in kept])

    def _arrive_all(self) -> None:
        while self.arrivals:
            self._arrive()

    def close(self) -> None:
        """Forget everything, so that no cycle of references keeps gradients alive."""
        if self.accord is not None:
            self.accord.close()
            self.accord = None
        for source in self.sources:
            for run in source.runs:
                run.pending = run.values = run.entered = run.fetched = None
            source.runs.clear()
        self.sources.clear()
        self.lingering.clear()
        self.transient.clear()
        self.results.clear()


def entered(params: Placed) -> Any:
    """How placed parameters enter without gradients, inside a step and outside one."""
    if not isinstance(params, Sharded | Streamed):
        raise PlacementError(f"a {type(params).__name__} cannot enter a computation")
    running = context.current()
    inside = running is not None and bool(running.passes)
    owner = running.passes[-1] if inside else Pass()  # type: ignore[union-attr]
    source = owner.add(params.layout, params, params.group, cut=True, differentiated=False)
    if inside:
        owner.agree(params.group)
    return source.view()


on_enter(entered)
