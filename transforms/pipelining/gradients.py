"""One ``value_and_grad`` on the stages of a pipeline: this rank's actions, one after the other.

Each microbatch goes through each chunk in a pass of its own, forward and backward. Between chunks
go the values that the rehearsal found, and their gradients. What several passes share is here:
sums of gradients, and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zfunc.buffers.readings import number, on_host
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
from zfunc.engine.sources import Source
from zfunc.engine.split_backward import SplitBackward
from zfunc.engine.unit_info import Ready
from zfunc.errors import CompositionError
from zfunc.layout.readable import Readable
from zfunc.ranks.comm import Group
from zfunc.rehearsal.chunk_run import ChunkRun
from zfunc.rehearsal.plans import Label
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.transforms.accumulation import Losses, UnitSums, mean_of_aux, times
from zfunc.transforms.microbatches import microbatches
from zfunc.transforms.pipelining.messages import StageMessage
from zfunc.transforms.pipelining.results import broadcast
from zfunc.transforms.pipelining.stage import PipelineStage, flat_spec
from zfunc.transforms.pipelining.sums import SumsOfPass
from zfunc.trees import tree
from zfunc.trees.nodes import PLACED, Placed, Tree, leaves_in
from zfunc.trees.reduction import linear_map

__all__ = ["pipelined"]

BACKWARD = 1 << 30  # in the place of a layer's number
NOT_DRAWING = nullcontext()


def pipelined(
    running: Context, asked: Gradients, schedule: Schedule, ranks: Group, own: dict[int, Tensor]
) -> tuple[tuple[Tensor, Any], Tree]:
    """``((loss, aux), grads)`` of one ``value_and_grad``.

    Args:
        schedule: what each rank does, in which order.
        ranks: the stages.
        own: the tensors of the state, which are no part of a batch.

    Raises:
        CompositionError: the parameters are no whole placed tree, or the loss was given a second
            one.
    """
    _check(asked)
    run = _Step(running, asked, schedule, ranks, own)
    try:
        return run.gradients()
    finally:
        run.close()


def _check(asked: Gradients) -> None:
    if not isinstance(asked.params, Readable):
        raise CompositionError(
            "under pipeline value_and_grad takes the params tree of the state, one that the step "
            f"placed; it was given a {type(asked.params).__name__}. Differentiate with respect to "
            "state.params, and freeze what is not to be trained."
        )
    if leaves_in(asked.kwargs.get("buffers"), PLACED):
        raise CompositionError(
            "under pipeline a loss takes no buffers: those that layers change (the statistics of "
            "BatchNorm) would have to go from microbatch to microbatch on each stage. Leave them "
            "to the model, whose constant ones it holds itself, or take accumulate."
        )
    placed = [x for x in leaves_in((asked.args, asked.kwargs), PLACED) if isinstance(x, Placed)]
    if placed:
        raise CompositionError(
            f"under pipeline the loss was given a {type(placed[0]).__name__}, a second placed tree "
            "beside its parameters (a teacher, say), whose layers lie on other stages. Evaluate it "
            "before, outside of the loss: zf.evaluate(apply)(state.teacher, batch)."
        )


@dataclass
class _Passage:
    """One microbatch in one chunk, from forward to backward.

    Attributes:
        drawing: backward's random numbers. A region that it runs again sets torch's generator,
            which ranks that are threads have in common.
    """

    owner: Pass
    run: ChunkRun
    loss: Tensor | None = None
    seed: Tensor | None = None
    backward: SplitBackward | None = None
    drawing: AbstractContextManager[None] = NOT_DRAWING


class _Step(PipelineStage):
    """One ``value_and_grad`` of this rank."""

    differentiates = True

    def __init__(
        self,
        running: Context,
        asked: Gradients,
        schedule: Schedule,
        ranks: Group,
        own: dict[int, Tensor],
    ) -> None:
        self.asked, n = asked, schedule.microbatches
        # Where layers that nothing came back to are to rest, zeros are another gradient than none.
        self.tells_which = running.reached is not None
        by = f"pipeline(..., {n})"
        batches = list(microbatches(asked, n, own, exact=True, by=by))
        where = schedule.rank_of, schedule.actions, ranks, ("loss", running.asked)
        super().__init__(running, asked.loss_fn, asked.params, batches, *where)
        if len(self._found) > 1 and not isinstance(self._returned()[0], Mean):
            next(microbatches(asked, n, own, by=by))  # raises where the mean of means is no mean
        self.call = running.differentiated
        running.differentiated += n
        self.losses = Losses(communication(running).everyone, n)
        self.row = schedule.actions[self.me]
        self.tick = get_gradient_edge(self.base.tick)
        self.ends_with = {k: i for kind, i, k in self.row if kind in "BW"}
        # Microbatches whose gradients come in one part. Autograd adds each to the sums as it comes,
        # those of the first to zeros: those of a whole layer never stand beside the sums.
        self.adding = {(i, k) for kind, i, k in self.row if kind == "B"}
        self.sums = {k: UnitSums() for k, rank in enumerate(self.rank_of) if rank == self.me}
        self.root = UnitSums()
        self.parts: dict[tuple[int, int], _Passage] = {}
        self.finished: list[Pass] = []
        self.auxes: list[Any] = []

    def close(self) -> None:
        """Let go of everything, also where an action has raised."""
        for part in self.parts.values():
            part.owner.close()
        for owner in (*self.finished, self.base):
            owner.close()

    def gradients(self) -> tuple[tuple[Tensor, Any], Tree]:
        """The result, alike on all stages but for the parts of gradients that they have."""
        do = {"F": self._forward, "B": self._backward, "I": self._inputs, "W": self._weights}
        self.lend()
        with torch.enable_grad():
            for kind, i, k in self.row:
                with self.telling((kind, i, k)):
                    self.wire.post_ahead()
                    do[kind](i, k)
        self._take_back()
        told = self._tell()  # behind the last action: where one fails, it fails on all ranks
        self.wire.finish()
        results: dict[tuple[int, int], Pending] = {}
        self.finished.append(self._root_pass())
        for owner in self.finished:
            owner.finish()
            results.update(owner.results)
        grads = self.source.gradients(results)
        loss, factor, aux = told()
        if factor is not None and on_host(factor):
            factor = None if (value := number(factor)) == 1.0 else value
        if factor is not None:
            grads = tree.map(linear_map(partial(times, factor=factor)), grads)
        return (loss, aux), grads

    # What stages send

    def _sent_behind(self, kind: str, i: int, k: int, rank: int) -> Iterator[StageMessage]:
        yield from super()._sent_behind(kind, i, k, rank)
        plan = self.plans[i]
        if kind in "BI":
            for source, labels in plan.returned_by(k).items():
                specs = tuple(plan.receives(k)[label][1] for label in labels)
                if self.tells_which:
                    specs = (*specs, flat_spec(len(labels), torch.bool, self.device))
                yield StageMessage(("B", i, k, source), rank, self.rank_of[source], specs)

    def messages(self, rank: int) -> Iterator[StageMessage]:
        yield from super().messages(rank)
        for u, (home, guests) in self.lent.items():
            if rank in guests and self.layout.trainable_of_units[u]:
                yield StageMessage(("back", u, rank), rank, home, tuple(self._summed(u)))

    # Actions

    def _new(self, i: int, k: int) -> tuple[Pass, Source]:
        sums = SumsOfPass(self.root, self.sums[k], last=self.ends_with[k] == i)
        owner = new_pass(self.running, sums)
        owner.adds = owner.adds and (i, k) in self.adding
        owner.tick = self.base.tick
        source = self.take_part(owner, self.hold)
        layers = [] if self.keeps else [(source.index, u) for u in self.layers(k)]
        order: Sequence[tuple[int, int]] = [*layers, *reversed(layers)]
        for transform in self.running.transforms:
            order = transform.foresee(order, owner)
        owner.plan.order = order
        return owner, source

    def _forward(self, i: int, k: int) -> None:
        owner, source = self._new(i, k)
        part = self.parts[i, k] = _Passage(owner, self.run_of(i, k, source))
        drawn = partial(randomness, call=self.call + i)
        with self.within(owner) as running, drawn(running):
            if running.layer_scope is not None:
                part.drawing = running.layer_scope(BACKWARD)
            out = part.run.run(self.fn, self.tree_of(source), *self.given(i))
            owner.computed()
            if k == self.last:
                self._lose(part, out)

    def _lose(self, part: _Passage, out: Any) -> None:
        """What the last chunk returns: a loss, perhaps with more."""
        loss, aux = split_aux(out, self.asked.has_aux)
        part.loss, seed, _ = self.losses(loss)
        part.seed = seeded(seed, self.asked.seed, part.loss)
        check_depends(part.loss)
        self.auxes.append(detached(aux))

    def _outs(self, i: int, k: int) -> list[Tensor]:
        """Where backward of a chunk begins."""
        part, plan = self.parts[i, k], self.plans[i]
        outs = [] if part.loss is None else [part.loss]
        for to in plan.sent_by(k):
            for label in plan.returned_by(to).get(k, ()):
                if (out := part.run.outs[label]).requires_grad:
                    outs.append(out)
        return outs

    def _seeds(self, i: int, k: int) -> list[Any]:
        """With what it begins there, None where no gradient comes; waits for the chunks behind."""
        part, plan = self.parts[i, k], self.plans[i]
        seeds: list[Any] = [] if part.loss is None else [part.seed]
        for to in plan.sent_by(k):
            if labels := plan.returned_by(to).get(k, []):
                came: list[Any] = self.wire.receive(("B", i, to, k))
                if self.tells_which:
                    there = came.pop().tolist()
                    came = [
                        x if is_there else None for x, is_there in zip(came, there, strict=True)
                    ]
                for label, grad in zip(labels, came, strict=True):
                    if part.run.outs[label].requires_grad:
                        seeds.append(grad)
        return seeds

    def _backward(self, i: int, k: int) -> None:
        part = self.parts[i, k]
        pairs = zip(self._outs(i, k), self._seeds(i, k), strict=True)
        roots = [(x, grad) for x, grad in pairs if grad is not None]
        outs, seeds = [x for x, _ in roots], [grad for _, grad in roots]
        inputs = part.run.inputs
        wanted = [x for x in inputs.values() if x.requires_grad]
        with part.drawing:
            found = part.owner.go_back(outs, seeds, wanted) if outs else ()
        grads = {id(x): g for x, g in zip(wanted, found, strict=False)}
        self._reply(i, k, {label: grads.get(id(x)) for label, x in inputs.items()})
        self._done(i, k)

    def _inputs(self, i: int, k: int) -> None:
        part = self.parts[i, k]
        inputs, begins = part.run.inputs, [*part.run.begins.values()]
        goals: list[Tensor | GradientEdge] = [*inputs.values(), *(edge for edge, _ in begins)]
        part.backward = SplitBackward(self._outs(i, k), goals, [self.tick])

        def tell(grads: list[Tensor | None]) -> None:
            self._reply(i, k, dict(zip(inputs, grads, strict=False)))

        seeds = self._seeds(i, k)
        with part.drawing:
            part.backward.of_inputs(seeds, tell)
        for _, x in begins:
            if x._backward_hooks:  # they have run, and backward goes on from here
                x._backward_hooks.clear()
        part.run.outs, part.run.inputs, part.run.begins, part.loss = {}, {}, {}, None
        part.run.skipped.clear()

    def _weights(self, i: int, k: int) -> None:
        part = self.parts[i, k]
        assert part.backward is not None
        with part.drawing:
            part.backward.of_weights()
        self._done(i, k)

    def _reply(self, i: int, k: int, grads: Mapping[Label, Tensor | None]) -> None:
        """Gradients of what a chunk has received go to those who sent it."""
        given = self.parts[i, k].run.inputs
        for source, labels in self.plans[i].returned_by(k).items():
            filled, there = [], []
            for label in labels:
                grad = grads.get(label)
                filled.append(torch.zeros_like(given[label]) if grad is None else grad)
                there.append(grad is not None)
            if self.tells_which:
                filled.append(torch.tensor(there, device=self.device))
            self.wire.send(("B", i, k, source), filled)

    def _done(self, i: int, k: int) -> None:
        owner = self.parts.pop((i, k)).owner
        if owner.holding:
            owner.finish()  # a layer that was called twice may have got a gradient once
            owner.close()
        else:
            self.finished.append(owner)

    # The end

    def _take_back(self) -> None:
        """Gradients of lent units come home."""
        for u, (home, guests) in self.lent.items():
            key = (self.source.index, u)
            for guest in guests if self.layout.trainable_of_units[u] else ():
                if guest == self.me:
                    kept = self.root.kept.pop(key, None) or [
                        torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                        for spec in self._summed(u)
                    ]
                    self.wire.send(("back", u, guest), kept)
                elif home == self.me:
                    self.root.add(key, Ready(self.wire.receive(("back", u, guest))))

    def _summed(self, u: int) -> list[Any]:
        """What a unit's gradients look like where they are summed."""
        flats, dtype = self.layout.flats, self.running.memo.get("reduce dtype")
        trainable = self.layout.trainable_of_units[u]
        return [flat_spec(flats[f].length, dtype or flats[f].dtype, self.device) for f in trainable]

    def _root_pass(self) -> Pass:
        """The pass in which gradients of what is outside of layers leave."""
        owner = new_pass(self.running, SumsOfPass(self.root))
        self.take_part(owner)
        return owner

    def _returned(self) -> tuple[Any, Any]:
        """The loss, and what is returned beside it, as the rehearsal found them."""
        return split_aux(self.plans[-1].result, self.asked.has_aux)

    def _tell(self) -> Callable[[], tuple[Tensor, Tensor | None, Any]]:
        """Start to tell all stages what the last one has: the loss, what gradients are to be
        multiplied by (if anything), and aux. What is returned waits for them."""
        loss, aux = self._returned()
        exact = isinstance(loss, Mean)
        like: Any = loss.total if isinstance(loss, Mean) else loss
        factor = replace(like, dtype=torch.float64) if exact else None
        source, mine = self.rank_of[self.last], None
        if source == self.me:
            its = self.losses.correction() if exact else None
            its = None if its is None else torch.as_tensor(its, dtype=torch.float64)
            mine = self.losses.mean(), its, mean_of_aux(self.auxes)
        return broadcast(self.ranks, source, mine, (like, factor, aux), "loss")
