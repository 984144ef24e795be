"""Collectives on CPU tensors, point to point over gloo.

Gloo's own collectives copy more than they must. Here each rank sends its segments straight from
where they are and receives straight to where they belong: one message per peer, no staging.
Receives are posted before sends, so a message never waits to be asked for.

Messages are tagged with the collective's number and digest, and headers go over sockets beside
them, together with what is small: gloo takes longer to begin than that takes to arrive. A rank
that took another path sends under other tags: its data are never taken for something else, and its
header tells.

The gloo context is made here, beside the process groups of torch: it needs no other rank to be
made, and connects to a peer when the first message goes there. What differs beyond
``adjacency.DIRECT`` ranks is in ``zfunc.ranks.halving``.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks.adjacency import is_direct, neighbours
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.control_channel import NOTHING, ControlChannel
from zfunc.ranks.digests import as_bytes
from zfunc.ranks.host_messages import HostMessages
from zfunc.ranks.listening import HERE, loopback_only
from zfunc.ranks.routes import children, goes_whole, parent
from zfunc.ranks.scratch import Scratch
from zfunc.ranks.transport import (
    Collective,
    Steps,
    Transport,
    departed,
    elsewhere,
    mismatch,
    missized,
    silence,
    told,
)

__all__ = ["LOOK", "PATIENCE", "Place", "PointToPoint", "lazily_connected", "unreached"]

PATIENCE = 3.0  # seconds for a peer to say what it is in
LOOK = 0.25  # seconds between two looks whether a rank has come to a group, or ever will
ANY = -1  # a message length that the header alone tells
# What goes with its header, since gloo wakes a thread on either side: so much over a socket, whose
# buffers hold some of these; through shared memory parts that make up so much, as a copy of them
# lasts until it is read. Large ones gain a few per cent of a step, which the copies are not worth.
EAGER_BYTES, SHARED_BYTES = 2**15, 2**21
LAZY = "TORCH_GLOO_LAZY_INIT"

Message = tuple[int, Any]  # the peer concerned and torch's Work
Header = tuple[int, int]  # the peer concerned and the header's ticket


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a group, and how it finds the others.

    Attributes:
        rank: its index among the members.
        members: the members' ranks in the world.
        store: known to all members, and to no other group.
        departures: tells why a rank of the world takes part no longer; nothing if it does.
        stops: the same of one that has given up what all are in, but not left.
    """

    rank: int
    members: tuple[int, ...]
    store: Store
    departures: Callable[[int], str] = lambda rank: ""
    stops: Callable[[int], str] = lambda rank: ""


@dataclass
class Swap:
    """One message to and one from every peer, under way.

    Attributes:
        headers: those that are to come.
        into: where what comes belongs, by rank.
        received, sent: gloo's messages.
    """

    headers: list[Header]
    into: Sequence[Tensor]
    received: list[Message]
    sent: list[Message]


@contextmanager
def lazily_connected() -> Iterator[None]:
    """What torch makes of gloo in this block connects to a peer when it is first needed."""
    before = os.environ.get(LAZY)
    os.environ[LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LAZY]
        else:
            os.environ[LAZY] = before


