"""Which messages a schedule sends, in one order for all ranks, and what each rank posts when.

A transport that matches messages by their order alone, as NCCL does, needs the order to be the same
on both sides. Here all messages of a step have one order, which the timeline gives. Every rank
posts its own in that order, and so the first one that is not over can always go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zfunc.errors import ScheduleError
from zfunc.schedules.actions import UNIT, Action, Cost, Crossings, MessageTime
from zfunc.schedules.pipeline_schedule import Schedule

__all__ = ["Message", "PlannedAction", "messages", "programs"]


class Message(NamedTuple):
    """What one chunk gives another one on another rank, for one microbatch.

    Attributes:
        kind: ``"forward"`` for values, ``"backward"`` for their gradients.
        microbatch: which one.
        source, target: the chunks it goes from and to. Backward they are those of forward, the
            other way round.
        sender, receiver: their ranks.
    """

    kind: str
    microbatch: int
    source: int
    target: int
    sender: int
    receiver: int


class PlannedAction(NamedTuple):
    """An action of a rank, and the messages around it.

    Attributes:
        action: what the rank does.
        posts: receives to post before it, in this order. Some are needed by a later action only.
        needs: messages that must have arrived before it.
        sends: what leaves behind it, in this order.
    """

    action: Action
    posts: tuple[Message, ...]
    needs: tuple[Message, ...]
    sends: tuple[Message, ...]


def messages(
    schedule: Schedule,
    cost: Cost = UNIT,
    message: MessageTime = 0.0,
    crossings: Crossings | None = None,
    returning: Crossings | None = None,
) -> tuple[Message, ...]:
    """Every message of a step, in the order in which it can leave.

    The same arguments give the same order on every rank. The costs may be wrong: with every order
    that they lead to the step ends. What stays on a rank is no message.

    Args:
        schedule: what each rank does.
        cost, message: how long actions and messages take, as for :meth:`Schedule.timeline`.
        crossings: pairs (from chunk, to chunk) of chunks that use each other's values. By default
            each chunk uses those of the one before it.
        returning: the crossings over which gradients come back, by default all.

    Raises:
        ScheduleError: the schedule or a crossing is wrong.

    >>> from zfunc.schedules.in_turn import gpipe
    >>> for found in messages(gpipe(2, 1)):
    ...     print(*found)
    forward 0 0 1 0 1
    backward 0 1 0 1 0
    """
    return tuple(m for m, _, _ in _sent(schedule, cost, message, crossings, returning))


def programs(
    schedule: Schedule,
    cost: Cost = UNIT,
    message: MessageTime = 0.0,
    crossings: Crossings | None = None,
    returning: Crossings | None = None,
    ahead: int = 1,
) -> tuple[tuple[PlannedAction, ...], ...]:
    """What each rank does, with what it posts before, waits for, and sends behind each action.

    The posts and sends of a rank, one action after the other, are its part of :func:`messages`, in
    that order.

    Args:
        ahead: how many actions before the one that needs it a receive may be posted. Its buffer is
            there as long. A receive is posted still earlier where the one order of messages has it
            before something that the rank sends, and later where it has it behind.

    Raises:
        ScheduleError: as :func:`messages`, or ``ahead`` is negative.

    >>> from zfunc.schedules.in_turn import one_f_one_b
    >>> for planned in programs(one_f_one_b(2, 2), ahead=0)[1]:
    ...     print(planned.action, len(planned.posts), len(planned.needs), len(planned.sends))
    F(microbatch 0, chunk 1) 1 1 0
    B(microbatch 0, chunk 1) 1 0 1
    F(microbatch 1, chunk 1) 0 1 0
    B(microbatch 1, chunk 1) 0 0 1
    """
    if ahead < 0:
        raise ScheduleError(f"ahead is {ahead}, and must be 0 at least")
    sent = _sent(schedule, cost, message, crossings, returning)
    return tuple(
        _program(rank, row, [x for x in sent if rank in (x[0].sender, x[0].receiver)], ahead)
        for rank, row in enumerate(schedule.actions)
    )


_Sent = tuple[Message, Action, Action]  # with the action that makes it and the one that needs it


def _sent(
    schedule: Schedule,
    cost: Cost,
    message: MessageTime,
    crossings: Crossings | None,
    returning: Crossings | None,
) -> list[_Sent]:
    """Messages by the end of the action that makes them.

    An action that needs a message begins when the message can leave, or later. So behind a message
    come only messages of actions that are over later, and none that it waits for itself. Actions
    that end together are in the timeline's order, which does not put one before what it needs.
    """
    depends = schedule.dependencies(crossings, returning)
    when = schedule.timeline(cost, message, list(_pairs(depends.sources)), _back(depends.returns))
    rank_of = schedule.rank_of
    found: list[_Sent] = []
    for action in sorted(when, key=lambda a: when[a][1]):  # stable
        kind, i, k = action
        if kind == "W":
            continue
        forward = kind == "F"
        for to in depends.targets[k] if forward else depends.replies[k]:
            if rank_of[to] != rank_of[k]:
                user = Action("F", i, to) if forward else depends.backward(i, to)
                name = "forward" if forward else "backward"
                found.append((Message(name, i, k, to, rank_of[k], rank_of[to]), action, user))
    return found


def _pairs(sources: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(a, k) for k, row in enumerate(sources) for a in row]


def _back(returns: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(k, b) for k, row in enumerate(returns) for b in row]


def _program(
    rank: int, row: Sequence[Action], sent: Sequence[_Sent], ahead: int
) -> tuple[PlannedAction, ...]:
    """A rank's actions with its messages, which come in the order of all messages."""
    place = {action: n for n, action in enumerate(row)}
    posts: list[list[Message]] = [[] for _ in row]
    needs: list[list[Message]] = [[] for _ in row]
    sends: list[list[Message]] = [[] for _ in row]
    latest = _latest(rank, place, sent)
    earliest = 0  # behind the last send
    for n, (found, _, user) in zip(latest, sent, strict=True):
        if found.sender == rank:
            sends[n].append(found)
            earliest = n + 1
        else:
            posts[max(earliest, n - ahead)].append(found)
            needs[place[user]].append(found)
    return tuple(
        PlannedAction(a, tuple(p), tuple(n), tuple(s))
        for a, p, n, s in zip(row, posts, needs, sends, strict=True)
    )


def _latest(rank: int, place: dict[Action, int], sent: Sequence[_Sent]) -> list[int]:
    """The action at which each message of a rank must be posted: nothing behind it comes before."""
    found: list[int] = []
    bound = len(place)
    for message, maker, user in reversed(sent):
        bound = min(bound, place[maker if message.sender == rank else user])
        found.append(bound)
    return found[::-1]
