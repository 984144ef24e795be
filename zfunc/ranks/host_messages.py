"""Messages between processes on CPU tensors: beside their headers, through shared memory, or gloo.

A header goes over the control channel, in an order of its own for each direction. What is small
goes with it. Between ranks of one host the rest is copied into the sender's outbox, and nobody
waits. What the outbox is not for goes over gloo, straight from the sender's tensors to those of the
receiver, which are there from when the receive was posted: gloo's own thread moves it while both
ranks compute.

Gloo's first message to a peer waits for the peer's first. Ranks that send in a circle would wait
for ever, so each message is begun and awaited in a thread of its own, which costs little beside
what it moves. Two ranks have a gloo context of their own for this: nothing here holds up a
collective, and no tag is one of a collective.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks.control_channel import POSTED_BYTES, ControlChannel
from zfunc.ranks.digests import as_bytes
from zfunc.ranks.transfers import Complete, Direction, TensorSpec, Transfer
from zfunc.ranks.transport import Collective, Messages, mismatch, told

__all__ = ["LONG", "SHARED_BYTES", "HostMessages", "Pair"]

SHARED_BYTES = 2**24  # of a message that goes through the outbox: a copy lasts until it is read
TOGETHER_BYTES = 2**20  # of a message up to which gloo gets one piece: it is copied once more
ABORT_SECONDS = 1.0  # for a thread to end that nobody waits for any more
LONG = timedelta(days=3650)  # gloo's patience; a rank's begins when it waits

Lost = Callable[[Collective, int, Exception], DesyncError]


class Flight:
    """One message of gloo, begun and awaited in a thread.

    Args:
        begin: starts it, and returns torch's Work.
        wake: called when it is over.
    """

    def __init__(self, begin: Callable[[], Any], wake: Callable[[], None]) -> None:
        self.over = self._aborted = False
        self.error: Exception | None = None
        self._work: Any = None
        self._thread = threading.Thread(target=self._run, args=(begin, wake), daemon=True)
        self._thread.start()

    def _run(self, begin: Callable[[], Any], wake: Callable[[], None]) -> None:
        try:
            self._work = begin()
            if not self._aborted:
                self._work.wait(LONG)
        except (RuntimeError, OSError) as error:
            self.error = error
        self.over = True
        wake()

    def abort(self) -> None:
        """End the thread, which no interpreter survives that ends before it does.

        Gloo may still use what it was given, and so that is kept.
        """
        self._aborted = True
        if self._work is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._work))
            self._work.abort()
        self._thread.join(ABORT_SECONDS)


class Pair:
    """The gloo context of this rank and a peer, which both make when they first need it.

    Args:
        context: gloo's.
        peer: the peer's rank in it.
        meet: whether the peer has made its own.
    """

    def __init__(self, context: Any, peer: int, meet: Callable[[], bool]) -> None:
        self.context, self._peer, self._meet = context, peer, meet
        self._met = self.closed = False

    def begin(self, kind: str, piece: Tensor, tag: int) -> Any:
        """Start to send or to receive. The first one waits for the peer's first.

        Not in the store's wait: that would keep this rank's other threads from the store.
        """
        pause = 0.001
        while not self._met and not self._meet():
            if self.closed:
                raise ConnectionAbortedError("this rank has hung up")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)  # one store answers all ranks
        self._met = True
        start = self.context.send if kind == "send" else self.context.recv
        return start([piece], self._peer, tag)


class HostMessages(Messages):
    """The messages of one rank of a group.

    Args:
        channel: the group's.
        members: the group's ranks in the world.
        direct: whether messages may go with their headers; not in a large group, where a rank may
            wait for gloo while others write to it.
        pair: makes the gloo context of this rank and a peer.
        lost: the error for a peer that is gone or silent.
    """

    def __init__(
        self,
        channel: ControlChannel,
        members: tuple[int, ...],
        direct: bool,
        pair: Callable[[int], Pair],
        lost: Lost,
    ) -> None:
        self.channel, self._members, self._lost = channel, members, lost
        self._direct, self._pair = direct, pair
        self._pairs: dict[int, Pair] = {}
        self._pieces: Counter[tuple[str, int]] = Counter()  # so far, by direction
        self._flights: list[Flight] = []
        self._sent: list[SentOverGloo] = []

    def connect(self, directions: Sequence[Direction]) -> None:
        return

    def finish(self) -> None:
        for sent in self._sent:
            # Of a copy nobody waits to hear, as of what is in the outbox, whether it was read.
            with suppress(DesyncError) if sent.copied else nullcontext():
                sent.wait()

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        for x in parts:
            _refuse_gpu(call, x.device)
        flat = _bytes_of(parts)
        tags = self._tags(call, peer, [x.nbytes for x in flat])
        nbytes = sum(x.nbytes for x in flat)
        along = self._goes_along(call, peer, nbytes)
        if self.announce(call, peer, nbytes, flat if along else ()) or not flat:
            return Complete()
        copies = along or len(tags) < len(flat)
        if copies:
            flat = [torch.cat(flat)] if len(tags) < len(flat) else [x.clone() for x in flat]
        sent = SentOverGloo(self, call, peer, self.fly(call, peer, flat, tags), copies)
        self._sent = [other for other in (*self._sent, sent) if not other.is_over()]
        return Complete() if copies else sent

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        if specs:
            _refuse_gpu(call, device)
        sizes = [spec.nbytes for spec in specs if spec.nbytes]
        coming = Coming(self, call, peer, specs, self._tags(call, peer, sizes))
        self.expect(call, peer)
        if sizes and not self._goes_along(call, peer, sum(sizes)):
            coming.post()
        return coming

    def announce(
        self, call: Collective, peer: int, nbytes: int, payload: Sequence[Tensor] = ()
    ) -> bool:
        """Send a header; whether the payload could go with it, if it was to."""
        with self._telling_lost(call, peer):
            return self.channel.send_message(
                peer, call.digest, told(call.digest), nbytes, [as_bytes(x) for x in payload]
            )

    def expect(self, call: Collective, peer: int) -> None:
        """Make sure that the peer hears of it if this rank fails."""
        with self._telling_lost(call, peer):
            self.channel.expect(peer)

    def compare(self, call: Collective, peer: int) -> bool:
        """Wait for a message's header, and check it; whether the payload came with it.

        Raises:
            DesyncError: the peer sends another message, is silent or gone.
        """
        with self._telling_lost(call, peer):
            digest, _, along = self.channel.receive_message(peer, call.number)
        if digest != call.digest:
            theirs = self.channel.name_of(peer, digest) or told(digest)
            raise mismatch(call, self._members[peer], theirs)
        return along

    def check(self, call: Collective, peer: int) -> None:
        """Wait for the header of a message that something else moves, and check it."""
        self.compare(call, peer)
        self.channel.take_message(peer, call.number)

    def fly(
        self, call: Collective, peer: int, pieces: Sequence[Tensor], tags: Sequence[int]
    ) -> list[Flight]:
        """Start to send pieces over gloo, or to receive them."""
        if not pieces:
            return []
        if peer not in self._pairs:
            self._pairs[peer] = self._pair(peer)
        pair, wake = self._pairs[peer], self.channel.waker()
        begun = [
            Flight(partial(pair.begin, call.kind, piece, tag), wake)
            for piece, tag in zip(pieces, tags, strict=True)
        ]
        self._flights = [other for other in self._flights if not other.over] + begun
        return begun

    def land(self, call: Collective, peer: int, flights: Sequence[Flight]) -> None:
        """Wait for gloo, and read what the others write meanwhile."""
        with self._telling_lost(call, peer):
            self.channel.wait_until(peer, lambda: all(flight.over for flight in flights))
        for flight in flights:
            if flight.error is not None:
                raise self._lost(call, peer, flight.error) from flight.error

    def close(self) -> None:
        """End the connections. A context in which something is under way is never freed.

        Its destructor may wait for ever (see ``gloo.PointToPoint``).
        """
        left = [flight for flight in self._flights if not flight.over]
        for pair in self._pairs.values():
            pair.closed = True
            if left:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair.context))
        for flight in left:
            flight.abort()
        self._pairs.clear()
        self._flights.clear()

    def _goes_along(self, call: Collective, peer: int, nbytes: int) -> bool:
        """Whether a payload is meant to go with its header; both ranks say the same."""
        if not self._direct or nbytes > SHARED_BYTES:
            return False
        if nbytes <= POSTED_BYTES:
            return True
        with self._telling_lost(call, peer):
            return self.channel.shares_memory(peer)

    def _tags(self, call: Collective, peer: int, sizes: Sequence[int]) -> list[int]:
        """A tag for each piece that gloo gets, if it gets them: 15 bits count, 16 tell what it is.

        Its size is in there, since gloo ends the process of a rank to which more is sent than it
        expects.
        """
        if len(sizes) > 1 and sum(sizes) <= TOGETHER_BYTES:
            sizes = [sum(sizes)]
        first = self._pieces[call.kind, peer]
        self._pieces[call.kind, peer] += len(sizes)
        return [
            (first + i) % 2**15 << 16 | (call.digest + size) % 2**16 for i, size in enumerate(sizes)
        ]

    @contextmanager
    def _telling_lost(self, call: Collective, peer: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if (why := self.channel.why_stopped(peer)) is not None:
                rank = self._members[peer]
                raise DesyncError(f"{call}: rank {rank} has stopped: {why}") from error
            raise self._lost(call, peer, error) from error


@dataclass
class SentOverGloo(Transfer[None]):
    """A message of this rank that gloo moves."""

    messages: HostMessages
    call: Collective
    peer: int
    flights: list[Flight]
    copied: bool

    def is_over(self) -> bool:
        return all(flight.over for flight in self.flights)

    def wait(self) -> None:
        self.messages.land(self.call, self.peer, self.flights)


class Coming(Transfer[list[Tensor]]):
    """A message to this rank, on whatever way."""

    def __init__(
        self,
        messages: HostMessages,
        call: Collective,
        peer: int,
        specs: Sequence[TensorSpec],
        tags: Sequence[int],
    ) -> None:
        self._messages, self._call, self._peer = messages, call, peer
        self._specs, self._tags = specs, tags
        self._tensors: list[Tensor] = []
        self._flat: list[Tensor] = []
        self._together: Tensor | None = None  # what gloo gets in the place of small ones
        self._flights: list[Flight] | None = None

    def post(self) -> None:
        """Let gloo begin."""
        flat = self._allocate()
        if len(self._tags) < len(flat):
            self._together = torch.empty(sum(x.nbytes for x in flat), dtype=torch.uint8)
        pieces = flat if self._together is None else [self._together]
        self._flights = self._messages.fly(self._call, self._peer, pieces, self._tags)

    def is_over(self) -> bool:
        if not self._messages.channel.has_message(self._peer, self._call.number):
            return False
        return self._flights is None or all(flight.over for flight in self._flights)

    def wait(self) -> list[Tensor]:
        along = self._messages.compare(self._call, self._peer)
        into = [as_bytes(x) for x in self._allocate()] if along else []
        if not along:
            self._fly()
        self._messages.channel.take_message(self._peer, self._call.number, into)
        return self._tensors

    def _fly(self) -> None:
        if (
            self._flights is None
        ):  # nothing comes, or it was meant to come along, and there was no room
            self.post()
        assert self._flights is not None
        self._messages.land(self._call, self._peer, self._flights)
        if self._together is not None:
            sizes = [x.nbytes for x in self._flat]
            for x, piece in zip(self._flat, self._together.split(sizes), strict=True):
                x.copy_(piece)

    def _allocate(self) -> list[Tensor]:
        """Memory for what comes, as bytes; without what is empty."""
        if not self._tensors:
            self._tensors = [spec.empty("cpu") for spec in self._specs]
            self._flat = _bytes_of(self._tensors)
        return self._flat


def _bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.view(-1).view(torch.uint8) for x in tensors if x.numel()]


def _refuse_gpu(call: Collective, device: torch.device) -> None:
    if device.type != "cpu":
        raise DeviceError(
            f"{call}: its tensors are on {device}, but this world computes on the CPU: move them "
            "there, or start the ranks with zf.init() where there are GPUs and NCCL"
        )
