"""Trees of parameters during one pass: what the loss is given for them, and what has come of it.

A layer is a :class:`LayerRef`. Its parameters enter when it is called, and are released behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zfunc.engine.communication import communication
from zfunc.engine.context import RECOMPUTED
from zfunc.engine.hooks import LayerInfo, Pending
from zfunc.engine.primitives import Ref
from zfunc.engine.unit_info import UnitInfo
from zfunc.engine.unit_runs import Running, Ticket, UnitRun
from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.pieces import leaves_of
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated
from zfunc.layout.sharded import Sharded
from zfunc.ranks.comm import Group
from zfunc.trees.kinds import kind
from zfunc.trees.nodes import Tree, opened, register

__all__ = ["LayerRef", "Source"]


class LayerRef(Ref):
    """One layer's parameters within a pass."""

    def __init__(self, source: Source, layer: int) -> None:
        self.source = source
        self.layer = layer
        self.layout, self.span = source.layout, source.layout.layers[layer]
        self.differentiated = source.differentiated

    @cached_property
    def runs(self) -> list[UnitRun]:
        """Its units."""
        return [self.source.run(i) for i in self.source.layer_units[self.layer]]

    def force(self) -> Tree:
        if self.source.closed and self.source.cut and self.source.group.size > 1:
            raise PlacementError(
                f"the parameters of layer {self.span.name} were read after the function that was "
                "given them had returned, and are there no more. Read them within it, and return "
                "what you need, or take them from state.params."
            )
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
        params = LayerRef.force(self)  # not what a subclass shows outside of calls
        try:
            # What a recomputed layer saves is not kept, so there is nothing to redeem.
            if RECOMPUTED.get() or not any(run.foreign for run in self.runs):
                out = fn(params, *xs, **kw)
            else:
                with saved_tensors_hooks(self._pack, _redeem):
                    out = fn(params, *xs, **kw)
            for run in self.runs:
                if run.sharded:  # whole ones stay: they are looked at once, in the end
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
        return _Activation(x)

    def told(self, index: int, name: str) -> LayerInfo:
        stack, depth, of = self.layout.stacks[self.layer]
        return LayerInfo(index, name, stack, depth, of, (self.source, self.layer))

    def __repr__(self) -> str:
        return f"Ref({self.span.name})"


register(
    LayerRef,
    lambda ref: ((ref.force(),), None, ("",)),
    lambda _, children: children[0],
)


