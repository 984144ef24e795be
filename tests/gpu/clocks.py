"""Who has seen what: vector clocks of streams and of the host, and the races that they show.

Each stream, the stream of each communicator and the host is an actor. An actor's clock says up to
which of its steps it knows every other one. A launch knows what the host knows; an event carries
the clock of its stream to whoever waits for it. Two uses of the same bytes, one of them writing,
are a race unless the later actor knows the earlier use. (Mattern, Virtual Time and Global States
of Distributed Systems, 1988.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Actor", "Clock", "Use", "Uses"]

Clock = dict[str, int]


def join(into: Clock, other: Clock) -> None:
    """``into`` knows from now on what ``other`` knows."""
    for name, step in other.items():
        if step > into.get(name, 0):
            into[name] = step


class Actor:
    """Something that works through a queue: a stream, a communicator, the host.

    >>> a, b = Actor("a"), Actor("b")
    >>> first = a.step()
    >>> b.knows("a", first), b.learn(a.clock), b.knows("a", first)
    (False, None, True)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def step(self) -> int:
        """One more thing to do; its number."""
        self.clock[self.name] = number = self.clock.get(self.name, 0) + 1
        return number

    def learn(self, clock: Clock) -> None:
        """What comes next is behind everything that ``clock`` tells of."""
        join(self.clock, clock)

    def knows(self, name: str, step: int) -> bool:
        return name == self.name or self.clock.get(name, 0) >= step

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}>"


@dataclass(slots=True)
class Use:
    """Bytes ``[start, stop)`` were read or written by ``actor`` at its ``step``."""

    start: int
    stop: int
    actor: str
    step: int
    where: str
    writes: bool


@dataclass
class Uses:
    """How a storage has been used, as far as it still matters.

    >>> uses, a, b = Uses(), Actor("a"), Actor("b")
    >>> list(uses.enter(a, a.step(), 0, 8, True, "here"))
    []
    >>> [use.where for use in uses.enter(b, b.step(), 4, 6, False, "there")]
    ['here']
    """

    rows: list[Use] = field(default_factory=list)

    def enter(
        self, actor: Actor, step: int, start: int, stop: int, writes: bool, where: str
    ) -> Iterator[Use]:
        """Note a use; yields the earlier ones that it races with."""
        kept: list[Use] = []
        races: list[Use] = []
        for use in self.rows:
            if use.stop <= start or stop <= use.start:
                kept.append(use)
                continue
            known = actor.knows(use.actor, use.step)
            if (writes or use.writes) and not known:
                races.append(use)
            # What comes behind this use is behind everything that this actor knew.
            inside = start <= use.start and use.stop <= stop
            again = not writes and not use.writes and use.actor == actor.name
            if not (inside and (writes or again)):
                kept.append(use)
        kept.append(Use(start, stop, actor.name, step, where, writes))
        self.rows = kept
        return iter(races)

    def unseen(self, actor: Actor) -> list[Use]:
        """The uses that an actor does not know."""
        return [use for use in self.rows if not actor.knows(use.actor, use.step)]
