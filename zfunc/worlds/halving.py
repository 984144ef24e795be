"""Collectives of a large group on CPU tensors: recursive halving and doubling.

Each is a number of rounds, in each of which a rank exchanges with one partner (see
``zfunc.worlds.routes`` for who that is). The first messages go out when the collective is issued;
the rest of the rounds are in ``wait``. Neighbours in a ring have compared headers before anything
that was received is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zfunc.worlds.routes import Cube, offsets
from zfunc.worlds.transport import Call, Steps

if TYPE_CHECKING:
    from zfunc.worlds.gloo import Header, PointToPoint

__all__ = ["Halving"]


class Halving:
    """The collectives of a transport between more ranks than would connect each to each."""

    def __init__(self, transport: PointToPoint) -> None:
        self._on = transport
        self._cube = Cube(transport.rank, transport.size)

    def all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        headers = self._announce(call)
        rounds = self._gather(call, full, cuts, phase=1)
        next(rounds)
        yield
        self._agree(call, headers)
        _end(rounds)
        return full

    def reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        rank = self._cube.rank
        headers = self._announce(call)
        own = torch.empty_like(full[cuts[rank] : cuts[rank + 1]]) if out is None else out
        rounds = self._scatter(call, full, cuts, own)
        next(rounds)
        yield
        self._agree(call, headers)
        _end(rounds)
        return own

    def all_reduce(self, call: Call, flat: Tensor, cuts: Sequence[int] | None) -> Steps[Tensor]:
        headers = self._announce(call)
        if cuts is None:
            rounds = self._reduce_whole(call, flat)
        else:
            rounds = self._reduce_segments(call, flat, cuts)
        next(rounds)
        yield
        self._agree(call, headers)
        _end(rounds)
        return flat

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
        _end(self._gather(call, whole, cuts, phase=0))
        text = whole.numpy().tobytes()
        return [text[cuts[peer] : cuts[peer + 1]] for peer in range(size)]

    def _gather(self, call: Call, full: Tensor, cuts: Sequence[int], phase: int) -> Iterator[None]:
        """Near partners first: after each round a rank has twice as much."""
        on, cube = self._on, self._cube
        rank, twin = cube.rank, cube.twin
        own = full[cuts[rank] : cuts[rank + 1]]
        if twin is not None and cube.folded:
            sent = [on.send(call, twin, own, phase)]
            yield
            on.finish(call, [*sent, on.receive(call, twin, full, phase)])
            return
        before = (
            []
            if twin is None
            else [on.receive(call, twin, full[cuts[twin] : cuts[twin + 1]], phase)]
        )
        messages = before if before else self._doubled(call, full, cuts, 1, phase)
        yield
        on.finish(call, messages)
        for distance in reversed(cube.rounds()):
            if distance > 1 or before:
                on.finish(call, self._doubled(call, full, cuts, distance, phase))
        if twin is not None:
            on.finish(call, [on.send(call, twin, full, phase)])

    def _doubled(
        self, call: Call, full: Tensor, cuts: Sequence[int], distance: int, phase: int
    ) -> list[tuple[int, object]]:
        on, cube = self._on, self._cube
        mine, theirs = (slice(*cube.stretch(cuts, *corners)) for corners in cube.halves(distance))
        peer = cube.partner(distance)
        return [
            on.receive(call, peer, full[theirs], phase),
            on.send(call, peer, full[mine], phase),
        ]

    def _scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], own: Tensor
    ) -> Iterator[None]:
        """Far partners first: after each round a rank is concerned with half as much."""
        on, cube = self._on, self._cube
        twin = cube.twin
        if twin is not None and cube.folded:
            sent = [on.send(call, twin, full)]
            yield
            on.finish(call, [*sent, on.receive(call, twin, own)])
            return
        total, start = full, 0  # what this rank has added up, and where in ``full`` it begins
        if twin is not None:
            arrived = on.scratch.take(full)
            message = on.receive(call, twin, arrived)
            yield
            on.finish(call, [message])
            total = torch.add(full, arrived, out=arrived)
        waiting = twin is None
        for distance in cube.rounds():
            mine, other = (cube.stretch(cuts, *half) for half in cube.halves(distance))
            kept, given = (total[a - start : b - start] for a, b in (mine, other))
            part = on.scratch.take(kept)
            peer = cube.partner(distance)
            messages = [on.receive(call, peer, part), on.send(call, peer, given)]
            if waiting:
                yield
                waiting = False
            on.finish(call, messages)
            added = torch.add(kept, part, out=part)  # the same bits at both: a + b is b + a
            self._give(total, full)
            total, start = added, mine[0]
        own.copy_(total[cuts[cube.rank] - start : cuts[cube.rank + 1] - start])
        if twin is not None:
            theirs = total[cuts[twin] - start : cuts[twin + 1] - start]
            on.finish(call, [on.send(call, twin, theirs)])
        self._give(total, full)

    def _give(self, total: Tensor, full: Tensor) -> None:
        """Partial sums go back where they came from, unless they are what was given to add."""
        if total is not full:
            self._on.scratch.give(total)

    def _reduce_segments(self, call: Call, flat: Tensor, cuts: Sequence[int]) -> Iterator[None]:
        own = flat[cuts[self._cube.rank] : cuts[self._cube.rank + 1]]
        yield from self._scatter(call, flat, cuts, own)
        _end(self._gather(call, flat, cuts, phase=1))

    def _reduce_whole(self, call: Call, flat: Tensor) -> Iterator[None]:
        """Every partner sends all it has: the fewest rounds, for what is small."""
        on, cube = self._on, self._cube
        twin, part = cube.twin, torch.empty_like(flat)
        if twin is not None and cube.folded:
            sent = [on.send(call, twin, flat)]
            yield
            on.finish(call, sent)
            on.finish(call, [on.receive(call, twin, flat)])
            return
        if twin is not None:
            message = on.receive(call, twin, part)
            yield
            on.finish(call, [message])
            flat.add_(part)
        waiting = twin is None
        for distance in cube.rounds():
            peer = cube.partner(distance)
            messages = [on.receive(call, peer, part), on.send(call, peer, flat)]
            if waiting:
                yield
                waiting = False
            on.finish(call, messages)
            flat.add_(part)
        if twin is not None:
            on.finish(call, [on.send(call, twin, flat)])

    def _announce(self, call: Call) -> list[Header]:
        return self._on.announce(call, [0] * self._cube.size)

    def _agree(self, call: Call, headers: list[Header]) -> None:
        self._on.agree(call, headers, [0] * self._cube.size)


def _end(rounds: Iterator[None]) -> None:
    for _ in rounds:
        pass
