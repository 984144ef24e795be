"""A function of placed parameters that stages call again and again: one token after the other.

Parameters enter once, and stay. Units that several stages use are lent once. What the function
does is rehearsed by shapes, as for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zfunc.engine import context
from zfunc.engine.communication import Communication
from zfunc.engine.context import Context
from zfunc.engine.differentiation import computed_in
from zfunc.engine.products import products
from zfunc.layout.readable import Readable
from zfunc.layout.stages import ranks_of_chunks
from zfunc.ranks.axes import alone, group
from zfunc.ranks.comm import Group
from zfunc.rehearsal.plans import Rehearsed, Spec
from zfunc.rehearsal.refs import Seam
from zfunc.rehearsal.rehearsal import rehearse
from zfunc.transforms.pipelining.evaluation import forward, forward_rows
from zfunc.transforms.pipelining.messages import StageMessage, Wire
from zfunc.transforms.pipelining.stage import PipelineStage, chunks_of_layers

__all__ = ["RepeatedStage", "repeated", "stages_of"]


class RepeatedStage(PipelineStage):
    """This rank's part of a function that is called on a few batches again and again.

    Args:
        running: the context.
        fn: ``fn(params, *args)``.
        params: the placed tree.
        rank_of: which stage has which chunk.
        ranks: the stages.
    """

    def __init__(
        self,
        running: Context,
        fn: Callable[..., Any],
        params: Readable,
        rank_of: Sequence[int],
        ranks: Group,
    ) -> None:
        nothing: list[list[Any]] = [[] for _ in range(ranks.size)]
        self.answer: Sequence[Spec] = ()
        super().__init__(running, fn, params, [], rank_of, nothing, ranks, "repeated")
        self.known: set[tuple[int, int]] = set()
        self.before = self.wire

    @property
    def is_last(self) -> bool:
        """Whether this rank has the end of the function, and answers."""
        return self.rank_of[self.last] == self.me

    def rehearsed(self, arguments: Callable[[], tuple[Any, ...]]) -> Rehearsed:
        """What the function does on arguments of these shapes.

        Args:
            arguments: makes them within the rehearsal, whose own they are: it may write to them.
        """
        with self.within(self.base), torch.no_grad():
            fn = lambda tree: self.fn(tree, *arguments())  # noqa: E731
            return rehearse(fn, self.layout, (), {}, chunks_of_layers(self.layout), self.device)

    def turn_to(self, plans: Sequence[Rehearsed], answer: Sequence[Spec] = ()) -> None:
        """Begin the next call, of as many batches as there are plans.

        Args:
            plans: what the function does on each.
            answer: for each what the last stage tells all others behind it, if anything.
        """
        self.before.finish()
        self.wire.post_all()  # in one direction what comes first is to be awaited first
        self.before, self.plans, self.answer = self.wire, list(plans), answer
        self.actions = forward_rows(self.rank_of, self.ranks.size, len(plans))
        self.lent = self._newly_lent()
        every = [[*self.messages(rank)] for rank in range(self.ranks.size)]
        self.wire = Wire(self.ranks, every, self.running.memo["connected"])
        self.lend()

    def _newly_lent(self) -> dict[int, tuple[int, list[int]]]:
        found = {
            u: (home, new)
            for u, (home, guests) in self._lent().items()
            if (new := [guest for guest in guests if (u, guest) not in self.known])
        }
        self.known |= {(u, guest) for u, (_, guests) in found.items() for guest in guests}
        return found

    def _sent_behind(self, kind: str, i: int, k: int, rank: int) -> Iterator[StageMessage]:
        yield from super()._sent_behind(kind, i, k, rank)
        if k == self.last and self.answer:
            for to in range(self.ranks.size):
                if to != rank:
                    yield StageMessage(("answer", i, to), rank, to, (self.answer[i],))

    def computed(self, i: int, k: int, *args: Any) -> Any:
        """A batch in a chunk; what the function returns, in the last one."""
        self.wire.post_ahead()
        return forward(self, i, k, args)

    def tell(self, i: int, value: Tensor) -> None:
        """Answer a batch, on the last stage."""
        for to in range(self.ranks.size):
            if to != self.me:
                self.wire.send(("answer", i, to), [value])

    def told(self, i: int) -> Tensor:
        """The answer to a batch of the call before, on another stage."""
        return self.before.receive(("answer", i, self.me))[0]

    def finish(self) -> None:
        """End the last call: its answers may be asked for."""
        self.turn_to([])


def stages_of(params: Any) -> tuple[int, ...] | None:
    """Which stage has each chunk of placed parameters; None of others."""
    if not isinstance(params, Readable) or not params.layout.layers:
        return None
    return ranks_of_chunks(params.layout)


@contextmanager
def repeated(fn: Callable[..., Any], params: Readable) -> Iterator[RepeatedStage]:
    """A block in which stages call ``fn(params, *args)`` again and again, without gradients.

    Raises:
        PlacementError: the parameters have no stages here.
    """
    rank_of = stages_of(params)
    assert rank_of is not None
    axis = params.layout.axis
    first, rest = (axis, ()) if isinstance(axis, str) else (axis[0], axis[1:])
    running = context.current()
    if running is None or not any(x.name == "pipeline" for x in running.transforms):
        within = group(params.layout.mesh, rest) if rest else alone()
        # One unit at a time beside what a rank has: memory is why parameters are cut.
        over = Communication(group=within, gathers_anew=within.size > 1, prefetch=0)
        running = Context(transforms=(Seam(),), by_unit=True, notes={Communication: over})
    token = context.push(running)
    try:
        with torch.no_grad(), products(computed_in(params)):
            stage = RepeatedStage(running, fn, params, rank_of, group(params.layout.mesh, first))
            try:
                yield stage
            finally:
                stage.base.close()
    finally:
        context.pop(token)
