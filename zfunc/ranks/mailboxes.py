"""Messages between ranks of one process: those of a simulated world, and of a rank to itself.

Whoever sends leaves copies, and goes on. The receiver gets those copies, so nothing is shared with
the sender, whose tensors may be overwritten at once. Which message is which follows from numbers,
not from time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.transfers import Direction, TensorSpec, Transfer
from zfunc.ranks.transport import Collective, Messages, announced, mismatch, silence, told
from zfunc.ranks.world import waiting

__all__ = ["Mailboxes", "OwnMessages", "SimulatedMessages"]

Key = tuple[int, tuple[int, ...], int, int, int]  # epoch, members, from, to, number
Absence = Callable[[Collective, tuple[int, ...], int], DesyncError | None]


@dataclass
class Letter:
    """One message, from when the first of its two ranks names it."""

    sent: tuple[Collective, list[Tensor]] | None = None
    awaited: Collective | None = None
    over: threading.Event = field(default_factory=threading.Event)
    unsent: DesyncError | None = None  # what is wrong for who sends it
    unreceived: DesyncError | None = None  # and for who receives it

    def compare(self, source: int, to: int) -> None:
        """Both ranks have named it: it is over."""
        assert self.sent is not None and self.awaited is not None
        mine, theirs = self.awaited, self.sent[0]
        if mine.digest != theirs.digest:
            self.unreceived = mismatch(mine, source, told(theirs.digest))
            self.unsent = mismatch(theirs, to, told(mine.digest))
            self.sent = None
        self.over.set()


class Mailboxes:
    """What is under way in one simulated world.

    Args:
        lock: held around every change, also by the world when ranks leave.
        timeout: seconds to wait for a message.
        absence: why a rank will take no further part in a group; called with the lock.
        busy: whether a rank may need longer than the timeout; called with the lock.
    """

    def __init__(
        self, lock: threading.Lock, timeout: float, absence: Absence, busy: Callable[[], bool]
    ) -> None:
        self._lock, self._timeout, self._absence, self._busy = lock, timeout, absence, busy
        self._letters: dict[Key, Letter] = {}

    def put(self, key: Key, call: Collective, tensors: list[Tensor]) -> Letter:
        """Leave a message."""
        _, members, source, to, _ = key
        with self._lock:
            letter = self._letters.setdefault(key, Letter())
            letter.sent = call, tensors
            if letter.awaited is not None:
                self._letters.pop(key)
                letter.compare(source, to)
            elif (error := self._absence(call, members, to)) is not None:
                self._letters.pop(key)
                letter.unsent = error
        return letter

    def post(self, key: Key, call: Collective) -> Letter:
        """Ask for a message."""
        _, members, source, to, _ = key
        with self._lock:
            letter = self._letters.setdefault(key, Letter())
            letter.awaited = call
            if letter.sent is not None:
                self._letters.pop(key)
                letter.compare(source, to)
            elif (error := self._absence(call, members, source)) is not None:
                self._fail(key, error)
        return letter

    def wait(self, key: Key, letter: Letter) -> list[Tensor]:
        """The message, once it is there."""
        if not letter.over.is_set():
            with waiting():
                while not letter.over.wait(self._timeout):
                    self._time_out(key, letter)
        if letter.unreceived is not None:
            raise letter.unreceived
        assert letter.sent is not None
        return letter.sent[1]

    def _time_out(self, key: Key, letter: Letter) -> None:
        with self._lock:
            if not letter.over.is_set() and letter.awaited is not None and not self._busy():
                letter.unreceived = silence(letter.awaited, [key[2]], self._timeout)
                self._letters.pop(key, None)
                letter.over.set()

    def wake(self, rank: int) -> None:
        """Tell those who wait for a rank that is absent now. The caller holds the lock."""
        for key, letter in list(self._letters.items()):
            _, members, source, _, _ = key
            if source == rank and letter.awaited is not None:
                error = self._absence(letter.awaited, members, rank)
                if error is not None:
                    self._fail(key, error)

    def _fail(self, key: Key, error: DesyncError) -> None:
        letter = self._letters.pop(key)
        letter.unreceived = error
        letter.over.set()

    def clear(self) -> None:
        """Forget what was left in an epoch that is over. The caller holds the lock."""
        self._letters.clear()


@dataclass
class SentLetter(Transfer[None]):
    """A message of this rank, which has left already."""

    letter: Letter

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        if self.letter.unsent is not None:
            raise self.letter.unsent


@dataclass
class AwaitedLetter(Transfer[list[Tensor]]):
    """A message to this rank."""

    boxes: Mailboxes
    key: Key
    letter: Letter

    def is_over(self) -> bool:
        return self.letter.over.is_set()

    def wait(self) -> list[Tensor]:
        return self.boxes.wait(self.key, self.letter)


class SimulatedMessages(Messages):
    """The messages of one rank of a simulated group.

    Args:
        boxes: the world's.
        members: the group's ranks in the world.
        rank: this rank in the world.
        epoch: in which the group was made.
    """

    def __init__(
        self, boxes: Mailboxes, members: tuple[int, ...], rank: int, epoch: Callable[[], int]
    ) -> None:
        self._boxes, self._members, self._rank = boxes, members, rank
        self._now, self._epoch = epoch, epoch()

    def connect(self, directions: Sequence[Direction]) -> None:
        return

    def finish(self) -> None:
        return

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        copies = [x.clone() for x in parts]
        key = self._key(call, self._rank, self._members[peer])
        return SentLetter(self._boxes.put(key, call, copies))

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        key = self._key(call, self._members[peer], self._rank)
        return AwaitedLetter(self._boxes, key, self._boxes.post(key, call))

    def _key(self, call: Collective, source: int, to: int) -> Key:
        if self._now() != self._epoch:
            raise DesyncError(f"{call}: its group was made anew, and nobody waits for it")
        return self._epoch, self._members, source, to, call.number


class OwnMessages:
    """The messages that a rank sends itself."""

    def __init__(self) -> None:
        self._letters: dict[int, Letter] = {}
        self._numbers: Counter[str] = Counter()

    def put(self, label: str, what: tuple[Any, ...], parts: Sequence[Tensor]) -> Transfer[None]:
        """Leave a message: copies of these tensors."""
        call, letter = self._letter("send", label, what)
        with torch.no_grad():
            letter.sent = call, [x.clone() for x in parts]
        self._compare(call, letter)
        return SentLetter(letter)

    def get(self, label: str, what: tuple[Any, ...]) -> Transfer[list[Tensor]]:
        """Ask for the next message."""
        call, letter = self._letter("receive", label, what)
        letter.awaited = call
        self._compare(call, letter)
        return OwnLetter(call, letter)

    def _letter(self, kind: str, label: str, what: tuple[Any, ...]) -> tuple[Collective, Letter]:
        self._numbers[kind] += 1
        number = self._numbers[kind]
        call = Collective(kind, label, announced("message", label, what), number)
        return call, self._letters.setdefault(number, Letter())

    def _compare(self, call: Collective, letter: Letter) -> None:
        if letter.sent is None or letter.awaited is None:
            return
        del self._letters[call.number]
        if letter.sent[0].digest != letter.awaited.digest:
            sent, awaited = told(letter.sent[0].digest), told(letter.awaited.digest)
            error = DesyncError(
                f"{call}: this rank sends itself {sent}, but expects {awaited}. What it sends "
                "itself it has to receive in the same order"
            )
            letter.unsent = letter.unreceived = error
            letter.sent = None
        letter.over.set()


@dataclass
class OwnLetter(Transfer[list[Tensor]]):
    """A message of a rank to itself."""

    call: Collective
    letter: Letter

    def is_over(self) -> bool:
        return True

    def wait(self) -> list[Tensor]:
        if self.letter.unreceived is not None:
            raise self.letter.unreceived
        if self.letter.sent is None:
            raise DesyncError(
                f"{self.call}: this rank waits for a message from itself that it has not sent, "
                "and would wait for ever: send first, then wait"
            )
        return self.letter.sent[1]
