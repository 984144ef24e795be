"""Orders found by list scheduling: whichever rank can act first does what it prefers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from zfunc.schedules.actions import UNIT, Action

__all__ = ["ListScheduling", "Preference"]

# Of several actions that a rank could begin at the same time it takes the one with the least key.
Preference = Callable[[str, int, int], tuple[float, ...]]
Candidate = tuple[float, bool, tuple[float, ...], Action]


class ListScheduling:
    """Microbatches through chunks, each chunk one after the other, under limits of memory.

    Time is counted in the unit costs of theory. An action is chosen when nothing else could start
    before it, so a rank that could act is never idle. (R. L. Graham, Bounds on Multiprocessing
    Timing Anomalies, 1969.)

    The last place on a rank is kept for its oldest microbatch as long as that has forwards to come.
    So a rank does not fill up with microbatches that all wait for one that it has no room for. With
    two chunks on each rank, and room for both, no rank is ever stuck.

    Args:
        rank_of: the owner of each chunk.
        microbatches: how many there are.
        kinds: ``"FB"``, or ``"FIW"`` for a backward in halves.
        room: how many chunks each rank may have between F and the end of backward.
        prefer: the key of an action given its kind, microbatch and chunk.
        spare: how many places on a rank are for the last of its chunks alone.
        ahead: between these two times a rank prefers, of all that could begin at once, what does
            not need a value of another rank that is sent only then. So messages are under way
            while ranks compute.
    """

    def __init__(
        self,
        rank_of: Sequence[int],
        microbatches: int,
        kinds: str,
        room: Sequence[int],
        prefer: Preference,
        spare: int = 0,
        ahead: tuple[float, float] = (inf, inf),
    ) -> None:
        ranks = len(room)
        self.rank_of, self.microbatches, self.kinds = rank_of, microbatches, kinds
        self.room, self.prefer, self.spare, self.ahead = list(room), prefer, spare, ahead
        self.own = [[k for k, r in enumerate(rank_of) if r == rank] for rank in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.end: dict[tuple[str, int, int], float] = {}
        self.free = [0.0] * ranks
        self.next = {(kind, k): 0 for kind in kinds for k in range(len(rank_of))}

    def run(self) -> bool:
        """Fill the rows. False says that the limits were too narrow, and no rank could act."""
        best = [self._candidate(rank) for rank in range(len(self.rows))]
        heap = [(found[0], rank) for rank, found in enumerate(best) if found is not None]
        heapify(heap)
        while heap:
            start, rank = heappop(heap)
            found = best[rank]
            if found is None or found[0] != start:
                continue  # superseded
            self._take(rank, start, found[-1])
            for other in self._touched(rank, found[-1].chunk):
                new = best[other] = self._candidate(other)
                if new is not None:
                    heappush(heap, (new[0], other))
        return len(self.end) == len(self.next) * self.microbatches

    def makespan(self) -> float:
        """When the last action ends."""
        return max(self.free)

    def _touched(self, rank: int, chunk: int) -> set[int]:
        """Ranks that may have something else to do once an action in a chunk is chosen."""
        beside = self.rank_of[max(chunk - 1, 0) : chunk + 2]
        return {rank, *beside}

    def _candidate(self, rank: int) -> Candidate | None:
        """What a rank does next, given what has been chosen so far."""
        found: Candidate | None = None
        for k in self.own[rank]:
            for kind in self.kinds:
                i = self.next[kind, k]
                if i == self.microbatches or (kind == "F" and not self._has_room(rank, i, k)):
                    continue
                comes = self._comes(kind, i, k)
                if comes is not None:
                    end, other = comes
                    start = max(self.free[rank], end)
                    late = start == end and other != rank and self._is_ahead(start)
                    new = start, late, self.prefer(kind, i, k), Action(kind, i, k)
                    if found is None or new < found:
                        found = new
        return found

    def _is_ahead(self, time: float) -> bool:
        return self.ahead[0] <= time <= self.ahead[1]

    def _has_room(self, rank: int, i: int, k: int) -> bool:
        """Whether forward of a microbatch in a chunk may begin."""
        own, last = self.own[rank], self.kinds[-1]
        left = self.room[rank] - (self.spare if k != own[-1] else 0)
        if left != 1:
            return left > 1
        oldest = min(self.next[last, k] for k in own)
        return i == oldest or all(self.next["F", k] > oldest for k in own)

    def _comes(self, kind: str, i: int, k: int) -> tuple[float, int] | None:
        """When what an action needs is there, and from which rank it comes; None as long as
        something that it needs is not chosen."""
        if kind == "F":
            return self._end("F", i, k - 1) if k else (0.0, self.rank_of[0])
        if kind == "W":
            return self._end("I", i, k)
        if ("F", i, k) not in self.end:
            return None
        if k == len(self.rank_of) - 1:
            return self._end("F", i, k)
        return self._end(kind, i, k + 1)

    def _end(self, kind: str, i: int, k: int) -> tuple[float, int] | None:
        end = self.end.get((kind, i, k))
        return None if end is None else (end, self.rank_of[k])

    def _take(self, rank: int, start: float, action: Action) -> None:
        kind, _, chunk = action
        self.rows[rank].append(action)
        self.free[rank] = self.end[action] = start + UNIT[kind]
        self.next[kind, chunk] += 1
        if kind == "F":
            self.room[rank] -= 1
        elif kind == self.kinds[-1]:
            self.room[rank] += 1
