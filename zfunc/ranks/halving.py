"""Collectives of a large group on CPU tensors: recursive halving and doubling.

Each is a number of rounds, in each of which a rank exchanges with one partner (see
``zfunc.ranks.routes`` for who that is). It is written as a generator of the messages of each
round, which are complete when it goes on. The first messages go out when the collective is issued;
the rest of the rounds are in ``wait``. Neighbours in a ring have compared headers before anything
that was received is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zfunc.ranks.routes import Cube, offsets
from zfunc.ranks.scratch import Scratch
from zfunc.ranks.transport import Call, Steps

__all__ = ["Halving", "Header", "Message"]

T = TypeVar("T")

Message = tuple[int, Any]  # the peer concerned and torch's Work
Header = tuple[int, int]  # the peer concerned and the header's ticket
Rounds = Iterator[list[Message]]


class Messenger(Protocol):
    """What sends single messages, and compares headers."""

    rank: int
    size: int
    scratch: Scratch

    def announce(self, call: Call, lengths: Sequence[int]) -> list[Header]:
        """Send the neighbours a header each; theirs are for ``agree``."""

    def agree(self, call: Call, headers: list[Header], expected: Sequence[int]) -> None:
        """Check their headers."""

    def send(self, call: Call, peer: int, data: Tensor, phase: int = 0) -> Message:
        """Start to send."""

    def receive(self, call: Call, peer: int, into: Tensor, phase: int = 0) -> Message:
        """Start to receive."""

    def finish(self, call: Call, messages: Sequence[Message]) -> None:
        """Wait for messages."""


class Halving:
    """The collectives of a transport between more ranks than would connect each to each."""

    def __init__(self, transport: Messenger) -> None:
        self._on = transport
        self._cube = Cube(transport.rank, transport.size)

    def all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        return self._run(call, self._gather(call, full, cuts, phase=1), full)

    def reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        rank = self._cube.rank
        own = torch.empty_like(full[cuts[rank] : cuts[rank + 1]]) if out is None else out
        return self._run(call, self._scatter(call, full, cuts, own), own)

    def all_reduce(self, call: Call, flat: Tensor, cuts: Sequence[int] | None) -> Steps[Tensor]:
        if cuts is None:
            return self._run(call, self._reduce_whole(call, flat), flat)
        return self._run(call, self._reduce_segments(call, flat, cuts), flat)

    def exchange(self, call: Call, data: bytes) -> Steps[list[bytes]]:
        rank, size = self._cube.rank, self._cube.size
        lengths = torch.zeros(size, dtype=torch.int64)
        lengths[rank] = len(data)
        yield from self.all_gather(call, lengths, range(size + 1))
        cuts = offsets(lengths.tolist())
        if cuts[-1] == 0:
            return [b""] * size
        whole = torch.zeros(cuts[-1], dtype=torch.uint8)
        if data:
            own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            whole[cuts[rank] : cuts[rank + 1]].copy_(own)
        self._end(call, self._gather(call, whole, cuts, phase=0))
        text = whole.numpy().tobytes()
        return [text[cuts[peer] : cuts[peer + 1]] for peer in range(size)]

    def _run(self, call: Call, rounds: Rounds, result: T) -> Steps[T]:
        nothing = [0] * self._cube.size
        headers = self._on.announce(call, nothing)
        first = next(rounds)
        yield
        self._on.agree(call, headers, nothing)
        self._on.finish(call, first)
        self._end(call, rounds)
        return result

    def _end(self, call: Call, rounds: Rounds) -> None:
        for messages in rounds:
            self._on.finish(call, messages)

    def _gather(self, call: Call, full: Tensor, cuts: Sequence[int], phase: int) -> Rounds:
        """Near partners first: after each round a rank has twice as much."""
        on, cube = self._on, self._cube
        rank, twin = cube.rank, cube.twin
        if twin is not None and cube.folded:
            yield [on.send(call, twin, full[cuts[rank] : cuts[rank + 1]], phase)]
            yield [on.receive(call, twin, full, phase)]
            return
        if twin is not None:
            yield [on.receive(call, twin, full[cuts[twin] : cuts[twin + 1]], phase)]
        for distance in reversed(cube.rounds()):
            mine, theirs = (slice(*cube.stretch(cuts, *half)) for half in cube.halves(distance))
            yield self._swap(call, distance, full[theirs], full[mine], phase)
        if twin is not None:
            yield [on.send(call, twin, full, phase)]

    def _scatter(self, call: Call, full: Tensor, cuts: Sequence[int], own: Tensor) -> Rounds:
        """Far partners first: after each round a rank is concerned with half as much."""
        on, cube = self._on, self._cube
        twin = cube.twin
        if twin is not None and cube.folded:
            yield [on.send(call, twin, full)]
            yield [on.receive(call, twin, own)]
            return
        total, start = full, 0  # what this rank has added up, and where in ``full`` it begins
        if twin is not None:
            arrived = on.scratch.take(full)
            yield [on.receive(call, twin, arrived)]
            total = torch.add(full, arrived, out=arrived)
        for distance in cube.rounds():
            mine, other = (cube.stretch(cuts, *half) for half in cube.halves(distance))
            kept, given = (total[a - start : b - start] for a, b in (mine, other))
            part = on.scratch.take(kept)
            yield self._swap(call, distance, part, given)
            added = torch.add(kept, part, out=part)  # the same bits at both: a + b is b + a
            self._give(total, full)
            total, start = added, mine[0]
        own.copy_(total[cuts[cube.rank] - start : cuts[cube.rank + 1] - start])
        if twin is not None:
            yield [on.send(call, twin, total[cuts[twin] - start : cuts[twin + 1] - start])]
        self._give(total, full)

    def _give(self, total: Tensor, full: Tensor) -> None:
        """Partial sums go back where they came from, unless they are what was given to add."""
        if total is not full:
            self._on.scratch.give(total)

    def _reduce_segments(self, call: Call, flat: Tensor, cuts: Sequence[int]) -> Rounds:
        own = flat[cuts[self._cube.rank] : cuts[self._cube.rank + 1]]
        yield from self._scatter(call, flat, cuts, own)
        yield from self._gather(call, flat, cuts, phase=1)

    def _reduce_whole(self, call: Call, flat: Tensor) -> Rounds:
        """Every partner sends all it has: the fewest rounds, for what is small."""
        on, cube = self._on, self._cube
        twin, part = cube.twin, torch.empty_like(flat)
        if twin is not None and cube.folded:
            yield [on.send(call, twin, flat)]
            yield [on.receive(call, twin, flat)]
            return
        if twin is not None:
            yield [on.receive(call, twin, part)]
            flat.add_(part)
        for distance in cube.rounds():
            yield self._swap(call, distance, part, flat)
            flat.add_(part)
        if twin is not None:
            yield [on.send(call, twin, flat)]

    def _swap(
        self, call: Call, distance: int, into: Tensor, data: Tensor, phase: int = 0
    ) -> list[Message]:
        """The messages between this rank and its partner in a round."""
        peer = self._cube.partner(distance)
        return [
            self._on.receive(call, peer, into, phase),
            self._on.send(call, peer, data, phase),
        ]
