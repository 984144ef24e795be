"""A world of many ranks of which one does its work: what the others would send has no values.

Checks, cuts, labels, bounds and bytes are those of any group (:mod:`zfunc.ranks.connected`). The
transport alone is another: nobody is waited for, and what arrives has the right shape. Its values
are those that came if every rank were like this one. That is a guess, and is told as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.ranks.adjacency import neighbours, ring
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.transfers import Complete, Direction, TensorSpec, Transfer
from zfunc.ranks.transport import Collective, Messages, Steps, Transport
from zfunc.ranks.world import World, entered
from zfunc.trees.kinds import FORESEEN

__all__ = ["Arrivals", "ForeseenWorld", "foreseeing"]


class Arrivals(Protocol):
    """Who is told of what one rank issues, waits for and gets from the others."""

    def issued(self, call: Collective, axis: str, nbytes: int, peer: int) -> int:
        """A collective starts, or a message (``peer`` is -1, or a rank); returns its number."""

    def waited(self, number: int) -> None:
        """It is over."""

    def arrived(
        self, written: Sequence[Tensor], given: Sequence[Tensor], fill: Callable[[], Any]
    ) -> None:
        """Peers have written these tensors.

        Args:
            written: which.
            given: what this rank has sent for it.
            fill: writes them as peers would that are like this rank; it needs values of ``given``.
        """


class Absent(Transport):
    """The transport of one group whose other ranks are not there."""

    def __init__(self, world: ForeseenWorld, axis: str, members: tuple[int, ...]) -> None:
        self.rank, self.size = members.index(world.rank), len(members)
        self._axis, self._told, self._on_gpu = axis, world.told, world.kind == "cuda"
        self.messages = AbsentMessages(self)

    def headers_sent(self, kind: str, data: Tensor | None) -> int:
        if not self._on_gpu or data is None:
            return super().headers_sent(kind, data)
        return len((neighbours if kind == "all_to_all" else ring)(self.rank, self.size))

    def hosted(self, data: Tensor | None) -> bool:
        return data is None or not self._on_gpu

    def mark(self, call: Collective) -> None:
        return

    def issue(self, call: Collective, nbytes: int, peer: int = -1) -> int:
        """Tell that something starts."""
        return self._told.issued(call, self._axis, nbytes, peer)

    def _steps(
        self,
        call: Collective,
        nbytes: int,
        written: Sequence[Tensor],
        given: Sequence[Tensor],
        fill: Callable[[], Any],
    ) -> Steps[Any]:
        number = self.issue(call, nbytes)
        yield
        self._told.waited(number)
        self._told.arrived(written, given, fill)

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        def fill() -> None:
            own = full[cuts[self.rank] : cuts[self.rank + 1]]
            for peer, (start, end) in enumerate(pairwise(cuts)):
                if peer != self.rank:
                    _copy(own, full[start:end])

        yield from self._steps(call, full.nbytes, [full], [full], fill)
        return full

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        own = full[cuts[self.rank] : cuts[self.rank + 1]]
        total = torch.empty_like(own) if out is None else out
        fill = lambda: total.copy_(own).mul_(self.size)  # noqa: E731
        yield from self._steps(call, full.nbytes, [total], [full], fill)
        return total

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        yield from self._steps(call, flat.nbytes, [flat], [flat], lambda: flat.mul_(self.size))
        return flat

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        own = chunks[self.rank]
        parts = [torch.empty(n, dtype=own.dtype, device=own.device) for n in sizes]

        def fill() -> None:
            for part in parts:
                _copy(own, part)

        yield from self._steps(call, sum(x.nbytes for x in chunks), parts, [own], fill)
        return parts

    def broadcast(self, call: Collective, flat: Tensor, src: int) -> Steps[Tensor]:
        written = [] if src == self.rank else [flat]
        yield from self._steps(call, flat.nbytes, written, [flat], lambda: None)
        return flat

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        yield from self._steps(call, len(data), [], [], lambda: None)
        return [data] * self.size


class AbsentMessages(Messages):
    """Messages to and from ranks that are not there."""

    def __init__(self, transport: Absent) -> None:
        self._transport = transport

    def connect(self, directions: Sequence[Direction]) -> None:
        return

    def finish(self) -> None:
        return

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        number = self._transport.issue(call, sum(x.nbytes for x in parts), peer)
        self._transport._told.waited(number)
        return Complete()

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        number = self._transport.issue(call, sum(spec.nbytes for spec in specs), peer)
        return Foretold(self._transport._told, number, [spec.empty(device) for spec in specs])


class Foretold(Transfer[list[Tensor]]):
    """A message to this rank: its memory is there from when it is posted."""

    def __init__(self, told: Arrivals, number: int, parts: list[Tensor]) -> None:
        self._told, self._number, self._parts = told, number, parts

    def is_over(self) -> bool:
        return True

    def wait(self) -> list[Tensor]:
        self._told.waited(self._number)
        self._told.arrived(self._parts, [], lambda: [part.fill_(1) for part in self._parts])
        return self._parts


def _copy(own: Tensor, part: Tensor) -> None:
    """What a peer like this one has in a part of another size."""
    part.fill_(1)
    n = min(own.numel(), part.numel())
    part.view(-1)[:n].copy_(own.reshape(-1)[:n])


class ForeseenWorld(World):
    """The world of a rank whose peers are not there.

    Args:
        rank, size: as in any world.
        kind: the kind of device that ranks compute on, which the CPU stands for.
        told: hears of what is sent and of what arrives.
    """

    def __init__(self, rank: int, size: int, kind: str, told: Arrivals) -> None:
        super().__init__(rank, size, 60.0)
        self.kind, self.told = kind, told

    def connect(self, axis: str, members: tuple[int, ...]) -> ConnectedGroup:
        return ConnectedGroup(axis, self, members, lambda: Absent(self, axis, members))


@contextmanager
def foreseeing(world: ForeseenWorld) -> Iterator[ForeseenWorld]:
    """Be the rank of a foreseen world inside the block."""
    token = FORESEEN.set(world.kind)
    try:
        with entered(world):
            yield world
    finally:
        FORESEEN.reset(token)
