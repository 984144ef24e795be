"""Zero bubble schedules: backward in halves, and gradients of weights where a rank would be idle.

Penghui Qi, Xinyi Wan, Guangxing Huang, Min Lin, Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from collections import deque
from functools import cache

from zfunc.schedules.actions import Action
from zfunc.schedules.checks import as_count
from zfunc.schedules.list_scheduling import ListScheduling, Preference
from zfunc.schedules.pipeline_schedule import Schedule

__all__ = ["zb", "zb_lean", "zbv"]

MESSAGE = 0.1  # of the time of F, to tell orders apart that end at the same time without messages


def zb(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble with one chunk on each rank, and no rank holds more than P microbatches.

    Rank r goes P - r forwards ahead, and its W comes r microbatches behind its I. On the first rank
    they come together, as one B. With P ranks, M microbatches and F, I and W that take 1 each, B 2,
    it ends after 3M + P - 1, or 2M + 2P - 1 if M < P.
    Nothing can end earlier: the last rank starts after P - 1 and has work for 3M. It is also
    through with forward and I of all microbatches after P - 1 + 2M at the earliest, and then I has
    P - 1 ranks to go, and W follows on the first one. So (P - 1) / (3M + P - 1) is idle if M >= P.

    Raises:
        ScheduleError: a number is less than 1.

    >>> round(zb(4, 8).bubble(), 4), zb(4, 8).in_flight()
    (0.1111, (4.0, 4.0, 4.0, 4.0))
    >>> print(zb(2, 3).picture())
    rank 0 |F0-F1-...B0----F2-B1----B2----
    rank 1 |...F0-I0-F1-I1-W0-F2-I2-W1-W2-
    """
    return _zb(as_count(ranks, "ranks"), as_count(microbatches, "microbatches"), False)


def zb_lean(ranks: int, microbatches: int) -> Schedule:
    """:func:`zb` with few halves, where halves cost more than a whole, and one forward more ahead.

    Backward is in halves for the first r - 1 microbatches of rank r and its last P, for which
    another rank waits. It ends as early as ``zb``. Each rank but the last goes one forward further
    ahead, so that messages, and microbatches that take longer, delay it less than 1F1B; so a rank
    holds up to P + 1 microbatches. Gradients are not added in the order of microbatches, so that a
    sum may differ from that of ``zf.accumulate`` in its last bits.

    Raises:
        ScheduleError: a number is less than 1.

    >>> zb_lean(4, 8).bubble() == zb(4, 8).bubble(), zb_lean(4, 8).in_flight()
    (True, (5.0, 4.0, 5.0, 4.0))
    >>> print(zb_lean(2, 4).picture())
    rank 0 |F0-F1-F2-...B0----F3-B1----B2----B3----
    rank 1 |...F0-B0----F1-B1----F2-I2-F3-I3-W2-W3-
    """
    return _zb(as_count(ranks, "ranks"), as_count(microbatches, "microbatches"), True)


@cache
def _zb(ranks: int, microbatches: int, lean: bool) -> Schedule:
    rows = []
    for r in range(ranks):
        f, b, i, w = ([Action(kind, j, r) for j in range(microbatches)] for kind in "FBIW")
        ahead = ranks - r + (lean and r < ranks - 1)
        whole = range(max(r - 1, 0), microbatches - ranks) if lean else range(0)
        row, waiting = f[:ahead], deque[Action]()
        for j in range(microbatches):
            if r == 0 or j in whole:
                row.append(b[j])
            else:
                row.append(i[j])
                waiting.append(w[j])
            if len(waiting) > r:
                row.append(waiting.popleft())
            row += f[ahead + j : ahead + j + 1]
        rows.append((*row, *waiting))
    return Schedule(tuple(range(ranks)), microbatches, tuple(rows))


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Zero bubble with two chunks on each rank: down the ranks, and up again.

    Rank r owns chunks r and 2P - 1 - r, so the first rank has the beginning and the end of a model.
    No rank holds more than 2P chunks, which is what the first one holds under 1F1B. On the last
    rank nearly all of them wait for their W at times. That matters where a layer keeps more for W
    than for I, gradients included: linear layers do, those of a transformer do not.
    Where F, I and W of a chunk take the same time as little is idle as can be,
    (P - 1) / (6M + P - 1), from M = P on.

    Where a rank has a choice it does what needs no message that is sent only then. So no message is
    waited for but on the way in and out, for more microbatches no more than for few, and a schedule
    loses little where F, I and W do not take the same time. Two such orders are tried, and the
    shorter one is kept.

    Raises:
        ScheduleError: a number is less than 1.

    >>> round(zbv(4, 8).bubble(), 4), zbv(4, 8).in_flight()
    (0.0588, (4.0, 4.0, 4.0, 4.0))
    >>> zbv(4, 8).rank_of
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    return _zbv(as_count(ranks, "ranks"), as_count(microbatches, "microbatches"))


@cache
def _zbv(ranks: int, microbatches: int) -> Schedule:
    rank_of = (*range(ranks), *reversed(range(ranks)))
    room, bound = [2 * ranks] * ranks, _zbv_bound(ranks, microbatches)
    found: list[Schedule] = []
    # What has been seen to be best: the time that a chunk is given, and when the way in is over.
    for hop, begin in ((1.0, 3 * ranks), (1.5, 2 * ranks)):
        # On the way in, and on the last one out, there is no time for messages to spare.
        ahead, prefer = (begin, bound - 4 * ranks), _due(2 * ranks, hop)
        listed = ListScheduling(rank_of, microbatches, "FIW", room, prefer, spare=1, ahead=ahead)
        if listed.run():
            found.append(Schedule(rank_of, microbatches, tuple(map(tuple, listed.rows))))
    return min(found, key=lambda plan: (plan.makespan(), plan.makespan(message=MESSAGE)))


def _due(chunks: int, hop: float) -> Preference:
    """What is due first, if a microbatch sets out every 2 units of time and takes ``hop`` for a
    chunk; W of a chunk where there is nothing else to do."""

    def due(kind: str, i: int, k: int) -> tuple[float, ...]:
        way = k if kind == "F" else 2 * chunks - 1 - k
        return kind == "W", 2 * i + hop * way, k

    return due


def _zbv_bound(ranks: int, microbatches: int) -> int:
    """No order of a V ends earlier, if F, I and W take 1.

    The last rank starts after P - 1. The first one has nothing but its first chunk's forwards to do
    until 2P - 1; when it is through with the second chunk's F and I, I passes 2P - 1 chunks more,
    and W follows.
    """
    p, m = ranks, microbatches
    return max(6 * m + p - 1, 5 * m + 2 * p - 1, 2 * m + 4 * p - 1)
