"""When each action of a schedule runs, and who waits for whom if some never do."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from zfunc.errors import ScheduleError
from zfunc.schedules.actions import (
    Action,
    Cost,
    Dependencies,
    MessageTime,
    checked_time,
    duration,
)

__all__ = ["Timeline", "timeline"]

Timeline = dict[Action, tuple[float, float]]


def timeline(
    rank_of: Sequence[int],
    actions: Sequence[Sequence[Action]],
    depends: Dependencies,
    cost: Cost,
    message: MessageTime = 0.0,
) -> Timeline:
    """Start and end of each action: every rank acts in its order, as soon as it can.

    Args:
        rank_of: the owner of each chunk.
        actions: of each rank, each of them once.
        depends: what each action needs.
        cost: how long actions take.
        message: how long a value takes between ranks, a number or a function of the chunks
            (from, to). A message keeps no rank busy, and several travel at once.

    Returns:
        in an order in which nothing comes before what it needs.

    Raises:
        ScheduleError: ranks wait for ever.
    """
    done: Timeline = {}
    at, free = [0] * len(actions), [0.0] * len(actions)
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(len(actions)))
    while ready:
        r = ready.popleft()
        while at[r] < len(actions[r]):
            action = actions[r][at[r]]
            start = _start(action, free[r], done, depends, rank_of, message)
            if isinstance(start, Action):
                waiting[start].append(r)
                break
            free[r] = start + duration(cost, action)
            done[action] = start, free[r]
            at[r] += 1
            ready.extend(waiting.pop(action, ()))
    if any(a < len(row) for a, row in zip(at, actions, strict=True)):
        raise ScheduleError(_deadlock(at, actions, done, depends, rank_of))
    return done


def _start(
    action: Action,
    start: float,
    done: Timeline,
    depends: Dependencies,
    rank_of: Sequence[int],
    message: MessageTime,
) -> float | Action:
    """When an action can begin, or what it still waits for."""
    for need in depends.needs(action):
        if need not in done:
            return need
        arrived = done[need][1]
        if rank_of[need.chunk] != rank_of[action.chunk]:
            way = need.chunk, action.chunk
            time = message(*way) if callable(message) else message
            arrived += checked_time(time, f"a message from chunk {way[0]} to chunk {way[1]}")
        start = max(start, arrived)
    return start


def _deadlock(
    at: Sequence[int],
    actions: Sequence[Sequence[Action]],
    done: Timeline,
    depends: Dependencies,
    rank_of: Sequence[int],
) -> str:
    told = []
    for rank, (n, row) in enumerate(zip(at, actions, strict=True)):
        if n < len(row):
            need = next(x for x in depends.needs(row[n]) if x not in done)
            owner = rank_of[need.chunk]
            whose = f"rank {owner}'s {need}"
            if owner == rank:
                whose = f"its own {need}, which comes later there"
            told.append(f"rank {rank} stands before {row[n]} and waits for {whose}")
    return f"this schedule waits for ever: {'; '.join(told)}"
