"""Messages between processes on CPU tensors: beside their headers, or over sockets of their own.

A header goes over the control channel, in an order of its own for each direction. What is small
goes with it. Between ranks of one host the rest is copied into the sender's outbox, and nobody
waits. What the outbox is not for goes over a socket, straight from the sender's tensors to those of
the receiver, which are there from when the receive was posted: threads move it while both ranks
compute (``zfunc.ranks.data_sockets``). Collectives have nothing to do with these sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from ctypes import memmove, string_at
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from socket import socket

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks.control_channel import POSTED_BYTES, ControlChannel, Payload
from zfunc.ranks.data_sockets import Incoming, Load, Outgoing, call_peer
from zfunc.ranks.digests import as_bytes
from zfunc.ranks.shared_memory import Posted, spread, unfilled
from zfunc.ranks.transfers import Complete, Direction, TensorSpec, Transfer
from zfunc.ranks.transport import Collective, Messages, mismatch, told

__all__ = ["HostMessages"]

CPU = torch.device("cpu")
NBYTES = attrgetter("nbytes")
SHARED_BYTES = 2**24  # of a message that goes through the outbox: a copy lasts until it is read

Lost = Callable[[Collective, int, Exception], DesyncError]


class HostMessages(Messages):
    """The messages of one rank of a group.

    Args:
        rank: this rank in the group.
        members: the group's ranks in the world.
        channel: the group's.
        store: known to the group alone; ranks find each other's sockets by it.
        direct: whether messages may go with their headers; not in a large group, where a rank may
            wait for gloo while others write to it.
        lost: the error for a peer that is gone or silent.
        timeout: seconds to connect.
    """

    def __init__(
        self,
        rank: int,
        members: tuple[int, ...],
        channel: ControlChannel,
        store: Store,
        direct: bool,
        lost: Lost,
        timeout: float,
    ) -> None:
        self._rank, self._members, self._channel, self._store = rank, members, channel, store
        self._direct, self._lost, self._timeout = direct, lost, timeout
        # Of a payload that never goes another way than with its header.
        self._posted_bytes = POSTED_BYTES if direct else -1
        self.copy = channel.fill  # what a peer has sent along, to where it belongs
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: Incoming | None = None
        self._under_way: list[SocketMessage] = []

    def connect(self, directions: Sequence[Direction]) -> None:
        return

    def finish(self) -> None:
        for message in self._under_way:
            # Of a copy nobody waits to hear, as of what is in the outbox, whether it was read.
            with suppress(DesyncError) if message.copied else nullcontext():
                message.wait()

    def send(self, call: Collective, peer: int, parts: Sequence[Tensor]) -> Transfer[None]:
        for x in parts:
            if not x.is_cpu:
                raise _misplaced(call, x.device)
        sizes, places = list(map(NBYTES, parts)), list(map(Tensor.data_ptr, parts))
        nbytes = sum(sizes)
        if nbytes <= self._posted_bytes and all(places):  # views would cost more than a copy
            self.announce(call, peer, nbytes, list(map(string_at, places, sizes)))
            return Complete()
        pieces = list(map(as_bytes, filter(Tensor.numel, parts)))
        along = self._goes_along(call, peer, nbytes)
        if self.announce(call, peer, nbytes, pieces if along else ()) or not pieces:
            return Complete()
        if along:  # the outbox is full, or the peer does not read it yet
            pieces = [memoryview(bytearray(piece)) for piece in pieces]
        message = SocketMessage(self, call, peer, Load(call.number, pieces), copied=along)
        self._to(peer).put(message.load)
        self._under_way = [other for other in (*self._under_way, message) if not other.is_over()]
        return Complete() if along else message

    def receive(
        self, call: Collective, peer: int, specs: Sequence[TensorSpec], device: torch.device
    ) -> Transfer[list[Tensor]]:
        if specs and device.type != "cpu":
            raise _misplaced(call, device)
        nbytes = sum(map(NBYTES, specs))
        coming = Coming(self, call, peer, specs, nbytes)
        self.expect(call, peer)
        if nbytes and nbytes > self._posted_bytes:
            coming.post(not self._goes_along(call, peer, nbytes))
        else:
            coming.make()
        return coming

    def announce(
        self, call: Collective, peer: int, nbytes: int, pieces: Sequence[bytes | memoryview] = ()
    ) -> bool:
        """Send a header; whether the payload could go with it, if it was to."""
        try:
            return self._channel.send_message(peer, call.digest, told, nbytes, pieces)
        except OSError as error:
            raise self.gone(call, peer, error) from error

    def expect(self, call: Collective, peer: int) -> None:
        """Make sure that the peer hears of it if this rank fails."""
        try:
            self._channel.expect(peer)
        except OSError as error:
            raise self.gone(call, peer, error) from error

    def has_come(self, call: Collective, peer: int) -> bool:
        """Whether a message's header is there; this waits for nothing."""
        return self._channel.has_message(peer, call.number)

    def take(self, call: Collective, peer: int) -> Payload:
        """Wait for a message's header, check it, and take what came with it.

        Raises:
            DesyncError: the peer sends another message, is silent or gone.
        """
        try:
            digest, payload = self._channel.take_message(peer, call.number)
        except OSError as error:
            raise self.gone(call, peer, error) from error
        if digest != call.digest:
            theirs = self._channel.name_of(peer, digest) or told(digest)
            raise mismatch(call, self._members[peer], theirs)
        return payload

    def land(self, call: Collective, peer: int, load: Load) -> None:
        """Wait for a socket, and read what the others write meanwhile."""
        try:
            self._channel.wait_until(peer, lambda: load.over)
        except OSError as error:
            raise self.gone(call, peer, error) from error
        if load.error is not None:
            raise self.gone(call, peer, load.error) from load.error

    def come(self, peer: int, load: Load) -> None:
        """Say where a payload belongs, in case it comes over a socket."""
        if self._incoming is None:
            self._incoming = Incoming(self._channel.waker())
        self._incoming.expect(peer, load)

    def listen(self) -> None:
        """Let peers connect."""
        assert self._incoming is not None
        if (address := self._incoming.open()) is not None:
            self._store.set(f"data/{self._rank}", address)

    def came(self, peer: int, load: Load) -> None:
        """Its message is complete."""
        if self._incoming is not None:
            self._incoming.forget(peer, load)

    def close(self) -> None:
        """End what is under way; the channel is still there."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        if self._incoming is not None:
            self._incoming.close()

    def _to(self, peer: int) -> Outgoing:
        if peer not in self._outgoing:
            connect = partial(self._connected, self._channel.host_of(peer), peer)
            self._outgoing[peer] = Outgoing(connect, self._channel.waker())
        return self._outgoing[peer]

    def _connected(self, host: str, peer: int, outgoing: Outgoing) -> socket | None:
        """A socket to a peer, once that listens. In a thread.

        Not in the store's wait: that would keep this rank's other threads from the store.
        """
        pause = 0.001
        while not self._store.check([f"data/{peer}"]):
            if outgoing.closed:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)  # one store answers all ranks
        address = bytes(self._store.get(f"data/{peer}")).decode()
        return call_peer(host, address, self._rank, self._timeout)

    def _goes_along(self, call: Collective, peer: int, nbytes: int) -> bool:
        """Whether a payload is meant to go with its header; both ranks say the same."""
        if nbytes <= self._posted_bytes:
            return True
        if not self._direct or nbytes > SHARED_BYTES:
            return False
        try:
            return self._channel.shares_memory(peer)
        except OSError as error:
            raise self.gone(call, peer, error) from error

    def gone(self, call: Collective, peer: int, error: Exception) -> DesyncError:
        if (why := self._channel.why_stopped(peer)) is not None:
            return DesyncError(f"{call}: rank {self._members[peer]} has stopped: {why}")
        return self._lost(call, peer, error)


@dataclass
class SocketMessage(Transfer[None]):
    """A message of this rank that goes over a socket; from a copy, or from its tensors."""

    messages: HostMessages
    call: Collective
    peer: int
    load: Load
    copied: bool

    def is_over(self) -> bool:
        return self.load.over

    def wait(self) -> None:
        self.messages.land(self.call, self.peer, self.load)


class Coming(Transfer[list[Tensor]]):
    """A message to this rank, on whatever way."""

    def __init__(
        self,
        messages: HostMessages,
        call: Collective,
        peer: int,
        specs: Sequence[TensorSpec],
        nbytes: int,
    ) -> None:
        self._messages, self._call, self._peer = messages, call, peer
        self._specs, self._nbytes = specs, nbytes
        self._tensors: list[Tensor] | None = None
        self._load: Load | None = None
        self._straight = False

    def post(self, straight: bool) -> None:
        """Let it come: straight to its tensors over a socket, or on another way if that is free."""
        self._straight = straight
        self._load = Load(self._call.number, self._places() if straight else None)
        self._messages.come(self._peer, self._load)
        if straight:
            self._messages.listen()

    def is_over(self) -> bool:
        if not self._messages.has_come(self._call, self._peer):
            return False
        return self._load is None or self._load.over or not self._straight

    def wait(self) -> list[Tensor]:
        payload = self._messages.take(self._call, self._peer)
        if self._load is None and not isinstance(payload, Posted):
            return self._filled(bytes(payload))
        places, tensors = self._places(), self.make()
        if self._load is not None:
            if not payload:
                self._land(self._load, places)
            self._messages.came(self._peer, self._load)
        if payload:
            self._messages.copy(self._peer, payload, *places)
        return tensors

    def _filled(self, payload: bytes) -> list[Tensor]:
        """The tensors with what is little: copied by address, which is much less than by views."""
        if len(payload) != self._nbytes:
            raise unfilled(len(payload), self._nbytes)
        start, tensors = 0, self.make()
        for x, spec in zip(tensors, self._specs, strict=True):
            if at := x.data_ptr():
                memmove(at, payload[start : start + spec.nbytes], spec.nbytes)
            else:
                as_bytes(x)  # raises where it is no empty tensor, but one without memory
            start += spec.nbytes
        return tensors

    def _land(self, load: Load, places: list[memoryview]) -> None:
        self._messages.listen()
        self._messages.land(self._call, self._peer, load)
        if not self._straight:  # it was meant to come along, and there was no room
            assert load.pieces is not None
            spread(load.pieces[0], places)

    def make(self) -> list[Tensor]:
        """New memory for what comes."""
        if self._tensors is None:
            self._tensors = list(map(TensorSpec.empty, self._specs, repeat(CPU)))
        return self._tensors

    def _places(self) -> list[memoryview]:
        """The memory; without what is empty."""
        return list(map(as_bytes, filter(Tensor.numel, self.make())))


def _misplaced(call: Collective, device: torch.device) -> DeviceError:
    return DeviceError(
        f"{call}: its tensors are on {device}, but this world computes on the CPU: move them "
        "there, or start the ranks with zf.init() where there are GPUs and NCCL"
    )
