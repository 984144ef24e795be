"""The transport over gloo for large groups: recursive halving and doubling.

A collective is a number of rounds, in each of which a rank exchanges with one partner (see
``zfunc.ranks.routes`` for who that is). It is written as a generator of the messages of each
round, which are complete when it goes on. The first messages go out when the collective is issued;
the rest of the rounds are in ``wait``.

Only neighbours in a ring check each other's headers, and they have done so before anything that was
received is used. What ranks further apart have to know of each other is in the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.gloo import PATIENCE, Header, Message, Place, PointToPoint, unreached
from zfunc.ranks.routes import Cube, goes_whole, offsets
from zfunc.ranks.transport import Collective, Steps, elsewhere, silence

__all__ = ["Halving"]

T = TypeVar("T")

Rounds = Iterator[list[Message]]


class Halving(PointToPoint):
    """The transport over gloo between more ranks than would connect each to each."""

    def __init__(self, place: Place, timeout: float) -> None:
        super().__init__(place, timeout)
        self._cube = Cube(self.rank, self.size)
        self._complete = False  # whether all have come to a collective

    def in_rounds(self, data: Tensor | None) -> bool:
        return True

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        return self._run(call, self._gather(call, full, cuts, phase=1), full)

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        rank = self.rank
        own = torch.empty_like(full[cuts[rank] : cuts[rank + 1]]) if out is None else out
        return self._run(call, self._scatter(call, full, cuts, own), own)

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        whole = goes_whole(flat.nbytes, self.size)
        rounds = (self._reduce_whole if whole else self._reduce_segments)(call, flat)
        return self._run(call, rounds, flat)

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        """Straight to everybody, for nobody else has use for it."""
        parts = self._parts(chunks, sizes)
        headers = self.announce(call, [chunk.numel() for chunk in chunks])
        everyone = [(self.rank + step) % self.size for step in range(1, self.size)]
        received = [self.receive(call, peer, parts[peer]) for peer in everyone]
        sent = [self.send(call, peer, chunks[peer]) for peer in everyone]
        yield
        self.agree(call, headers, sizes)
        self.finish(call, received + sent)
        return parts

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        rank, size = self.rank, self.size
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

    def _run(self, call: Collective, rounds: Rounds, result: T) -> Steps[T]:
        nothing = [0] * self.size
        headers = self.announce(call, nothing)
        first = next(rounds)
        yield
        self.agree(call, headers, nothing)
        self.finish(call, first)
        self._end(call, rounds)
        return result

    def _end(self, call: Collective, rounds: Rounds) -> None:
        for messages in rounds:
            self.finish(call, messages)

    def _gather(self, call: Collective, full: Tensor, cuts: Sequence[int], phase: int) -> Rounds:
        """Near partners first: after each round a rank has twice as much."""
        cube = self._cube
        rank, twin = cube.rank, cube.twin
        if twin is not None and cube.folded:
            yield [self.send(call, twin, full[cuts[rank] : cuts[rank + 1]], phase)]
            yield [self.receive(call, twin, full, phase)]
            return
        if twin is not None:
            yield [self.receive(call, twin, full[cuts[twin] : cuts[twin + 1]], phase)]
        for distance in reversed(cube.rounds()):
            mine, theirs = (slice(*cube.stretch(cuts, *half)) for half in cube.halves(distance))
            yield self._trade(call, distance, full[theirs], full[mine], phase)
        if twin is not None:
            yield [self.send(call, twin, full, phase)]

    def _scatter(self, call: Collective, full: Tensor, cuts: Sequence[int], own: Tensor) -> Rounds:
        """Far partners first: after each round a rank is concerned with half as much."""
        cube = self._cube
        twin = cube.twin
        if twin is not None and cube.folded:
            yield [self.send(call, twin, full)]
            yield [self.receive(call, twin, own)]
            return
        total, start = full, 0  # what this rank has added up, and where in ``full`` it begins
        if twin is not None:
            arrived = self.scratch.take(full)
            yield [self.receive(call, twin, arrived)]
            total = torch.add(full, arrived, out=arrived)
        for distance in cube.rounds():
            mine, other = (cube.stretch(cuts, *half) for half in cube.halves(distance))
            kept, given = (total[a - start : b - start] for a, b in (mine, other))
            part = self.scratch.take(kept)
            yield self._trade(call, distance, part, given)
            added = torch.add(kept, part, out=part)  # the same bits at both: a + b is b + a
            self._give(total, full)
            total, start = added, mine[0]
        own.copy_(total[cuts[cube.rank] - start : cuts[cube.rank + 1] - start])
        if twin is not None:
            yield [self.send(call, twin, total[cuts[twin] - start : cuts[twin + 1] - start])]
        self._give(total, full)

    def _give(self, total: Tensor, full: Tensor) -> None:
        """Partial sums go back where they came from, unless they are what was given to add."""
        if total is not full:
            self.scratch.give(total)

    def _reduce_segments(self, call: Collective, flat: Tensor) -> Rounds:
        cuts = even_cuts(flat.numel(), self.size)
        own = flat[cuts[self.rank] : cuts[self.rank + 1]]
        yield from self._scatter(call, flat, cuts, own)
        yield from self._gather(call, flat, cuts, phase=1)

    def _reduce_whole(self, call: Collective, flat: Tensor) -> Rounds:
        """Every partner sends all it has: the fewest rounds, for what is small."""
        cube = self._cube
        twin, part = cube.twin, torch.empty_like(flat)
        if twin is not None and cube.folded:
            yield [self.send(call, twin, flat)]
            yield [self.receive(call, twin, flat)]
            return
        if twin is not None:
            yield [self.receive(call, twin, part)]
            flat.add_(part)
        for distance in cube.rounds():
            yield self._trade(call, distance, part, flat)
            flat.add_(part)
        if twin is not None:
            yield [self.send(call, twin, flat)]

    def _trade(
        self, call: Collective, distance: int, into: Tensor, data: Tensor, phase: int = 0
    ) -> list[Message]:
        """The messages between this rank and its partner in a round."""
        peer = self._cube.partner(distance)
        return [
            self.receive(call, peer, into, phase),
            self.send(call, peer, data, phase),
        ]

    def announce(
        self,
        call: Collective,
        lengths: Sequence[int],
        peers: Sequence[int] | None = None,
        payloads: Mapping[int, memoryview] = MappingProxyType({}),
    ) -> list[Header]:
        headers = super().announce(call, lengths, peers, payloads)
        if peers is None and not self._complete:
            self._complete = True
            for peer, ticket in headers:
                self._compare(call, peer, ticket)
            try:
                self._await_all(call)
            except dist.DistNetworkError as error:
                raise unreached(error) from error
        return headers

    def _meet(self, call: Collective, peer: int) -> None:
        """All ranks have met at the first collective."""

    def _await_all(self, call: Collective) -> None:
        """Return when all have said in the store that the headers of their neighbours agree."""
        self._store.set(f"met/{self.rank}", "")
        if self._store.add("met", 1) == self.size:
            self._store.set("all met", "")
        deadline, pause = time.monotonic() + self._seconds, 0.01
        while not self._store.check(["all met"]):
            if self._store.check(["cause"]):
                raise elsewhere(self._store.get("cause").decode())
            if time.monotonic() > deadline:
                missing = [k for k in self._all if not self._store.check([f"met/{k}"])]
                raise silence(call, [self._world_ranks[k] for k in missing], self._seconds)
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # one store answers all ranks

    def leave(self, error: DesyncError) -> None:
        """Tell the peers that listen to this rank why, and the store for those who are none.

        Most ranks wait for partners that are further on the way. They find out when a partner's
        connections end with its process, or by the timeout.
        """
        super().leave(error)
        with suppress(RuntimeError):
            here = f"on rank {self._world_ranks[self.rank]}: "
            self._store.compare_set("cause", "", here + str(error))

    def _cause(self) -> str:
        deadline = time.monotonic() + min(PATIENCE, self._seconds)
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                if self._store.check(["cause"]):
                    return self._store.get("cause").decode()
            time.sleep(0.05)
        return ""
