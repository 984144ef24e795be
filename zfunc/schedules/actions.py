"""What a rank of a pipeline does: one action for one microbatch in one chunk, and what it needs.

A *chunk* is a run of layers, the smallest part of a model that a rank owns. Chunk 0 comes first in
forward. A *crossing* ``(a, b)`` says that chunk ``b`` uses values that chunk ``a`` has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from zfunc.errors import ScheduleError

__all__ = [
    "KINDS",
    "UNIT",
    "Action",
    "Cost",
    "Crossings",
    "Dependencies",
    "MessageTime",
    "checked_time",
    "duration",
]

KINDS = "FBIW"

Cost: TypeAlias = Mapping[str, float] | Callable[[str, int, int], float]
MessageTime: TypeAlias = float | Callable[[int, int], float]
Crossings: TypeAlias = Iterable[tuple[int, int]]

# Forward takes as long as either half of backward. Theory counts like this.
UNIT: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class Action(NamedTuple):
    """One piece of work of a rank. It equals the plain tuple of its three parts.

    Attributes:
        kind: ``"F"`` is forward. ``"B"`` is the whole backward. ``"I"`` and ``"W"`` are its
            halves: the gradients of what the chunk was given, and those of its weights.
        microbatch: counted from 0.
        chunk: counted from 0, in the order of forward.

    >>> str(Action("F", 3, 1))
    'F(microbatch 3, chunk 1)'
    >>> Action("F", 3, 1) == ("F", 3, 1)
    True
    """

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, chunk {self.chunk})"


class Dependencies:
    """What each action needs, given which chunks use each other's values.

    Args:
        chunks: how many there are.
        whole: the pairs (microbatch, chunk) whose backward is one action, B.
        crossings: pairs (from chunk, to chunk). None: each chunk uses its predecessor's values.
        returning: the crossings over which gradients come back. None: all of them.

    Raises:
        ScheduleError: a crossing does not lead from a chunk to a later one, or gradients are to
            return where nothing crosses.
    """

    def __init__(
        self,
        chunks: int,
        whole: frozenset[tuple[int, int]] = frozenset(),
        crossings: Crossings | None = None,
        returning: Crossings | None = None,
    ) -> None:
        steps = [(k, k + 1) for k in range(chunks - 1)]
        there = sorted(steps if crossings is None else {(int(a), int(b)) for a, b in crossings})
        back = there if returning is None else sorted({(int(a), int(b)) for a, b in returning})
        for a, b in there:
            if not 0 <= a < b < chunks:
                raise ScheduleError(
                    f"the crossing ({a}, {b}) does not lead from a chunk to a later one: there are "
                    f"chunks 0 to {chunks - 1}, and values cross upwards"
                )
        if not {*back} <= {*there}:
            lost = min({*back} - {*there})
            raise ScheduleError(f"gradients return over {lost}, where nothing crosses forward")
        self.whole = whole
        self.sources: list[list[int]] = [[a for a, b in there if b == k] for k in range(chunks)]
        self.targets: list[list[int]] = [[b for a, b in there if a == k] for k in range(chunks)]
        self.returns: list[list[int]] = [[b for a, b in back if a == k] for k in range(chunks)]

    def backward(self, microbatch: int, chunk: int) -> Action:
        """The action that makes the gradients of what a chunk was given: B or I."""
        return Action("B" if (microbatch, chunk) in self.whole else "I", microbatch, chunk)

    def needs(self, action: Action) -> Iterator[Action]:
        """What must be over before an action begins."""
        kind, i, k = action
        if kind == "F":
            yield from (Action("F", i, a) for a in self.sources[k])
        elif kind == "W":
            yield Action("I", i, k)
        else:
            yield Action("F", i, k)
            yield from (self.backward(i, b) for b in self.returns[k])


def duration(cost: Cost, action: Action) -> float:
    """How long an action takes.

    Raises:
        ScheduleError: the kind has no cost, or the cost is negative or no number.
    """
    if isinstance(cost, Mapping):
        if action.kind not in cost:
            raise ScheduleError(f"{action} has no cost: the costs are of {', '.join(cost)}")
        time = cost[action.kind]
    else:
        time = cost(*action)
    return checked_time(time, str(action))


def checked_time(time: float, what: str) -> float:
    """A time as a float, if it can be one.

    Raises:
        ScheduleError: it is negative, infinite or NaN.
    """
    if not 0 <= time < float("inf"):
        raise ScheduleError(f"{what} takes {time}: a time is a finite number, and not negative")
    return float(time)
