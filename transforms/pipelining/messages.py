"""What stages send each other in one step: known beforehand, so that nothing is asked.

Every stage knows what each other one sends it, and in which order. It posts receives ahead in that
order; whatever it needs next is there as soon as it has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from zfunc.ranks.comm import Group
from zfunc.ranks.control_channel import POSTED_BYTES
from zfunc.ranks.point_to_point import connect, message_bytes, receive, send
from zfunc.ranks.transfers import SENT, TensorSpec
from zfunc.rehearsal.plans import Spec
from zfunc.trees.kinds import kind

__all__ = ["StageMessage", "Wire"]

Key = tuple[Any, ...]
AHEAD = 2  # receives from one stage that are posted before they are needed


@dataclass(frozen=True)
class StageMessage:
    """Some tensors from one stage to another.

    Attributes:
        key: what they are; the same on both.
        source, to: the stages.
        specs: what the tensors look like.
    """

    key: Key
    source: int
    to: int
    specs: tuple[Spec, ...]

    @cached_property  # asked for in every step
    def label(self) -> str:
        """The name in errors and ledgers."""
        what, *where = self.key
        names = {"F": "forward", "B": "backward", "lend": "lend", "back": "return"}
        names["answer"] = "answer"
        return f"{names[what]} {' '.join(map(str, where[:2]))}"

    @cached_property
    def likes(self) -> tuple[TensorSpec, ...]:
        """What the tensors look like where they are received."""
        return tuple(TensorSpec(tuple(spec.shape), spec.dtype) for spec in self.specs)

    @cached_property
    def is_little(self) -> bool:
        """Whether it comes with its header, on a host: to await it takes next to no memory."""
        on_host = kind(self.specs[0].device) == "cpu"
        return on_host and message_bytes(self.likes) <= POSTED_BYTES


class Wire:
    """This stage's messages in one step.

    Args:
        ranks: the stages.
        every: of each stage all that it sends, in order.
        connected: directions in which messages have gone before; more are added.
    """

    def __init__(
        self,
        ranks: Group,
        every: Sequence[Sequence[StageMessage]],
        connected: set[tuple[int, int]],
    ) -> None:
        self.ranks = ranks
        self.sent = {m.key: m for m in every[ranks.rank]}
        self.coming = {
            rank: deque([m for m in row if m.to == ranks.rank])
            for rank, row in enumerate(every)
            if rank != ranks.rank
        }
        self.source_of = {m.key: m.source for row in self.coming.values() for m in row}
        self.posted: dict[Key, Any] = {}
        self.waiting = dict.fromkeys(self.coming, 0)  # how many of those come from each stage
        self.here: dict[Key, list[Tensor]] = {}  # between chunks of this stage
        self.under_way: list[Any] = []
        ways = {(m.source, m.to) for row in every for m in row if m.source != m.to}
        if new := sorted(ways - connected):
            connect(ranks, new)
            connected.update(new)

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Start to send what is to be sent under ``key``; it must not be written to again."""
        message = self.sent[key]
        if message.to == self.ranks.rank:
            self.here[key] = [x.detach() for x in tensors]
            return
        handle = send(self.ranks, tensors, message.to, label=message.label)
        sent, self.under_way = self.under_way, []
        if handle is not SENT:
            sent.append(handle)
        for handle in sent:  # what has left is not held until the end of the step
            if handle.done:
                handle.wait()  # at once, and raises where its receiver is gone
            else:
                self.under_way.append(handle)

    def receive(self, key: Key) -> list[Tensor]:
        """What was sent under ``key``."""
        if key in self.here:
            return self.here.pop(key)
        source = self.source_of[key]
        while key not in self.posted:
            self._post(source)
        self.waiting[source] -= 1
        for other, coming in self.coming.items():  # now there is time: most stages wait here first
            while coming and coming[0].is_little:
                self._post(other)
        found: list[Tensor] = self.posted.pop(key).wait()
        return found

    def post_ahead(self) -> None:
        """Post the next receives of each stage."""
        for source, coming in self.coming.items():
            while coming and self.waiting[source] < AHEAD:
                self._post(source)

    def post_all(self) -> None:
        """Post all receives that are left."""
        for source, coming in self.coming.items():
            while coming:
                self._post(source)

    def _post(self, source: int) -> None:
        message = self.coming[source].popleft()
        device = message.specs[0].device
        handle = receive(self.ranks, message.likes, source, device=device, label=message.label)
        self.posted[message.key] = handle
        self.waiting[source] += 1

    def finish(self) -> None:
        """Wait until all that was sent has been taken."""
        for handle in self.under_way:
            handle.wait()
        self.under_way.clear()
