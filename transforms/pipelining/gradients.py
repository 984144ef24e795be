"""One ``value_and_grad`` on the stages of a pipeline: this rank's actions, one after the other.

Each microbatch goes through each chunk in a pass of its own, forward and backward. Between chunks
go the values that the rehearsal found, and their gradients. What several passes share is here:
units that entered for the whole step, sums of gradients, losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.readings import number, on_host
from zfunc.engine import context
from zfunc.engine.communication import communication
from zfunc.engine.context import Context
from zfunc.engine.differentiation import (
    check_depends,
    detached,
    new_pass,
    randomness,
    seeded,
    split_aux,
)
from zfunc.engine.hooks import Gradients, Pending
from zfunc.engine.passes import Pass
from zfunc.engine.primitives import Mean
from zfunc.engine.recomputation import taken
from zfunc.engine.sources import Source
from zfunc.engine.split_backward import SplitBackward
from zfunc.engine.unit_info import Ready, UnitInfo, gather
from zfunc.engine.unit_runs import UnitRun
from zfunc.errors import CompositionError
from zfunc.layout.layout import Layout
from zfunc.layout.readable import Readable
from zfunc.ranks.comm import Group
from zfunc.rehearsal.chunk_run import ChunkRun
from zfunc.rehearsal.plans import Label, Rehearsed, Spec
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.schedules.schedule import Schedule
from zfunc.transforms.accumulation import Losses, mean_of_aux, times
from zfunc.transforms.microbatches import microbatches
from zfunc.transforms.pipelining.messages import Message, Wire
from zfunc.transforms.pipelining.results import broadcast
from zfunc.transforms.pipelining.sums import SumsOfPass, UnitSums
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE, Placed, Tree, leaves_in
from zfunc.trees.reduction import linear_map

__all__ = ["pipelined"]

OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": NAMESPACE}


def pipelined(
    running: Context, asked: Gradients, schedule: Schedule, ranks: Group, own: dict[int, Tensor]
) -> tuple[tuple[Tensor, Any], Tree]:
    """``((loss, aux), grads)`` of one ``value_and_grad``.

    Args:
        schedule: what each rank does, in which order.
        ranks: the stages.
        own: the tensors of the state, which are no part of a batch.
    """
    _check(asked)
    run = _Run(running, asked, schedule, ranks, own)
    try:
        return run.gradients()
    finally:
        run.close()


def _check(asked: Gradients) -> None:
    if not isinstance(asked.params, Readable):
        raise CompositionError(
            "under pipeline value_and_grad takes the whole params tree of the state, one that the "
            f"step placed; it was given a {type(asked.params).__name__}. Differentiate with "
            "respect to state.params, and freeze what is not to be trained."
        )
    placed = [x for x in leaves_in((asked.args, asked.kwargs), NAMESPACE) if isinstance(x, Placed)]
    if placed:
        raise CompositionError(
            f"under pipeline the loss was given a {type(placed[0]).__name__}, a second placed tree "
            "beside its parameters (a teacher, say), whose layers lie on other stages. Evaluate it "
            "before, outside of the loss: zf.evaluate(apply)(state.teacher, batch)."
        )


@dataclass
class _Part:
    """One microbatch in one chunk, from forward to backward."""

    owner: Pass
    run: ChunkRun
    loss: Tensor | None = None
    seed: Tensor | None = None
    backward: SplitBackward | None = None


class _Run:
    """One ``value_and_grad`` of this rank."""

    def __init__(
        self,
        running: Context,
        asked: Gradients,
        schedule: Schedule,
        ranks: Group,
        own: dict[int, Tensor],
    ) -> None:
        self.running, self.asked, self.schedule, self.ranks = running, asked, schedule, ranks
        self.me, self.rank_of = ranks.rank, schedule.rank_of
        self.last = len(schedule.rank_of) - 1
        self.layout = asked.params.layout
        self.call, self.n = running.differentiated, schedule.microbatches
        running.differentiated += self.n
        over = communication(running)
        self.losses = Losses(over.everyone, self.n)
        self.batches = list(microbatches(asked, self.n, own, exact=True))
        self.base = new_pass(running)
        self.source = self._add(self.base)
        self.device = next((x.device for x in asked.params.held() if x is not None), None)
        self.chunk_of = chunks_of_layers(self.layout)
        self.plans = [self._rehearsed(i) for i in range(self.n)]
        if not isinstance(self._returned()[0], Mean):
            next(microbatches(asked, self.n, own))  # raises where the mean of means is no mean
        self.keeps = not over.gathers_anew
        self.actions = schedule.actions[self.me]
        self.mine = [k for k, rank in enumerate(self.rank_of) if rank == self.me]
        self.ends_with = {a.chunk: a.microbatch for a in self.actions if a.kind in "BW"}
        self.sums = {k: UnitSums() for k in self.mine}
        self.root = UnitSums()
        self.parts: dict[tuple[int, int], _Part] = {}
        self.finished: list[Pass] = []
        self.whole: dict[int, list[Tensor]] = {}
        self.auxes: list[Any] = []
        self.lent = self._lent()
        connected = running.memo.setdefault("connected", set())
        self.wire = Wire(ranks, self._messages, connected)

    def close(self) -> None:
        """Let go of everything, also where an action has raised."""
        for part in self.parts.values():
            part.owner.close()
        for owner in self.finished:
            owner.close()
        self.base.close()

    def _add(self, owner: Pass) -> Source:
        params = self.asked.params
        group = communication(self.running).group
        return owner.add(params.layout, params, group, cut=True, differentiated=True)

    # What is known before anything runs

    def _rehearsed(self, i: int) -> Rehearsed:
        """What the rehearsal of a microbatch found; remembered by the shapes of its arguments."""
        args, kwargs = self.batches[i]
        memo = self.running.memo.setdefault("rehearsed", {})
        key = (self.running.asked, _signature((args, kwargs)))
        if key not in memo:
            memo[key] = rehearse(
                self.asked.loss_fn, self.layout, args, kwargs, self.chunk_of, self.device
            )
        found: Rehearsed = memo[key]
        return found

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

    def _messages(self, rank: int) -> Iterator[Message]:
        """All that a stage sends, in the order in which it does."""
        flats = self.layout.flats
        for u, (home, guests) in self.lent.items():
            specs = tuple(_flat(flats[f].length, flats[f].dtype, self.device)
                          for f in self.layout.units[u].flats)  # fmt: skip
            for guest in guests if home == rank else ():
                yield Message(("lend", u, guest), rank, guest, specs)
        for kind, i, k in self.schedule.actions[rank]:
            plan = self.plans[i]
            if kind == "F":
                for to, labels in _sends(plan, k).items():
                    specs = tuple(plan.receives(to)[label][1] for label in labels)
                    yield Message(("F", i, k, to), rank, self.rank_of[to], specs)
            elif kind in "BI":
                for source, labels in _returns(plan, k).items():
                    specs = tuple(plan.receives(k)[label][1] for label in labels)
                    yield Message(("B", i, k, source), rank, self.rank_of[source], specs)
        for u, (home, guests) in self.lent.items():
            specs = tuple(_flat(flats[f].length, self._summed(flats[f].dtype), self.device)
                          for f in self.layout.units[u].flats if flats[f].trainable)  # fmt: skip
            if rank in guests and specs:
                yield Message(("back", u, rank), rank, home, specs)

    # The whole

    def gradients(self) -> tuple[tuple[Tensor, Any], Tree]:
        do = {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}
        self._lend()
        if self.keeps:
            self.source.start([self.source.runs[u] for u in self._own_units() if u not in self.lent])
        for kind, i, k in self.actions:
            self.wire.post_ahead()
            do[kind](i, k)
        self._take_back()
        self.wire.finish()
        results: dict[tuple[int, int], Pending] = {}
        for owner in (*self.finished, self._root_pass()):
            owner.finish()
            results.update(owner.results)
        grads = self.source.gradients(results)
        loss, factor, aux = self._told()
        if factor is not None:
            grads = tree.map(linear_map(partial(times, factor=factor)), grads)
        return (loss, aux), grads

    def _own_units(self) -> list[int]:
        return [u for u, unit in enumerate(self.layout.units) if self.rank_of[unit.chunk] == self.me]

    # Units that enter once in a step

    def _lend(self) -> None:
        """Units that other stages use, too, go to them before anything else."""
        runs = self.source.runs
        mine = [u for u, (home, _) in self.lent.items() if home == self.me]
        under_way = {u: gather(Ready(runs[u].stored), runs[u].info) for u in mine}
        for u, (home, guests) in self.lent.items():
            if home == self.me:
                self.whole[u] = under_way[u].wait()
                for guest in guests:
                    self.wire.send(("lend", u, guest), self.whole[u])

    def _entered(self, u: int) -> list[Tensor]:
        """The values of a unit that enters once; of another stage's as it was lent."""
        run = self.source.runs[u]
        if run.values is None and u in self.lent:
            if self.me in self.lent[u][1]:
                self.whole[u] = self.wire.receive(("lend", u, self.me))
            value: Pending = Ready(self.whole.pop(u))
            for hook in run.hooks:
                value = value if hook is gather else hook(value, run.info)
            run.values = value.wait()
        return run.acquire() if run.values is None else run.values

    def _hold(self, run: UnitRun) -> None:
        """Let a unit of a pass enter with the values that all passes of this step share."""

        def enters(value: Pending, unit: UnitInfo) -> Pending:
            run.stored = self._entered(unit.index)
            return Ready(run.stored)

        run.hooks = (enters,)

    # One microbatch in one chunk

    def _new(self, i: int, k: int) -> tuple[Pass, Source]:
        last = self.ends_with[k] == i
        owner = new_pass(self.running, SumsOfPass(self.root, self.sums[k], last))
        source = self._add(owner)
        layers = [u for u, unit in enumerate(self.layout.units)
                  if unit.chunk == k and self.layout.layer_of_unit[u] >= 0]  # fmt: skip
        for u, run in enumerate(source.runs):
            if self.keeps or self.layout.layer_of_unit[u] < 0:
                self._hold(run)
        order: Sequence[tuple[int, int]] = () if self.keeps else [
            (source.index, u) for u in (*layers, *reversed(layers))
        ]  # fmt: skip
        for transform in self.running.transforms:
            order = transform.foresee(order, owner)
        owner.plan.order = order
        return owner, source

    @contextmanager
    def _within(self, owner: Pass, i: int) -> Iterator[None]:
        """The context of one microbatch, with random numbers of its own.

        A copy of the step's: what is computed again in backward finds it as it was.
        """
        running = copy.copy(self.running)
        running.passes = [owner]
        token = context.push(running)
        try:
            with torch.enable_grad(), taken(), randomness(running, self.call + i):
                yield
        finally:
            context.pop(token)

    def _forward(self, i: int, k: int) -> None:
        plan, (args, kwargs) = self.plans[i], self.batches[i]
        owner, source = self._new(i, k)

        def receive(sender: int, labels: Sequence[Label]) -> list[Tensor]:
            return self.wire.receive(("F", i, sender, k))

        run = ChunkRun(plan, k, receive, partial(_enter_roots, source))
        part = self.parts[i, k] = _Part(owner, run)
        with self._within(owner, i):
            out = run.run(self.asked.loss_fn, source.tree, args, kwargs)
            owner.computed()
            if k == self.last:
                self._lose(part, out)
        for to, labels in _sends(plan, k).items():
            self.wire.send(("F", i, k, to), [run.outs[label] for label in labels])

    def _lose(self, part: _Part, out: Any) -> None:
        """What the last chunk returns: a loss, perhaps with more."""
        loss, aux = split_aux(out, self.asked.has_aux)
        part.loss, seed, _ = self.losses(loss)
        part.seed = seeded(seed, self.asked.seed, part.loss)
        check_depends(part.loss)
        self.auxes.append(detached(aux))

    def _seeds(self, i: int, k: int) -> tuple[list[Tensor], list[Any]]:
        """Where backward of a chunk begins, and with what."""
        part, plan = self.parts[i, k], self.plans[i]
        outs, seeds = ([], []) if part.loss is None else ([part.loss], [part.seed])
        for to in _sends(plan, k):
            labels = _returns(plan, to).get(k, [])
            for label, grad in zip(labels, self.wire.receive(("B", i, to, k)) if labels else ()):
                if (out := part.run.outs[label]).requires_grad:
                    outs.append(out)
                    seeds.append(grad)
        return outs, seeds

    def _backward(self, i: int, k: int) -> None:
        part = self.parts[i, k]
        outs, seeds = self._seeds(i, k)
        inputs = part.run.inputs
        grads = part.owner.go_back(outs, seeds, list(inputs.values())) if outs else ()
        self._reply(i, k, dict(zip(inputs, grads)))
        self._done(i, k)

    def _inputs(self, i: int, k: int) -> None:
        part = self.parts[i, k]
        outs, seeds = self._seeds(i, k)
        inputs = part.run.inputs
        part.backward = SplitBackward(outs, list(inputs.values()), [part.owner.tick])
        self._reply(i, k, dict(zip(inputs, part.backward.of_inputs(seeds))))
        part.run.forget()
        part.loss = None

    def _weights(self, i: int, k: int) -> None:
        backward = self.parts[i, k].backward
        assert backward is not None
        backward.of_weights()
        self._done(i, k)

    def _reply(self, i: int, k: int, grads: Mapping[Label, Tensor | None]) -> None:
        """Gradients of what a chunk has received go to those who sent it."""
        plan, given = self.plans[i], self.parts[i, k].run.inputs
        for source, labels in _returns(plan, k).items():
            found = [grads.get(label) for label in labels]
            rows = zip(found, labels, strict=True)
            filled = [torch.zeros_like(given[label]) if g is None else g for g, label in rows]
            self.wire.send(("B", i, k, source), filled)

    def _done(self, i: int, k: int) -> None:
        owner = self.parts.pop((i, k)).owner
        if owner.holding:
            owner.close()
        else:
            self.finished.append(owner)

    # The end

    def _take_back(self) -> None:
        """Gradients of lent units come home."""
        for u, (home, guests) in self.lent.items():
            key = (self.source.index, u)
            if not self.source.runs[u].info.trainable:
                continue
            for guest in guests:
                if guest == self.me:
                    kept = self.root.kept.pop(key, None)
                    self.wire.send(("back", u, guest), self._zeros(u) if kept is None else kept)
                elif home == self.me:
                    self.root.add(key, self.wire.receive(("back", u, guest)))

    def _zeros(self, u: int) -> list[Tensor]:
        flats = self.layout.flats
        return [
            torch.zeros(flats[f].length, dtype=self._summed(flats[f].dtype), device=self.device)
            for f in self.source.runs[u].info.trainable
        ]

    def _returned(self) -> tuple[Any, Any]:
        """The loss, and what it returns beside it, as the rehearsal found them."""
        return split_aux(self.plans[-1].result, self.asked.has_aux)

    def _summed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients are summed."""
        found: torch.dtype = self.running.memo.get("reduce dtype") or dtype
        return found

    def _root_pass(self) -> Pass:
        """The pass in which gradients of what is outside of layers leave."""
        owner = new_pass(self.running, SumsOfPass(self.root))
        self._add(owner)
        return owner

    def _told(self) -> tuple[Tensor, Any, Any]:
        """The loss, what gradients are to be multiplied by (if anything), and aux, on all stages."""
        here = self.rank_of[self.last] == self.me
        mine = (self.losses.mean(), self._factor(), mean_of_aux(self.auxes)) if here else None
        loss, aux = self._returned()
        factor = None
        if isinstance(loss, Mean):
            loss = loss.total
            factor = replace(loss, dtype=torch.float64)
        like = loss, factor, aux
        loss, factor, aux = broadcast(self.ranks, self.rank_of[self.last], mine, like, "loss")
        if factor is not None and on_host(factor):
            factor = None if (known := number(factor)) == 1.0 else known
        return loss, factor, aux

    def _factor(self) -> Tensor | None:
        """What gradients are to be multiplied by, where the loss is a :class:`Mean`."""
        if not isinstance(self._returned()[0], Mean):
            return None
        factor = self.losses.correction()
        return torch.as_tensor(factor, dtype=torch.float64, device=self.device)


def _enter_roots(source: Source, leaves: frozenset[int]) -> dict[int, Tensor]:
    """The leaves outside of layers that a chunk uses, entered."""
    slots, layout = source.layout.slots, source.layout
    units = {layout.unit_of_flat[slot.flat] for i in leaves if (slot := slots[i]) is not None}
    found: dict[int, Tensor] = {}
    for u in sorted(units):
        found.update(source.runs[u].leaves())
    return found


def _flat(length: int, dtype: torch.dtype, device: torch.device) -> Spec:
    return Spec((length,), dtype, device, False, (1,))


def _sends(plan: Rehearsed, k: int) -> dict[int, list[Label]]:
    """By chunk what it needs of chunk ``k``, in one order on all ranks."""
    found: dict[int, list[Label]] = {}
    for label, to in plan.sends(k):
        found.setdefault(to, []).append(label)
    return dict(sorted(found.items()))


def _returns(plan: Rehearsed, k: int) -> dict[int, list[Label]]:
    """By chunk of which of its values chunk ``k`` returns gradients."""
    found: dict[int, list[Label]] = {}
    for label, (source, spec) in plan.receives(k).items():
        if spec.needs_grad:
            found.setdefault(source, []).append(label)
    return dict(sorted(found.items()))


def chunks_of_layers(layout: Layout) -> tuple[int, ...]:
    """The chunk of each layer of a tree that stages have."""
    units = layout.units_of_layers
    return tuple(layout.units[own[0]].chunk if own else 0 for own in units)


def _signature(arguments: Any) -> tuple[Any, ...]:
    """What a rehearsal depends on: shapes and dtypes of tensors, and all that is plain."""
    leaves, spec = optree.tree_flatten(arguments, **OPTREE)
    rows = [
        (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor)
        else x if isinstance(x, (bool, int, float, str)) else type(x)
        for x in leaves
    ]  # fmt: skip
    return spec, tuple(rows)
