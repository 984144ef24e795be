"""One pass of parameters through a computation, unit by unit, forward and backward.

Forward, a unit *enters*: what the state stores goes through the ``enter`` hooks in
data-flow order (gather, cast, ...) and comes out as the leaves that the layer sees.
Backward, as soon as the gradients of all its leaves are there, they *leave* through
the ``leave`` hooks, asynchronously.

The order in which units enter is recorded; the next pass starts the entry of the next
layer's units while this one computes. The record is a hint and never a law: a pass that
takes another path gathers what it needs when it needs it. Ranks that take different paths
from each other agree on what comes next: see :mod:`zfunc.engine.accord`.

Here is what the trees of a pass share, and the primitives with which parameters enter. A tree is
in :mod:`zfunc.engine.sources`, one of its units in :mod:`zfunc.engine.unit_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from zfunc.engine import context
from zfunc.engine.accord import Accord
from zfunc.engine.communication import communication
from zfunc.engine.hooks import LayerInfo, Pending
from zfunc.engine.plans import PassPlan
from zfunc.engine.primitives import Ref
from zfunc.engine.sources import Source
from zfunc.engine.unit_info import Total, gather
from zfunc.engine.unit_runs import UnitRun
from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.pool import pool
from zfunc.layout.readable import Readable
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import Box, Placed, Tree

__all__ = ["Pass", "enter", "layer", "scan"]

# Bytes of full gradients that wait for the network: one unit's are always there. Where parameters
# are cut a host's memory is scarce; a GPU must be kept busy.
IN_FLIGHT_BYTES, IN_FLIGHT_BYTES_LEAN = 2**26, 2**24
BETWEEN_TRIMS = 2**24  # bytes of gradients that leave before the heap's gaps are looked at again
BEHIND = 2  # units that leave before one goes between replicas: its sum within is done then


@dataclass
class Pass:
    """The state of one pass on one rank.

    Attributes:
        before, after: ``enter`` hooks on the way to, and behind, the gather.
        leave: ``leave`` hooks, first to last.
        plan: in which order units are expected to enter.
        thinned: whether layers are left out on purpose, perhaps all of them.
        waiting: units whose gradients an earlier pass kept back for this one.
        holding: whether the gradients of this one are kept back.
        take: the sum of a unit to which its gradients are added on the spot, if there is one.
        adds: whether autograd itself may add them, in :meth:`go_back`.
        idle: units that no rank uses in this pass, by a common decision.
        memory, place: where, and under which name, a pass leaves the script of the next one.
        accord: how the ranks agree on what comes next; ``None`` on one rank.
        running: the context of the call, if there is one.
        most_in_flight: bytes of gradients that were on their way at once.
        left_bytes: of gradients that have left since gaps in the heap were returned.
        runs_forward: whether the function runs. A backward that it starts itself leaves gradients
            with autograd, and not here.
        spill: where gradients go that are not to stay in memory (with ``begin`` at the end of
            forward, ``put`` of each unit, ``node``): a function of their layout
            and whether they are cut.
    """

    before: Sequence[Callable[..., Any]] = ()
    after: Sequence[Callable[..., Any]] = ()
    leave: Sequence[Callable[..., Any]] = ()
    plan: PassPlan = field(default_factory=PassPlan)
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
    take: Callable[[Any], list[Tensor] | None] | None = None
    adds: bool = False
    idle: set[tuple[int, int]] = field(default_factory=set)
    memory: dict[Any, Any] | None = None
    place: Any = None
    accord: Accord | None = None
    in_flight: int = 0
    most_in_flight: int = 0
    left_bytes: int = 0
    runs_forward: bool = True

    def __post_init__(self) -> None:
        self.ends: list[tuple[Tensor, Callable[[Tensor], Tensor | None]]] = []

    @cached_property
    def tick(self) -> Tensor:
        """Without a value: see SplitBackward."""
        return torch.zeros(0, requires_grad=True)

    def add(
        self,
        layout: Layout,
        stored: Tree,
        group: Group,
        *,
        cut: bool,
        differentiated: bool,
        spills: bool = True,
        name_of: Callable[[str], str] = str,
        prepare: Callable[[UnitRun], None] | None = None,
    ) -> Source:
        """Let one more tree take part.

        Args:
            spills: whether its gradients may leave memory.
            name_of: from a leaf's path in it to that in all parameters.
            prepare: is given each of its units before anybody has it.
        """
        middle = [gather] if isinstance(stored, Readable) else []
        hooks = [*self.before, *middle, *self.after]
        spill = self.spill if differentiated and spills else None
        sink = None if spill is None else spill(layout, cut)
        index = len(self.sources)
        source = Source(
            self, index, layout, stored, group, cut, differentiated, hooks, sink, name_of, prepare
        )
        self.sources.append(source)
        self.plan.add(layout, source.run)
        if self.accord is not None:
            self.accord.admit(source)
        return source

    def agree(self, ranks: Group, within: Group) -> None:
        """From now on ranks agree on what comes next; units are gathered ``within`` some."""
        if self.accord is None and ranks.size > 1:
            script = None if self.memory is None else self.memory.get(self.place)
            if script is not None and not all(map(script.has, self.sources)):
                script = None
            self.accord = Accord(self, ranks, within, script, learns=self.memory is not None)

    def close_others(self, runs: Sequence[UnitRun]) -> None:
        """Release units of earlier layers that were kept for a neighbour's sake."""
        if not self.lingering:
            return
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
        if self._replicated and len(self.arrivals) > BEHIND:
            self.arrivals[-1 - BEHIND][1].advance()
        lean = any(source.sharded for source in self.sources)  # memory is scarce
        limit = IN_FLIGHT_BYTES_LEAN if lean else IN_FLIGHT_BYTES
        while len(self.arrivals) > 1 and run.is_much(self.in_flight, limit):
            self._arrive()
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.left_bytes += nbytes
        if self.left_bytes >= BETWEEN_TRIMS:
            self._return_gaps()

    @cached_property
    def _replicated(self) -> bool:
        """Whether gradients have one round more to go."""
        return self.running is not None and communication(self.running).replicas.size > 1

    def _arrive(self) -> None:
        run, value, nbytes = self.arrivals.pop(0)
        self.in_flight -= nbytes
        value.advance()
        if self._replicated:
            value.advance()
        before = self.results.get(run.key)
        if (sink := self.sources[run.info.source].sink) is not None:
            if before is not None:
                raise PlacementError(
                    f"the gradient of unit {run.info.name} came in two parts, since ranks ran "
                    "layers in different orders or numbers; where gradients leave the device's "
                    "memory (offload) they cannot be added up. Run the layers alike on all ranks."
                )
            value = sink.put(run.info.index, value.wait())
        self.results[run.key] = value if before is None else Total(before, value)

    def go_back(
        self,
        outs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        inputs: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        """Backward, in which gradients leave unit by unit.

        Args:
            outs: where it begins, and with which ``seeds``.
            inputs: further ends of the graph, whose gradients are returned; None for those not
                reached.

        An end's hook is there for this long, behind those of the loss function, which may ask for
        gradients by itself, too.
        """
        hooks = [end.register_hook(leave) for end, leave in self.ends]
        try:
            ends = [*inputs, self.tick, *(end for end, _ in self.ends)]
            if not self.adds:
                return torch.autograd.grad(outs, ends, seeds, allow_unused=True)[: len(inputs)]
            runs = [run for source in self.sources for run in source.made if run.adding]
            rows = [run.begin_adding() for run in runs]
            with ExitStack() as stack:
                for own in chain.from_iterable(run.own_hooks for run in runs):
                    stack.enter_context(own)
                leaves = chain.from_iterable(leaves for leaves, _ in rows)
                _add_up(outs, seeds, [*ends, *leaves])
            for _, end in reversed(rows):  # as backward has come to them
                end()
            return tuple(x.grad for x in inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def computed(self) -> None:
        """Forward is done: what backward still needs is held by autograd, or gathered again."""
        self.runs_forward = False
        self.close_others(())
        made: list[UnitRun] = []
        for source in self.sources:
            if source.sink is not None:
                source.sink.begin()
            for run in source.made:
                made.append(run)
                run.check_unwritten()
                if run.entered is not None:
                    run.release()
        gathered = [run for run in made if run.sharded and run.foreign]
        if gathered:
            # Memory is fullest here, and what was gathered is there no more.
            pool(gathered[0].info.group).trim()
        self._return_gaps()
        if self.accord is not None:
            self.accord.turn()

    def _return_gaps(self) -> None:
        """Return free blocks of the host's heap to the system, where a pass leaves many."""
        self.left_bytes = 0
        for source in self.sources:
            if source.leaves_gaps:
                from zfunc.buffers.heap import return_freed  # for split leaves alone

                return_freed()
                break

    def finish(self) -> None:
        """Wait for everything under way, also for what was started in vain."""
        accord = self.accord
        if accord is not None:
            accord.rest()
        for index, unit in self.waiting:  # kept by an earlier pass, and perhaps not asked for here
            if index < len(self.sources):
                self.sources[index].run(unit)
        for source in self.sources:
            for run in source.made:
                self._send_late(run)
        if accord is None:
            self._arrive_all()
        else:
            script = accord.end()
            accord.own(self._arrive_all)
            if self.memory is not None:
                self.memory[self.place] = script
        for source in self.sources:
            for run in source.made:
                if run.pending is not None:
                    run.pending.wait()
                run.forget()

    def _send_late(self, run: UnitRun) -> None:
        """Send what not all entries have left, or an earlier pass kept back and this one did not
        add to."""
        kept = self.waiting.get(run.key)
        if run.partial is None and kept is None:
            return
        if self.accord is not None:
            self.accord.leaves(run, True)
        late = run.partial is not None
        run.send(run.packed() if late else [torch.zeros_like(x) for x in kept or ()])

    def _arrive_all(self) -> None:
        for _, value, _ in self.arrivals if self.arrivals and self._replicated else ():
            value.advance()
        while self.arrivals:
            self._arrive()

    def close(self) -> None:
        """Forget everything, so that no cycle of references keeps gradients alive."""
        if self.accord is not None:
            self.accord.close()
            self.accord = None
        for source in self.sources:
            source.close()
        self.sources.clear()
        self.plan.clear()
        self.lingering.clear()
        self.transient.clear()
        self.results.clear()
        self.ends.clear()


def _add_up(outs: Sequence[Tensor], seeds: Sequence[Tensor | None], ends: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, without its looking at each end: a tenth of a small unit's
    time."""
    grads = (torch.ones_like(x) if g is None else g for x, g in zip(outs, seeds, strict=True))
    _engine_run_backward(
        tuple(outs),
        tuple(grads),
        False,
        False,  # no graph of it
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def enter(params: Tree) -> Tree:
    """Let placed parameters enter without gradients; plain trees pass through.

    Returns:
        A tree of the same shape: real tensors outside ``Layers``, a :class:`Ref`
        for each layer. For teachers, discriminators, averages.
    """
    if isinstance(params, Placed):
        return _entered(params)
    return params.tree if isinstance(params, Box) else params


def _entered(params: Placed) -> Any:
    if not isinstance(params, Readable):
        raise PlacementError(f"a {type(params).__name__} cannot enter a computation")
    running = context.current()
    inside = running is not None and bool(running.passes)
    owner = running.passes[-1] if inside else Pass()  # type: ignore[union-attr]
    source = owner.add(params.layout, params, params.group, cut=True, differentiated=False)
    if inside:
        owner.agree(params.group, params.group)
    return source.view()


def layer(fn: Callable[..., Any], params: Tree, *xs: Any, **kw: Any) -> Any:
    """``fn(params, *xs, **kw)``: one layer, the place where transforms act on it.

    Args:
        fn: a function of the layer's parameters and inputs.
        params: the layer's parameters, plain or as the step hands them over.

    >>> layer(lambda p, x: p["w"] * x, {"w": 2}, 3)
    6
    """
    running = context.current()
    index, scope_of = (0, None) if running is None else running.next_layer()

    def call(*xs: Any, **kw: Any) -> Any:
        inner = fn if scope_of is None else partial(_scoped, fn, scope_of(index))
        entered = enter(params)
        if isinstance(entered, Ref):
            return entered.call(inner, xs, kw)
        return inner(entered, *xs, **kw)

    if running is None or not running.around:
        return call(*xs, **kw)
    if (name := getattr(fn, "zfunc_name", None)) is None:
        name = str(index)
    info = params.told(index, name) if isinstance(params, Ref) else LayerInfo(index, name)
    for transform in running.around:
        call = transform.layer(call, info)
    return call(*xs, **kw)


def _scoped(
    fn: Callable[..., Any], scope: AbstractContextManager[Any], /, *xs: Any, **kw: Any
) -> Any:
    """``fn`` with torch's random functions deciding by a layer's key alone."""
    with scope:
        return fn(*xs, **kw)


def scan(fn: Callable[[Any, Any], Any], layers: Tree, x: Any) -> Any:
    """``x = fn(layers[i], x)`` for every layer in order.

    >>> from zfunc.trees.tree import Layers
    >>> scan(lambda p, x: p["w"] * x, Layers([{"w": 2}, {"w": 5}]), 3)
    30
    """
    for params in enter(layers):
        x = layer(fn, params, x)
    return x
