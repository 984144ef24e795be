"""Schedules of forward and whole backward: GPipe, 1F1B, interleaved 1F1B."""

from __future__ import annotations

from functools import cache
from itertools import chain

from zfunc.schedules.actions import Action
from zfunc.schedules.checks import as_count
from zfunc.schedules.list_scheduling import ListScheduling, Preference
from zfunc.schedules.pipeline_schedule import Schedule

__all__ = ["gpipe", "interleaved", "one_f_one_b"]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, with one chunk on each rank.

    Of the time (P - 1) / (M + P - 1) is idle, with P ranks and M microbatches, and every rank holds
    all microbatches. (Huang et al., GPipe: Efficient Training of Giant Neural Networks, 2019.)

    Raises:
        ScheduleError: a number is less than 1.

    >>> print(gpipe(2, 2).picture())
    rank 0 |F0-F1-......B0----B1----
    rank 1 |...F0-F1-B0----B1----...
    """
    ranks, microbatches = as_count(ranks, "ranks"), as_count(microbatches, "microbatches")
    return Schedule(
        tuple(range(ranks)),
        microbatches,
        tuple(
            tuple(Action(kind, i, r) for kind in "FB" for i in range(microbatches))
            for r in range(ranks)
        ),
    )


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: as soon as a rank can go backward it does, then one forward, and so on.

    As much is idle as under :func:`gpipe`, and rank r holds P - r microbatches at most.
    (Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019, with the
    flush at the end of a step of Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training,
    2021.)

    Raises:
        ScheduleError: a number is less than 1.

    >>> one_f_one_b(4, 8).in_flight()
    (4.0, 3.0, 2.0, 1.0)
    """
    ranks, microbatches = as_count(ranks, "ranks"), as_count(microbatches, "microbatches")
    return _in_turn(ranks, microbatches, 1)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several chunks on each rank: rank r owns chunks r, P + r, 2P + r and so on.

    Of the time (P - 1) / (vM + P - 1) is idle, with v chunks on each of P ranks, if P divides the
    number M of microbatches. (Narayanan et al., Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM, 2021.) Otherwise it is little more, and no rank holds more than
    it would with the next multiple.

    Args:
        ranks: how many there are.
        microbatches: any number, also less than that of ranks.
        chunks: on each rank.

    Raises:
        ScheduleError: a number is less than 1.

    >>> round(interleaved(4, 8, 2).bubble(), 4), round(interleaved(4, 8, 4).bubble(), 4)
    (0.1579, 0.0857)
    """
    return _interleaved(
        as_count(ranks, "ranks"),
        as_count(microbatches, "microbatches"),
        as_count(chunks, "chunks"),
    )


@cache
def _interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    short = -microbatches % ranks
    whole = _in_turn(ranks, microbatches + short, chunks)
    if not short:
        return whole
    # What is left out was at the beginning: there its absence delays nobody.
    found = _without_first(whole, short)
    bound = 3.0 * (chunks * microbatches + ranks - 1)
    best = found.makespan()
    room = tuple(map(round, (x * chunks for x in whole.in_flight())))
    for prefer in _preferences(ranks):
        if best <= bound:
            break
        listed = ListScheduling(found.rank_of, microbatches, "FB", room, prefer)
        if listed.run() and listed.makespan() < best:
            best = listed.makespan()
            found = Schedule(found.rank_of, microbatches, tuple(map(tuple, listed.rows)))
    return found


def _preferences(ranks: int) -> tuple[Preference, ...]:
    """What has been seen to be best: forward first, later chunks or earlier microbatches first."""
    return (
        lambda kind, i, k: (kind != "F", -k, i),
        lambda kind, i, k: (kind != "F", i, -k),
        lambda kind, i, k: (kind != "F", i // ranks, k, i),
    )


def _without_first(schedule: Schedule, short: int) -> Schedule:
    """The same without its first microbatches: what is left still waits for nobody else."""
    rows = [
        tuple(Action(kind, i - short, k) for kind, i, k in row if i >= short)
        for row in schedule.actions
    ]
    return Schedule(schedule.rank_of, schedule.microbatches - short, tuple(rows))


@cache
def _in_turn(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B where the microbatches divide into groups of as many as ranks, or chunks is 1.

    A group passes a rank's chunks one after the other. Forwards go ahead by as many as it takes
    until the first backward can arrive.
    """
    rows = []
    groups = [range(at, min(at + ranks, microbatches)) for at in range(0, microbatches, ranks)]
    rounds = range(chunks)
    for r in range(ranks):
        f = [Action("F", i, c * ranks + r) for g in groups for c in rounds for i in g]
        b = [Action("B", i, c * ranks + r) for g in groups for c in reversed(rounds) for i in g]
        ahead = (ranks - r - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        ahead = min(ahead, len(f))
        pairs = chain.from_iterable(zip(f[ahead:], b, strict=False))
        rows.append((*f[:ahead], *pairs, *b[len(b) - ahead :]))
    return Schedule(tuple(k % ranks for k in range(ranks * chunks)), microbatches, tuple(rows))
