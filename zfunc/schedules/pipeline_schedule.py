"""A schedule of a pipeline: which rank owns which chunk, and what each rank does in which order."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from zfunc.schedules.actions import UNIT, Action, Cost, Crossings, Dependencies, MessageTime
from zfunc.schedules.checks import as_actions, as_count, as_owners, check_actions
from zfunc.schedules.drawing import draw, text_picture
from zfunc.schedules.timelines import Timeline, timeline

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in order. It is a value: equal, hashable, and pickled.

    Only computation is written down. What is sent follows from what each action needs: forward of
    a chunk needs forward of the chunks whose values it uses, backward needs the own forward and
    backward of the chunks that use its values.

    Attributes:
        rank_of: the rank that owns each chunk. Chunk 0 comes first in forward. A rank may own
            several chunks, or none.
        microbatches: how many there are.
        actions: of each rank, :class:`Action` or plain triples ``(kind, microbatch, chunk)``. Of
            every microbatch and chunk there is one ``"F"``, and either one ``"B"``, or one ``"I"``
            and one ``"W"``.

    Raises:
        ScheduleError: something is no action, or a number is no number.

    >>> two = Schedule(
    ...     rank_of=(0, 1),
    ...     microbatches=1,
    ...     actions=((("F", 0, 0), ("B", 0, 0)), (("F", 0, 1), ("B", 0, 1))),
    ... )
    >>> two.makespan(), two.bubble()
    (6.0, 0.5)
    >>> swapped = Schedule((0,), 1, ((("B", 0, 0), ("F", 0, 0)),))
    >>> swapped.check()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zfunc.errors.ScheduleError: this schedule waits for ever: rank 0 stands before B(microbatch 0,
    chunk 0) and waits for its own F(microbatch 0, chunk 0), which comes later there
    """

    rank_of: tuple[int, ...]
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of", as_owners(self.rank_of))
        object.__setattr__(self, "microbatches", as_count(self.microbatches, "microbatches"))
        object.__setattr__(self, "actions", as_actions(self.actions))

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """How many chunks the model is cut into."""
        return len(self.rank_of)

    def dependencies(
        self, crossings: Crossings | None = None, returning: Crossings | None = None
    ) -> Dependencies:
        """What each action needs. The arguments are those of :meth:`timeline`.

        Raises:
            ScheduleError: an action is missing, there twice, or not where it belongs.
        """
        whole = check_actions(self.rank_of, self.microbatches, self.actions)
        return Dependencies(self.chunks, whole, crossings, returning)

    def check(self, crossings: Crossings | None = None) -> Schedule:
        """This schedule, if it can run.

        Raises:
            ScheduleError: an action is missing, there twice, of an unknown kind, chunk or
                microbatch, or on a rank that does not own its chunk; one backward is both B and I
                or W; or ranks wait for each other for ever. The message names the actions.
        """
        self.timeline(crossings=crossings)
        return self

    def timeline(
        self,
        cost: Cost = UNIT,
        message: MessageTime = 0.0,
        crossings: Crossings | None = None,
        returning: Crossings | None = None,
    ) -> Timeline:
        """When each action runs, if every rank acts in its order and as soon as it can.

        Args:
            cost: how long an action takes: by kind, or a function of (kind, microbatch, chunk). By
                default forward, I and W take 1 and B takes 2, of every chunk.
            message: how long a value takes from rank to rank: a number, or a function of the chunks
                (from, to). Messages keep no rank busy and do not delay each other.
            crossings: pairs (from chunk, to chunk) of chunks that use each other's values. By
                default each chunk uses those of the one before it.
            returning: the crossings over which gradients come back, by default all.

        Returns:
            start and end of each action, in an order in which nothing comes before what it needs.

        Raises:
            ScheduleError: as :meth:`check`.
        """
        depends = self.dependencies(crossings, returning)
        return timeline(self.rank_of, self.actions, depends, cost, message)

    def makespan(self, cost: Cost = UNIT, message: MessageTime = 0.0) -> float:
        """When the last action ends."""
        return max(end for _, end in self.timeline(cost, message).values())

    def bubble(self, cost: Cost = UNIT, message: MessageTime = 0.0) -> float:
        """The part of the ranks' time, from the first start to the last end, that is idle."""
        when = self.timeline(cost, message).values()
        whole = max(end for _, end in when) * self.ranks
        return 1 - sum(end - start for start, end in when) / whole if whole else 0.0

    def in_flight(self, between: float = 1.0) -> tuple[float, ...]:
        """The most that each rank holds for backward at once, in shares.

        One share is what a rank keeps of one microbatch if every rank owns as many chunks as the
        others: a chunk counts as the number of ranks over that of chunks. It is held from F until
        B or W is over.

        Args:
            between: how much of a chunk's part is held between I and W. With 1 the activations are
                held until W. Gradients that I keeps for W come on top: with 1.5 they take half as
                much as the activations. It is less than 1 where I frees more than it keeps.

        Raises:
            TypeError: it is no number.
        """
        given: object = between
        if not isinstance(given, Real):
            raise TypeError(f"between={between!r}: expected a number, what is held from I to W.")
        share = self.ranks / self.chunks
        change = {"F": 1.0, "B": -1.0, "I": between - 1.0, "W": -between}
        peaks = []
        for row in self.actions:
            held = peak = 0.0
            for action in row:
                held += change[action.kind]
                peak = max(peak, held)
            peaks.append(peak * share)
        return tuple(peaks)

    def picture(self, cost: Cost = UNIT, message: MessageTime = 0.0) -> str:
        """A line of text for each rank. Time runs to the right, and dots are idle.

        ``F3`` is forward of microbatch 3. Where ranks own several chunks, ``F3a`` is of the first
        chunk that the rank owns and ``F3b`` of its second.

        >>> from zfunc.schedules.in_turn import one_f_one_b
        >>> print(one_f_one_b(2, 3).picture())
        rank 0 |F0-F1-......B0----F2-B1----...B2----
        rank 1 |...F0-B0----F1-B1----...F2-B2----...
        """
        return text_picture(self.rank_of, self.actions, self.timeline(cost, message))

    def plot(self, path: str | Path, cost: Cost = UNIT, message: MessageTime = 0.0) -> Path:
        """Draw the timeline to a file: SVG, PNG or what else the name ends in.

        The numbers are those of microbatches. Darker actions are of the second half of the chunks
        that a rank owns.

        Returns:
            The file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        found = self.timeline(cost, message)
        return draw(self.rank_of, self.actions, found, Path(path), self.bubble(cost, message))
