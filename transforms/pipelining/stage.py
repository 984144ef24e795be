"""One stage while microbatches go through its chunks: what it knows beforehand, has, and sends."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import optree
import torch
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.differentiation import new_pass
from zfunc.engine.hooks import Pending
from zfunc.engine.passes import Pass
from zfunc.engine.recomputation import taken
from zfunc.engine.sources import Source
from zfunc.engine.unit_info import CommonLeaves, Ready, UnitInfo, gather
from zfunc.engine.unit_runs import UnitRun
from zfunc.errors import CompositionError
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.ranks.axes import alone
from zfunc.ranks.comm import Group
from zfunc.rehearsal.chunk_run import ChunkRun
from zfunc.rehearsal.plans import Label, Rehearsed, Spec
from zfunc.rehearsal.refs import StageRef
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.rehearsal.results import fields_of, is_array, own
from zfunc.rehearsal.values import is_value
from zfunc.transforms.pipelining.failures import telling
from zfunc.transforms.pipelining.messages import StageMessage, Wire
from zfunc.trees.nodes import NAMESPACE, Tree

__all__ = ["PipelineStage", "chunks_of_layers", "flat_spec"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Rows = Sequence[Sequence[tuple[str, int, int]]]
REMEMBERED = 64  # rehearsals, and sums of what is sent: those of the last shapes that came


class PipelineStage:
    """This rank's part of one loss, or of one function that is evaluated.

    Args:
        running: the context of the call.
        fn: the function of parameters, as the user wrote it.
        params: the placed tree.
        batches: the other arguments of each microbatch.
        rank_of: which stage has which chunk.
        actions: for each stage what it does: kind, microbatch, chunk.
        ranks: the stages.
        name: which function of the step it is, for what is remembered.
    """

    differentiates: ClassVar[bool] = False

    def __init__(
        self,
        running: Context,
        fn: Callable[..., Any],
        params: Readable,
        batches: Sequence[Arguments],
        rank_of: Sequence[int],
        actions: Rows,
        ranks: Group,
        name: Any,
    ) -> None:
        self.running, self.fn, self.params, self.batches = running, fn, params, batches
        self.rank_of, self.actions, self.ranks = rank_of, actions, ranks
        self.me, self.last, self.layout = ranks.rank, len(rank_of) - 1, params.layout
        self.device = next(x.device for x in params.held() if x is not None)
        self.keeps = not communication(running).gathers_anew
        self.base = new_pass(running)
        self.source = self.take_part(self.base)
        chunks = chunks_of_layers(self.layout)
        self._found: list[tuple[Any, Rehearsed]] = []
        with torch.set_grad_enabled(self.differentiates):
            self.plans = [self._rehearsed(name, chunks, i, *each) for i, each in enumerate(batches)]
        self._check_chunks()
        self.lent: dict[int, tuple[int, list[int]]]
        key = (name, ranks.size, *map(id, self.plans))  # which stay beside what is sent
        self.lent, messages, _ = _remembered(running.memo, "messages", key, self._told_by_plans)
        self.wire = Wire(ranks, messages, running.memo.setdefault("connected", set()))
        self._raw: dict[int, list[Tensor]] = {}
        self._common: dict[int, CommonLeaves] = {}
        self.runs: weakref.WeakValueDictionary[tuple[int, int], ChunkRun]
        self.runs = weakref.WeakValueDictionary()

    def take_part(self, owner: Pass, prepare: Callable[[UnitRun], None] | None = None) -> Source:
        """The parameters in a pass."""
        group = communication(self.running).group
        return owner.add(
            self.layout, self.params, group, cut=True, differentiated=True, prepare=prepare
        )

    @property
    def gathering(self) -> Group:
        """The ranks with which units are gathered whenever they enter: all have as many
        microbatches."""
        return alone() if self.keeps else communication(self.running).group

    # What is known before anything runs

    def _rehearsed(
        self,
        name: Any,
        chunks: tuple[int, ...],
        i: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Rehearsed:
        """What the rehearsal of a microbatch found; remembered by the shapes of its arguments."""
        shapes = _signature((args, kwargs))
        for then, known in self._found:  # most are alike, and a layout is long to compare
            if then == shapes:
                return known
        key, about, memo = (name, self.layout, shapes), f"microbatch {i}", self.running.memo
        many = len(set(self.rank_of)) < len(self.rank_of)
        rest = self.layout, args, kwargs, chunks, self.device, about, many
        found: Rehearsed = _remembered(memo, "rehearsed", key, partial(rehearse, self.fn, *rest))
        if name[0] == "loss":
            memo.setdefault("first rehearsed", found)
        self._found.append((shapes, found))
        return found

    def _check_chunks(self) -> None:
        """A loss that counts, in a tensor of the user's or in Python, would do so once for each
        chunk, and would draw other numbers in each."""
        many = max(self.rank_of.count(rank) for rank in self.rank_of)
        if many == 1:
            return
        how = (
            f"once for each of the {many} chunks of a stage. {{}}, or take a schedule with one "
            'chunk per stage, "1f1b".'
        )
        if written := [plan.writes for plan in self.plans if plan.writes]:
            raise CompositionError(
                f"{written[0]}, outside the layers, writes to a tensor of yours, and would do so "
                + how.format("Do it inside a layer")
            )
        if unlike := [plan.unlike for plan in self.plans if plan.unlike]:
            raise CompositionError(
                "the loss does not do the same when it runs again, by what is outside of layers: "
                f"{unlike[0]}. It would do so "
                + how.format("Do it inside a layer, or behind the step")
            )
        if any(plan.draws for plan in self.plans):
            raise CompositionError(
                "the loss draws random numbers by Python's or NumPy's own generator outside the "
                "layers, and would draw others "
                + how.format("Draw them by torch, or with the batch")
            )

    def _told_by_plans(self) -> tuple[Any, Any, list[Rehearsed]]:
        """Which units are lent, what each rank sends, and the plans that both are from."""
        self.lent = self._lent()
        return self.lent, [[*self.messages(rank)] for rank in range(self.ranks.size)], self.plans

    def _lent(self) -> dict[int, tuple[int, list[int]]]:
        """Units outside of layers that other stages use than their own: its rank, and theirs."""
        found = {}
        for u, unit in enumerate(self.layout.units):
            if self.layout.layer_of_unit[u] >= 0:
                continue
            home, leaves = self.rank_of[unit.chunk], frozenset(unit.slots)
            using = {
                self.rank_of[k]
                for plan in self.plans
                for k in range(len(self.rank_of))
                if plan.roots(k) & leaves
            }
            if guests := sorted(using - {home}):
                found[u] = home, guests
        return found

    def messages(self, rank: int) -> Iterator[StageMessage]:
        """All that a stage sends, in the order in which it does."""
        flats = self.layout.flats
        for u, (home, guests) in self.lent.items():
            specs = [flat_spec(flats[f].length, flats[f].dtype, self.device)
                     for f in self.layout.units[u].flats]  # fmt: skip
            for guest in guests if home == rank else ():
                yield StageMessage(("lend", u, guest), rank, guest, tuple(specs))
        for kind, i, k in self.actions[rank]:
            yield from self._sent_behind(kind, i, k, rank)

    def _sent_behind(self, kind: str, i: int, k: int, rank: int) -> Iterator[StageMessage]:
        plan = self.plans[i]
        if kind == "F":
            for to, labels in plan.sent_by(k).items():
                specs = tuple(plan.receives(to)[label][1] for label in labels)
                yield StageMessage(("F", i, k, to), rank, self.rank_of[to], specs)

    # Units that enter once

    def lend(self) -> None:
        """Units that other stages use, too, go to them before anything else."""
        run = self.source.run
        mine = [u for u, (home, _) in self.lent.items() if home == self.me]
        under_way = {u: gather(Ready(run(u).stored), run(u).info) for u in mine}
        for u in mine:
            self._raw[u] = under_way[u].wait()
            for guest in self.lent[u][1]:
                self.wire.send(("lend", u, guest), self._raw[u])
        own = [u for u, unit in enumerate(self.layout.units)
               if self.rank_of[unit.chunk] == self.me and u not in self.lent]  # fmt: skip
        if self.keeps:
            self.source.start([run(u) for u in own])

    def entered(self, u: int) -> list[Tensor]:
        """The values of a unit that enters once; of another stage's as it was lent."""
        run = self.source.run(u)
        if run.values is None and u in self.lent:
            if self.me in self.lent[u][1]:
                self._raw[u] = self.wire.receive(("lend", u, self.me))
            value: Pending = Ready(self._raw.pop(u))
            for hook in run.hooks:
                value = value if hook is gather else hook(value, run.info)
            run.values = value.wait()
        return run.acquire() if run.values is None else run.values

    def hold(self, run: UnitRun) -> None:
        """Let a unit that enters once have the same values in its pass as in all others."""
        u = run.info.index
        if self.keeps or self.layout.layer_of_unit[u] < 0:
            run.hooks = (partial(self._enters, run),)
            run.common = self._common.setdefault(u, CommonLeaves())
            if (there := self.source.run(u).values) is not None:
                run.stored = run.values = there

    def _enters(self, run: UnitRun, value: Pending, unit: UnitInfo) -> Pending:
        run.stored = self.entered(unit.index)
        return Ready(run.stored)

    def layers(self, k: int) -> list[int]:
        """The units of a chunk's layers."""
        of = self.layout.layer_of_unit
        return [u for u, unit in enumerate(self.layout.units) if unit.chunk == k and of[u] >= 0]

    # One microbatch in one chunk

    def given(self, i: int) -> Arguments:
        """The other arguments, for one run. A loss may write to its batch's dicts and arrays, and
        runs once for each chunk: each run has its own. Tensors that are written to are refused."""
        args, kwargs = self.batches[i]
        return tuple(map(own, args)), {name: own(x) for name, x in kwargs.items()}

    def tree_of(self, source: Source) -> Callable[[Mapping[int, Any]], Tree]:
        """The params tree for a run, given the leaves outside of layers."""
        ref = partial(StageRef, self.device, self.running.compute)
        return partial(source.tree, ref=ref)

    def telling(self, action: tuple[str, int, int]) -> AbstractContextManager[None]:
        """A block that is one action of this stage: its errors say so, on all ranks."""
        return telling(self.runs, action, self.me, self.rank_of.count(self.me))

    @contextmanager
    def within(self, owner: Pass) -> Iterator[Context]:
        """The context of one microbatch: a copy, so that what is computed again in backward
        finds it as it was."""
        running = copy.copy(self.running)
        running.passes = [owner]
        token = context.push(running)
        try:
            with taken():
                yield running
        finally:
            context.pop(token)

    def run_of(self, i: int, k: int, source: Source) -> ChunkRun:
        """What a microbatch does in a chunk; to be run."""

        plan, come = self.plans[i], dict[Label, Tensor]()

        def receive(label: Label, spec: Spec) -> Tensor:
            if label not in come:  # all that a chunk sends another one travels together
                sender = plan.receives(k)[label][0]
                labels = plan.sent_by(sender)[k]
                come.update(zip(labels, self.wire.receive(("F", i, sender, k)), strict=True))
            return come.pop(label)

        def send(outs: Mapping[Label, Tensor]) -> None:
            for to, labels in plan.sent_by(k).items():
                self.wire.send(("F", i, k, to), [outs[label] for label in labels])

        made = self.runs[i, k] = ChunkRun(plan, k, receive, partial(_enter_roots, source), send)
        return made