class Source:
    """One tree of parameters in a pass: a placed node, or a plain tree cut into units.

    Attributes:
        gathers: whether the ranks that agree on what comes next all take part when a unit enters.
        prepare: is given each unit before anybody has it.
        closed: whether the pass is over.
    """

    def __init__(
        self,
        owner: Running,
        index: int,
        layout: Layout,
        stored: Tree,
        group: Group,
        cut: bool,
        differentiated: bool,
        hooks: Sequence[Callable[..., Any]],
        sink: Any,
        name_of: Callable[[str], str],
        prepare: Callable[[UnitRun], None] | None,
    ) -> None:
        self.owner, self.index, self.layout, self.group = owner, index, layout, group
        self.hooks, self.sink, self.cut, self.differentiated = hooks, sink, cut, differentiated
        self.layer_units = layout.units_of_layers
        self.sharded = isinstance(stored, Readable)
        self.node: Any = stored if isinstance(stored, Readable) and stored.streams else None
        box = stored if isinstance(stored, Replicated) else None
        flat, self._in_memory = _in_memory(layout, stored)
        self._of_tree = hooks, differentiated, self.sharded, flat, self.node, box, name_of
        self.gathers, self.prepare = False, prepare
        self._runs: list[UnitRun | None] = [None] * len(layout.units)
        self.closed = False

    def run(self, i: int) -> UnitRun:
        """A unit, made when it is asked for first: a stage of a pipeline asks for few of them."""
        if (run := self._runs[i]) is None:
            owner = self.owner
            info = UnitInfo(self.layout, i, self.group, self.cut, self.index, owner.running)
            run = self._runs[i] = UnitRun(owner, info, self._in_memory(i), *self._of_tree)
            run.gathers = self.gathers
            if self.prepare is not None:
                self.prepare(run)
        return run

    @property
    def runs(self) -> list[UnitRun]:
        """All units."""
        return [self.run(i) for i in range(len(self._runs))]

    @property
    def made(self) -> list[UnitRun]:
        """The units that somebody has asked for."""
        return [run for run in self._runs if run is not None]

    def close(self) -> None:
        """Forget them."""
        for run in self.made:
            run.forget()
            run.hooks, run.gathers = (), False  # some know their run
        self._runs = [None] * len(self._runs)
        self.prepare, self.closed = None, True  # it knows the stage, which knows this

    @cached_property
    def leaves_gaps(self) -> bool:
        """Whether the host's C library keeps much of what forward frees: activations of split
        leaves are small blocks, and freed ones between those in use stay in the heap."""
        split = self.layout.along is not None and self.differentiated
        return split and all(x.device is None or kind(x.device) == "cpu" for x in self.made)

    @property
    def direct(self) -> bool:
        """Whether layers need no references: nothing is done to what they hold, nor to a call
        of theirs, and their gradients go nowhere, so that it does not matter when they leave."""
        running = self.owner.running
        if running is None or self.hooks or communication(running).everyone.size > 1:
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
        runs = [self.run(i) for i in sorted(root)]
        self.start(runs)
        for run in runs:
            found.update(run.leaves())
        return self.tree(found)

    def tree(
        self, found: Mapping[int, Any], ref: Callable[[Source, int], LayerRef] = LayerRef
    ) -> Tree:
        """The tree with these leaves, by leaf index, outside of layers, and references for
        layers, made by ``ref``."""
        return self.layout.tree(found, partial(ref, self))

    def start(self, runs: Sequence[UnitRun]) -> None:
        """Start the entry of units that are needed together, before any is waited for."""
        if self.sharded and self.node is None:
            if runs and runs[0].gathers:
                self.owner.accord.approach(runs)
            for run in runs:
                if run.entered is None:
                    run.start()

    def gradients(self, results: Mapping[tuple[int, int], Pending]) -> Tree:
        """What has come of them, cut or whole.

        Args:
            results: the gradients of units that have left.
        """
        if self.sink is not None:
            return self.sink.node()
        layout = self.layout
        flats: list[Tensor | None] = [None] * len(layout.flats)
        for unit, trainable in enumerate(layout.trainable_of_units):
            pending = results.get((self.index, unit))
            arrived = None if pending is None else pending.wait()
            for k, i in enumerate(trainable):
                flats[i] = self._zeros(self.run(unit), i) if arrived is None else arrived[k]
        return Sharded(layout, flats) if self.cut else Replicated(layout, flats=flats)

    def _zeros(self, run: UnitRun, flat: int) -> Tensor:
        """The gradient of a unit that no rank has used."""
        spec = self.layout.flats[flat]
        low, high = 0, spec.length
        if self.cut and not spec.whole:
            low, high = run.info.cuts(flat)[self.group.rank :][:2]
        return torch.zeros(high - low, dtype=spec.dtype, device=run.device)


def _in_memory(layout: Layout, stored: Tree) -> tuple[bool, Callable[[int], list[Any]]]:
    """Whether a tree lies in flats, and what gives that of a unit which is in memory."""
    if isinstance(stored, Readable) and stored.streams:
        return True, lambda unit: []
    columns = stored.flats if isinstance(stored, Replicated | Sharded) else None
    if columns is not None:
        return True, lambda unit: [columns[i] for i in layout.units[unit].flats]
    leaves = leaves_of(layout, opened(stored))
    return False, lambda unit: [leaves[i] for i in layout.leaves_of_units[unit][0]]


class _Activation:
    """A saved tensor that can be let go of before the node that has saved it."""

    __slots__ = ("tensor",)
    repeatable: ClassVar[bool] = True

    def __init__(self, x: Tensor) -> None:
        # A node that held its own output, grad_fn and all, would keep a dropped graph for ever.
        self.tensor: Tensor | None = x if x.grad_fn is None else x.detach()

    def redeem(self) -> Tensor:
        assert self.tensor is not None, "backward ran twice through what has been used up"
        return self.tensor

    def forget(self) -> None:
        self.tensor = None


def _redeem(x: Ticket | _Activation) -> Tensor:
    """The unpack hook: the tensor behind a ticket, or what was saved."""
    return x.redeem()