class PointToPoint(Transport):
    """The transport over gloo between the members of a group.

    Args:
        place: this rank's.
        timeout: seconds to wait for a peer.

    Raises:
        DeviceError: this torch was built without gloo.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.rank = place.rank
        self.size = len(place.members)
        self._store = place.store
        self._world_ranks = place.members
        self._seconds = timeout
        self._timeout = timedelta(seconds=timeout)
        self._gloo: Any = _context(place, self._timeout)
        self._peers = neighbours(self.rank, self.size)
        self._all = range(self.size)
        self._first = 1 if self.rank == 0 else 0  # the first peer in rank order
        self.scratch = Scratch()
        self._channel = _channel(place, timeout)
        self._met: set[int] = set()  # the peers that this rank has exchanged messages with
        self._unmet: dict[int, list[Header]] = {}  # by collective, until it is agreed on
        self._under_way: set[Any] = set()  # gloo's messages that nobody has seen the end of
        self._departures, self._stops = place.departures, place.stops
        self.messages = HostMessages(
            self.rank,
            place.members,
            self._channel,
            place.store,
            is_direct(self.size),
            self._lost,
            timeout,
        )

    def close(self) -> None:
        """End the connections of this group; nothing may be under way."""
        self.messages.close()
        self._channel.close()
        self._gloo = None

    def hang_up(self) -> None:
        self._channel.close()
        self._keep_if_needed()

    def mark(self, call: Collective) -> None:
        nothing = [0] * self.size
        self.agree(call, self.announce(call, nothing), nothing)

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        swap = self._swap(call, [segments[self.rank]] * self.size, segments)
        yield
        self._arrive(call, swap)
        self.finish(call, swap.sent)
        return full

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        out = torch.empty_like(own) if out is None else out
        parts = [self.scratch.take(own) if self._spare(rank) else own for rank in self._all]
        in_place = out.data_ptr() == own.data_ptr()
        parts[self._first] = self.scratch.take(own) if in_place else out
        swap = self._swap(call, segments, parts)
        yield
        self._arrive(call, swap)
        self._sum(parts, out)
        self.finish(call, swap.sent)
        for rank in self._all:
            if self._spare(rank) or (in_place and rank == self._first):
                self.scratch.give(parts[rank])
        return out

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        whole = goes_whole(flat.nbytes, self.size)
        return (self._all_reduce_whole if whole else self._all_reduce_segments)(call, flat)

    def _all_reduce_whole(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        parts = [flat if rank == self.rank else self.scratch.take(flat) for rank in self._all]
        swap = self._swap(call, [flat] * self.size, parts)
        yield
        self._arrive(call, swap)
        self.finish(call, swap.sent)
        self._sum(parts, flat)
        for peer in self._peers:
            self.scratch.give(parts[peer])
        return flat

    def _all_reduce_segments(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        cuts = even_cuts(flat.numel(), self.size)
        segments = [flat[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        yield from self.reduce_scatter(call, flat, cuts, own)
        large = [peer for peer in self._peers if not self._is_small(call, segments[peer], peer)]
        messages = [self.receive(call, peer, segments[peer], phase=1) for peer in large]
        payload, payloads = as_bytes(own), dict[int, memoryview]()
        for peer in self._peers:
            if self._is_small(call, own, peer):
                payloads[peer] = payload
            else:
                messages.append(self.send(call, peer, own, phase=1))
        # No rank waits for gloo, and stops reading, before what it waits for has been sent: others
        # may have to write much to it before they come as far. Hence a second header.
        for peer in self._peers:
            with self._telling_lost(call, peer):
                self._channel.send_note(peer, call.number, payloads.get(peer, NOTHING))
        for peer in self._peers:
            into = NOTHING if peer in large else as_bytes(segments[peer])
            with self._telling_lost(call, peer):
                self._channel.take_note(peer, call.number, into)
        self.finish(call, messages)
        return flat

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        parts = self._parts(chunks, sizes)
        swap = self._swap(call, chunks, parts)
        yield
        self._arrive(call, swap)
        self.finish(call, swap.sent)
        return parts

    def _parts(self, chunks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """New tensors for what comes; this rank's own is there."""
        own = chunks[self.rank]
        parts = [own.new_empty(size) for size in sizes]
        parts[self.rank].copy_(own)
        return parts

    def broadcast(self, call: Collective, flat: Tensor, src: int) -> Steps[Tensor]:
        above, below = parent(self.rank, self.size, src), children(self.rank, self.size, src)
        lengths, beside = [flat.numel()] * self.size, below if above is None else [above]
        direct = is_direct(self.size)  # else some have other neighbours than those they hand on to
        along = {
            peer: as_bytes(flat) for peer in beside if direct and self._is_small(call, flat, peer)
        }
        sent, come = (along, {}) if above is None else ({}, along)
        headers = self.announce(call, lengths, payloads=sent)
        start = self.send if above is None else self.receive
        messages = [start(call, peer, flat) for peer in beside if peer not in along]
        yield
        self._told(call, headers, lengths)
        for peer, ticket in headers:
            self._channel.take(peer, ticket, come.get(peer, NOTHING))
        self.finish(call, messages)
        if above is not None:
            self.finish(call, [self.send(call, peer, flat) for peer in below])
        return flat

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        own = _tensor(data)
        # How much comes is told by the headers: nothing is asked for before.
        swap = self._swap(call, [own] * self.size, ())
        yield
        lengths = self._told(call, swap.headers, [ANY] * self.size)
        parts = [own.new_empty(length) for length in lengths]
        swap.into = parts
        swap.received = self._receive(call, parts)
        self._fill(call, swap)
        self.finish(call, swap.sent)
        parts[self.rank] = own
        return [part.numpy().tobytes() for part in parts]

    def _is_small(self, call: Collective, part: Tensor, peer: int) -> bool:
        """Whether a part goes with the header, from a peer or to it."""
        if part.nbytes <= EAGER_BYTES or part.device.type != "cpu":
            return part.nbytes > 0 and part.device.type == "cpu"
        if part.nbytes * self.size > SHARED_BYTES:
            return False
        with self._telling_lost(call, peer):
            return self._channel.shares_memory(peer)

    def _swap(self, call: Collective, parts: Sequence[Tensor], into: Sequence[Tensor]) -> Swap:
        """Send each peer its part, small ones with their headers; receive into tensors, if any.

        All gloo's messages are under way when this returns: a receive that came with ``wait`` only
        would be waited for by a peer that waits for its collectives in another order.
        """
        payloads: dict[int, memoryview] = {}
        made: dict[int, memoryview] = {}  # by part: most collectives send all peers the same
        for peer in self._peers:
            part = parts[peer]
            if self._is_small(call, part, peer):
                if id(part) not in made:
                    made[id(part)] = as_bytes(part)
                payloads[peer] = made[id(part)]
        headers = self.announce(call, [part.numel() for part in parts], payloads=payloads)
        received = self._receive(call, into) if into else []
        sent = [self.send(call, peer, parts[peer]) for peer in self._peers if peer not in payloads]
        return Swap(headers, into, received, sent)

    def _receive(self, call: Collective, into: Sequence[Tensor]) -> list[Message]:
        """Start to receive what does not come with a header."""
        return [
            self.receive(call, peer, into[peer])
            for peer in self._peers
            if not self._is_small(call, into[peer], peer)
        ]

    def _arrive(self, call: Collective, swap: Swap) -> None:
        """Wait for what the peers send."""
        expected = [part.numel() for part in swap.into]
        self._told(call, swap.headers, expected)
        self._fill(call, swap)

    def _fill(self, call: Collective, swap: Swap) -> None:
        for peer, ticket in swap.headers:
            part = swap.into[peer]
            small = self._is_small(call, part, peer)
            self._channel.take(peer, ticket, as_bytes(part) if small else NOTHING)
        self.finish(call, swap.received)

    def _sum(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Add in rank order; partial sums in the first part received, which may be ``out``.

        ``out`` may also be this rank's own part, since only the last addition writes it.
        """
        total, last = parts[0], len(parts) - 1
        for i, part in enumerate(parts[1:], 1):
            total = torch.add(total, part, out=out if i == last else parts[self._first])

    def _spare(self, rank: int) -> bool:
        """Whether a part from ``rank`` arrives in scratch, not in the result or in place."""
        return rank not in (self.rank, self._first)

    def send(self, call: Collective, peer: int, data: Tensor, phase: int = 0) -> Message:
        """Start to send ``data``, which must not change before the message is finished."""
        return self._message(self._gloo.send, call, peer, data, phase)

    def receive(self, call: Collective, peer: int, into: Tensor, phase: int = 0) -> Message:
        """Start to receive into memory that must not be read before the message is finished."""
        return self._message(self._gloo.recv, call, peer, into, phase)

    def _message(
        self, start: Any, call: Collective, peer: int, data: Tensor, phase: int
    ) -> Message:
        if data.numel() == 0:
            return peer, None
        if data.is_cuda:
            raise DeviceError(
                f"{call}: its tensors are on {data.device}, but this world computes on the CPU "
                "(its process group has no NCCL, or the CPU was asked for). Start with zf.init(), "
                'or with dist.init_process_group("nccl"), or move the state to the CPU'
            )
        if peer not in self._met:
            self._meet(call, peer)
        try:
            work = start([data], peer, _tag(call, phase, data.numel()))
        except RuntimeError as error:  # the first message connects
            raise self._lost(call, peer, error) from error
        self._under_way.add(work)
        return peer, work

    def _meet(self, call: Collective, peer: int) -> None:
        """Return when a connection is not made in vain.

        Gloo connects with the first message to a peer, and waits for as long as the timeout where
        that has died or returned, or is in a collective that sends this rank nothing. So the
        header of a new peer is compared before, and all headers of the first collective.
        """
        for other, ticket in self._unmet.get(call.number, []):
            if other == peer or not self._met:  # later, others may wait for what this rank forwards
                self._compare(call, other, ticket)
        self._met.add(peer)

    def announce(
        self,
        call: Collective,
        lengths: Sequence[int],
        peers: Sequence[int] | None = None,
        payloads: Mapping[int, memoryview] = MappingProxyType({}),
    ) -> list[Header]:
        """Send each peer a header with the length meant for it; theirs are for ``agree``."""
        headers = []
        for peer in self._peers if peers is None else peers:
            payload = payloads.get(peer, NOTHING)
            with self._telling_lost(call, peer):
                ticket = self._channel.send(peer, call.digest, lengths[peer], payload)
            headers.append((peer, ticket))
        self._unmet[call.number] = headers
        return headers

    def agree(self, call: Collective, headers: list[Header], expected: Sequence[int]) -> None:
        """Check every peer's header, with which nothing came."""
        self._told(call, headers, expected)
        for peer, ticket in headers:
            self._channel.take(peer, ticket)

    def _told(self, call: Collective, headers: list[Header], expected: Sequence[int]) -> list[int]:
        """Check every peer's header; the lengths that they tell."""
        lengths = [0] * self.size
        self._unmet.pop(call.number, None)
        for peer, ticket in headers:
            lengths[peer] = length = self._compare(call, peer, ticket)
            if expected[peer] not in (length, ANY):
                raise missized(call, self._world_ranks[peer], length, expected[peer])
        return lengths

    def _compare(self, call: Collective, peer: int, ticket: int) -> int:
        """The length that a peer tells, if it is in the same collective."""
        with self._telling_lost(call, peer):
            digest, length = self._channel.receive(peer, ticket)
        if digest != call.digest:
            self._channel.tell(told(call.digest))
            theirs = self._channel.ask(peer, PATIENCE) or told(digest)
            raise mismatch(call, self._world_ranks[peer], theirs)
        return length

    def finish(self, call: Collective, messages: Sequence[Message]) -> None:
        """Wait for messages, those of this list in any order."""
        for peer, work in messages:
            if work is None:
                continue
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost(call, peer, error) from error
            self._under_way.discard(work)

    @contextmanager
    def _telling_lost(self, call: Collective, peer: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._lost(call, peer, error) from error

    def _lost(self, call: Collective, peer: int, error: Exception) -> DesyncError:
        rank, said = self._world_ranks[peer], self._channel.why_stopped(peer)
        # Of one that has failed, and has then returned, the failure is what helps.
        if said is None and (why := self._departures(rank)):
            return departed(call, rank, why)
        if why := self._stops(rank):
            return elsewhere(f"rank {rank} has stopped: {why}")
        if cause := self._cause():
            return elsewhere(cause)
        if said is not None:
            return DesyncError(f"{call}: rank {rank} is gone: it stopped in {said}")
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            return silence(call, [rank], self._seconds)
        return DesyncError(f"{call}: rank {rank} is gone: {error}")

    def leave(self, error: DesyncError) -> None:
        self._channel.tell(str(error))
        self._keep_if_needed()

    def _keep_if_needed(self) -> None:
        """Never free a context in which messages are under way that will not come.

        Its destructor waits for gloo's thread, and that, now and then, for ever: at the end of the
        process, or whenever the garbage is collected. Others are freed: the thread of each wakes
        a hundred times a second.
        """
        self.messages.close()
        if self._under_way:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _cause(self) -> str:
        """What a rank has failed with that does not tell this one itself; nothing is known."""
        return ""


def unreached(error: Exception) -> DesyncError:
    """The error for a store that does not answer."""
    return DesyncError(
        "the store through which ranks find each other is gone, and with it the process that "
        f"serves it: rank 0, or torchrun ({error})"
    )


def _channel(place: Place, timeout: float) -> ControlChannel:
    def publish(card: bytes) -> None:
        place.store.set(f"card/{place.rank}", card.hex())

    def card_of(peer: int) -> bytes:
        key, pause = f"card/{peer}", 0.001
        deadline = time.monotonic() + timeout
        try:  # not in the store's wait: who has left will never publish one
            while not place.store.check([key]):
                if place.departures(place.members[peer]) or place.stops(place.members[peer]):
                    raise ConnectionResetError("it never joined the group")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out: it has not joined the group")
                time.sleep(pause)
                pause = min(2 * pause, LOOK)  # one store answers all ranks
            return bytes.fromhex(place.store.get(key).decode())
        except dist.DistNetworkError as error:
            raise unreached(error) from error

    return ControlChannel(place.rank, publish, card_of, timeout)


def _context(place: Place, timeout: timedelta) -> Any:
    if not dist.is_gloo_available():
        raise DeviceError(
            "this torch was built without gloo, which zfunc needs between ranks, for NCCL's "
            "headers too: install a build of torch that has it"
        )
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if loopback_only():
        options._devices = [gloo.create_device(hostname=HERE, lazy_init=True)]
    elif named:
        options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in named]
    else:
        options._devices = [gloo.create_default_device(lazy_init=True)]
    return gloo(PrefixStore("gloo", place.store), place.rank, len(place.members), options)


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tag(call: Collective, phase: int, numel: int) -> int:
    """31 bits: 14 of the number, 16 of the digest and the size, 1 of the phase.

    The size is there since gloo ends the process of a rank to which more is sent than it expects.
    """
    return (call.number & 0x3FFF) << 17 | (1 + (call.digest + numel) % 65534) << 1 | phase