def _enter_roots(source: Source, leaves: frozenset[int]) -> dict[int, Tensor]:
    """The leaves outside of layers that a chunk uses, entered."""
    slots, layout = source.layout.slots, source.layout
    units = {layout.unit_of_flat[slot.flat] for i in leaves if (slot := slots[i]) is not None}
    found: dict[int, Tensor] = {}
    for u in sorted(units):
        found.update(source.run(u).leaves())
    return found


def flat_spec(length: int, dtype: torch.dtype, device: torch.device) -> Spec:
    """A flat on its way."""
    return Spec((length,), dtype, device, False, (1,))


def chunks_of_layers(layout: Layout) -> tuple[int, ...]:
    """The chunk of each layer of a tree that stages have.

    One without parameters (an activation in an ``nn.Sequential``) is where the one before it is.
    """
    found: dict[int, int] = {}
    stacks: dict[str, list[int]] = {}
    for k, layer in enumerate(layout.layers):
        stacks.setdefault(layer.name.rpartition(".")[0], []).append(k)
    for row in stacks.values():
        known = [(k, layout.units[own[0]].chunk) for k in row if (own := layout.units_of_layers[k])]
        for k in row:
            before = [chunk for other, chunk in known if other <= k]
            found[k] = before[-1] if before else known[0][1] if known else 0
    return tuple(found[k] for k in range(len(layout.layers)))


def _remembered(memo: dict[Any, Any], what: str, key: Any, make: Callable[[], Any]) -> Any:
    """What was made for a key, one of the last few: a number in a batch may be new each time."""
    known: dict[Any, Any] = memo.setdefault(what, {})
    known[key] = found = known.pop(key) if key in known else make()
    while len(known) > REMEMBERED:
        del known[next(iter(known))]
    return found


def _signature(arguments: Any) -> tuple[Any, ...]:
    """What a rehearsal depends on: shapes, strides and dtypes of tensors and arrays, and plain
    values. Strides tell those of what crosses, in whose order a mask of dropout is drawn."""
    leaves, spec = optree.tree_flatten(arguments, none_is_leaf=True, namespace=NAMESPACE)
    return spec, tuple(map(_signature_of, leaves))


def _signature_of(x: Any) -> Any:
    if isinstance(x, Tensor):
        order = x.stride() if x.layout is torch.strided else x.layout
        return tuple(x.shape), order, x.dtype, x.device
    if is_array(x):
        return x.shape, x.strides, x.dtype
    if is_value(x):
        return type(x), x  # True is 1, and no number
    within = fields_of(x)
    if within is None:
        return type(x)
    return type(x), *((name, _signature(value)) for name, value in within)
