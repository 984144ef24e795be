"""The stages of a pipeline of which some are foreseen, and others are like one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zfunc.foresight.clocks import Groups, fit_together, replay_stages
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.rows import StepRow
from zfunc.foresight.timing import Timing

__all__ = ["ForeseenStage", "differing_stages", "times_of_stages"]


@dataclass(frozen=True)
class ForeseenStage:
    """A stage that is foreseen.

    Attributes:
        number: which.
        rows: of a step.
        groups: its ranks along each axis.
    """

    number: int
    rows: Sequence[StepRow]
    groups: Groups

    def as_number(self, number: int, pipe: str) -> ForeseenStage:
        """Another stage that does the same: its neighbours are others."""
        by = number - self.number
        rows = [
            replace(row, peer=row.peer + by) if row.axis == pipe and row.peer >= 0 else row
            for row in self.rows
        ]
        return ForeseenStage(number, rows, self.groups)


def differing_stages(work: Sequence[int]) -> list[int]:
    """Stages of which no two do the same: the first, the last, and each kind between them.

    Args:
        work: of each stage, such as its layers' FLOPs.

    >>> differing_stages([3, 2, 2, 1, 2, 2]), differing_stages([1])
    ([0, 1, 3, 5], [0])
    """
    last = max(len(work) - 1, 0)
    between = {work[k]: k for k in range(last - 1, 0, -1)}  # the first of each kind
    return sorted({0, *between.values(), last})


def times_of_stages(
    given: Sequence[ForeseenStage], work: Sequence[int], cluster: Cluster, pipe: str
) -> list[Timing] | None:
    """How long given stages take beside each other and all others.

    A stage that is not given is like the one between the first and the last with the same work.

    Args:
        given: stages that are foreseen.
        work: of all stages.
        cluster: where.
        pipe: the axis of stages.

    Returns:
        Of each given stage; None if too few are given, or their messages do not fit together.

    Raises:
        DeviceError: the cluster lacks what they need.
    """
    known = {stage.number: stage for stage in given}
    alike = {work[k]: known[k] for k in known if 0 < k < len(work) - 1}
    every = []
    for k, amount in enumerate(work):
        stage = known.get(k) or (alike.get(amount) if 0 < k < len(work) - 1 else None)
        if stage is None:
            return None
        every.append(stage if stage.number == k else stage.as_number(k, pipe))
    if not fit_together([stage.rows for stage in every], pipe):
        return None
    found = replay_stages([(stage.rows, stage.groups) for stage in every], cluster, pipe)
    return [found[stage.number] for stage in given]
