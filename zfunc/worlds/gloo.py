"""Collectives on CPU tensors, point to point over gloo.

Gloo's own collectives copy more than they must. Here each rank sends its segments straight from
where they are and receives straight to where they belong: one message per peer, no staging.
Receives are posted before sends, so a message never waits to be asked for.

Messages are tagged with the collective's number and digest, and headers go over sockets beside
them. A rank that took another path sends under other tags: its data are never taken for something
else, and its header tells.

The gloo context is made here, beside the process groups of torch: it needs no other rank to be
made, and connects to a peer when the first message goes there. Beyond ``routes.DIRECT`` ranks
messages go by halving and doubling (``zfunc.worlds.halving``), and only neighbours in a ring check
each other's headers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from zfunc.errors import DesyncError, DeviceError
from zfunc.worlds.halving import Halving
from zfunc.worlds.routes import children, is_direct, neighbours, parent
from zfunc.worlds.transport import (
    Call,
    Hosted,
    Steps,
    elsewhere,
    mismatch,
    missized,
    silence,
    told,
)
from zfunc.worlds.wires import Wires

__all__ = ["Place", "PointToPoint", "lazily_connected"]

PATIENCE = 3.0  # seconds for a peer to say what it is in
SCRATCH_BYTES, WORTH_KEEPING = 64 * 2**20, 2**18
ANY = -1  # a message length that the header alone tells
LAZY = "TORCH_GLOO_LAZY_INIT"

Message = tuple[int, Any]  # the peer concerned and torch's Work
Header = tuple[int, int]  # the peer concerned and the header's ticket


class Scratch:
    """Receive buffers kept for the next reduction: fresh memory costs more than the message.

    The system hands out zeroed pages one fault at a time, some 0.5 ms per MiB in a virtual
    machine, against 0.25 ms to receive as much.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """A 1-D tensor of the shape and dtype of ``like``."""
        sizes = range(like.nbytes, 2 * like.nbytes + 1)
        fitting = [buffer for buffer in self._free if buffer.nbytes in sizes]
        if not fitting:
            return torch.empty_like(like)
        buffer = min(fitting, key=lambda buffer: buffer.nbytes)
        self._free = [other for other in self._free if other is not buffer]
        return buffer[: like.nbytes].view(like.dtype)

    def give(self, part: Tensor) -> None:
        """Take a buffer back; small ones, and the smallest beyond ``SCRATCH_BYTES``, are freed."""
        if part.untyped_storage().nbytes() < WORTH_KEEPING:
            return
        whole = part.new_empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        self._free = sorted([*self._free, whole], key=lambda buffer: -buffer.nbytes)
        while sum(buffer.nbytes for buffer in self._free) > SCRATCH_BYTES:
            self._free.pop()


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a group, and how it finds the others.

    Attributes:
        rank: its index among the members.
        members: the members' ranks in the world.
        store: known to all members, and to no other group.
    """

    rank: int
    members: tuple[int, ...]
    store: Store


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


class PointToPoint(Hosted):
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
        self._wires = _wires(place, timeout)
        self._direct = is_direct(self.size)
        self._met = False  # whether those who get headers have come to a collective with data
        self._unmet: dict[int, list[Header]] = {}  # by collective, until then
        self._halving = Halving(self)

    def close(self) -> None:
        """End the connections of this group; nothing may be under way."""
        self._wires.close()
        self._gloo = None

    def in_rounds(self, data: Tensor | None) -> bool:
        return not self._direct

    def mark(self, call: Call) -> None:
        nothing = [0] * self.size
        self.agree(call, self.announce(call, nothing), nothing)

    def announces_to(self, kind: str, data: Tensor | None) -> int:
        return len(self._peers)

    def all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        if self._direct:
            return self._all_gather(call, full, cuts)
        return self._halving.all_gather(call, full, cuts)

    def _all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        headers = self.announce(call, [own.numel()] * self.size)
        received = [self.receive(call, peer, segments[peer]) for peer in self._peers]
        sent = [self.send(call, peer, own) for peer in self._peers]
        yield
        self.agree(call, headers, [segment.numel() for segment in segments])
        self.finish(call, received + sent)
        return full

    def reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        if self._direct:
            return self._reduce_scatter(call, full, cuts, out)
        return self._halving.reduce_scatter(call, full, cuts, out)

    def _reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        headers = self.announce(call, [segment.numel() for segment in segments])
        out = torch.empty_like(own) if out is None else out
        parts = [self.scratch.take(own) if self._spare(rank) else own for rank in self._all]
        in_place = out.data_ptr() == own.data_ptr()
        parts[self._first] = self.scratch.take(own) if in_place else out
        received = [self.receive(call, peer, parts[peer]) for peer in self._peers]
        sent = [self.send(call, peer, segments[peer]) for peer in self._peers]
        yield
        self.agree(call, headers, [own.numel()] * self.size)
        self.finish(call, received)
        self._sum(parts, out)
        self.finish(call, sent)
        for rank in self._all:
            if self._spare(rank) or (in_place and rank == self._first):
                self.scratch.give(parts[rank])
        return out

    def all_reduce(self, call: Call, flat: Tensor, cuts: Sequence[int] | None) -> Steps[Tensor]:
        if not self._direct:
            return self._halving.all_reduce(call, flat, cuts)
        if cuts is None:
            return self._all_reduce_whole(call, flat)
        return self._all_reduce_segments(call, flat, cuts)

    def _all_reduce_whole(self, call: Call, flat: Tensor) -> Steps[Tensor]:
        headers = self.announce(call, [flat.numel()] * self.size)
        parts = [flat if rank == self.rank else self.scratch.take(flat) for rank in self._all]
        received = [self.receive(call, peer, parts[peer]) for peer in self._peers]
        sent = [self.send(call, peer, flat) for peer in self._peers]
        yield
        self.agree(call, headers, [flat.numel()] * self.size)
        self.finish(call, received + sent)
        self._sum(parts, flat)
        for peer in self._peers:
            self.scratch.give(parts[peer])
        return flat

    def _all_reduce_segments(self, call: Call, flat: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = [flat[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        yield from self._reduce_scatter(call, flat, cuts, own)
        received = [self.receive(call, peer, segments[peer], phase=1) for peer in self._peers]
        sent = [self.send(call, peer, own, phase=1) for peer in self._peers]
        self.finish(call, received + sent)
        return flat

    def all_to_all(
        self, call: Call, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        headers = self.announce(call, [chunk.numel() for chunk in chunks])
        like = chunks[self.rank]
        parts = [like.new_empty(size) for size in sizes]
        parts[self.rank].copy_(like)
        everyone = [(self.rank + step) % self.size for step in range(1, self.size)]
        received = [self.receive(call, peer, parts[peer]) for peer in everyone]
        sent = [self.send(call, peer, chunks[peer]) for peer in everyone]
        yield
        self.agree(call, headers, sizes)
        self.finish(call, received + sent)
        return parts

    def broadcast(self, call: Call, flat: Tensor, src: int) -> Steps[Tensor]:
        headers = self.announce(call, [flat.numel()] * self.size)
        above = parent(self.rank, self.size, src)
        messages = [] if above is None else [self.receive(call, above, flat)]
        below = children(self.rank, self.size, src)
        if above is None:
            messages = [self.send(call, peer, flat) for peer in below]
        yield
        self.agree(call, headers, [flat.numel()] * self.size)
        self.finish(call, messages)
        if above is not None:
            self.finish(call, [self.send(call, peer, flat) for peer in below])
        return flat

    def exchange(self, call: Call, data: bytes) -> Steps[list[bytes]]:
        return self._exchange(call, data) if self._direct else self._halving.exchange(call, data)

    def _exchange(self, call: Call, data: bytes) -> Steps[list[bytes]]:
        headers = self.announce(call, [len(data)] * self.size)
        sent = [self.send(call, peer, _tensor(data)) for peer in self._peers]
        yield
        lengths = self.agree(call, headers, [ANY] * self.size)
        parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        received = [self.receive(call, peer, parts[peer]) for peer in self._peers]
        self.finish(call, received + sent)
        parts[self.rank] = _tensor(data)
        return [part.numpy().tobytes() for part in parts]

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

    def send(self, call: Call, peer: int, data: Tensor, phase: int = 0) -> Message:
        """Start to send ``data``, which must not change before the message is finished."""
        return self._message(self._gloo.send, call, peer, data, phase)

    def receive(self, call: Call, peer: int, into: Tensor, phase: int = 0) -> Message:
        """Start to receive into memory that must not be read before the message is finished."""
        return self._message(self._gloo.recv, call, peer, into, phase)

    def _message(self, start: Any, call: Call, peer: int, data: Tensor, phase: int) -> Message:
        if data.numel() == 0:
            return peer, None
        if data.is_cuda:
            raise DeviceError(
                f"{call}: its tensors are on {data.device}, but this world computes on the CPU "
                "(its process group has no NCCL, or the CPU was asked for). Start with zf.init(), "
                'or with dist.init_process_group("nccl"), or move the state to the CPU'
            )
        if not self._met:
            self._meet(call)
        try:
            return peer, start([data], peer, _tag(call, phase, data.numel()))
        except RuntimeError as error:  # the first message connects
            raise self._lost(call, peer, error) from error

    def _meet(self, call: Call) -> None:
        """Return when connections are not made in vain.

        Gloo connects with the first message, and waits for as long as the timeout where the peer
        has died, or is in a collective that sends this rank nothing. So all headers of the first
        collective with data are compared before. In a large group, where a rank gets headers from
        neighbours only, all say in the store that theirs agree; that is at the first collective.
        """
        for other, ticket in self._unmet.get(call.number, []):
            self._compare(call, other, ticket)
        self._met = True
        self._unmet.clear()
        if not self._direct:
            try:
                self._await_all(call)
            except dist.DistNetworkError as error:
                raise _unreached(error) from error

    def _await_all(self, call: Call) -> None:
        self._store.set(f"met/{self.rank}", "")
        if self._store.add("met", 1) == self.size:
            self._store.set("all met", "")
        deadline, pause = time.monotonic() + self._seconds, 0.01
        while not self._store.check(["all met"]):
            if self._store.check(["cause"]):
                raise elsewhere(self._store.get("cause").decode())
            if time.monotonic() > deadline:
                missing = [k for k in self._all if not self._store.check([f"met/{k}"])]
                raise silence(call, [self._world_ranks[k] for k in missing], self._seconds)
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # one store answers all ranks

    def announce(
        self, call: Call, lengths: Sequence[int], peers: Sequence[int] | None = None
    ) -> list[Header]:
        """Send each peer a header with the length meant for it; theirs are for ``agree``."""
        headers = []
        for peer in self._peers if peers is None else peers:
            try:
                headers.append((peer, self._wires.send(peer, call.digest, lengths[peer])))
            except OSError as error:
                raise self._lost(call, peer, error) from error
        if not self._met:
            self._unmet[call.number] = headers
            if peers is None and not self._direct:
                self._meet(call)
        return headers

    def agree(self, call: Call, headers: list[Header], expected: Sequence[int]) -> list[int]:
        """Check every peer's header; returns the lengths that they tell, by rank."""
        lengths = [0] * self.size
        self._unmet.pop(call.number, None)
        for peer, ticket in headers:
            length = self._compare(call, peer, ticket)
            self._wires.forget(peer, ticket)
            if expected[peer] not in (length, ANY):
                raise missized(call, self._world_ranks[peer], length, expected[peer])
            lengths[peer] = length
        return lengths

    def _compare(self, call: Call, peer: int, ticket: int) -> int:
        """The length that a peer tells, if it is in the same collective."""
        try:
            digest, length = self._wires.receive(peer, ticket)
        except OSError as error:
            raise self._lost(call, peer, error) from error
        if digest != call.digest:
            self._wires.tell(told(call.digest))
            theirs = self._wires.ask(peer, PATIENCE) or told(digest)
            raise mismatch(call, self._world_ranks[peer], theirs)
        return length

    def finish(self, call: Call, messages: Sequence[Message]) -> None:
        """Wait for messages, those of this list in any order."""
        for peer, work in messages:
            if work is None:
                continue
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost(call, peer, error) from error

    def _lost(self, call: Call, peer: int, error: Exception) -> DesyncError:
        rank = self._world_ranks[peer]
        if not self._direct and (cause := self._cause()):
            return elsewhere(cause)
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            return silence(call, [rank], self._seconds)
        return DesyncError(f"{call}: rank {rank} is gone: {error}")

    def leave(self, error: DesyncError) -> None:
        """Tell the peers that listen to this rank why, and the store for those who are none.

        In a large group most ranks wait for partners that are further on the way. They find out
        when a partner's connections end with its process, or by the timeout.
        """
        self._wires.tell(str(error))
        if not self._direct:
            with suppress(RuntimeError):
                here = f"on rank {self._world_ranks[self.rank]}: "
                self._store.compare_set("cause", "", here + str(error))

    def _cause(self) -> str:
        """What another rank of a large group has failed with."""
        deadline = time.monotonic() + min(PATIENCE, self._seconds)
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                if self._store.check(["cause"]):
                    return self._store.get("cause").decode()
            time.sleep(0.05)
        return ""


def _unreached(error: Exception) -> DesyncError:
    return DesyncError(
        "the store through which ranks find each other is gone, and with it the process that "
        f"serves it: rank 0, or torchrun ({error})"
    )


def _wires(place: Place, timeout: float) -> Wires:
    def publish(card: bytes) -> None:
        place.store.set(f"card/{place.rank}", card.hex())

    def card_of(peer: int) -> bytes:
        try:  # the store may be a user's, which waits for as long as that says
            place.store.wait([f"card/{peer}"], timedelta(seconds=timeout))
            return bytes.fromhex(place.store.get(f"card/{peer}").decode())
        except dist.DistNetworkError as error:
            raise _unreached(error) from error
        except RuntimeError as error:
            raise TimeoutError(f"timed out: it has not joined the group ({error})") from error

    return Wires(place.rank, publish, card_of, timeout)


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
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in named] or [
        gloo.create_default_device(lazy_init=True)
    ]
    return gloo(PrefixStore("gloo", place.store), place.rank, len(place.members), options)


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tag(call: Call, phase: int, numel: int) -> int:
    """31 bits: 14 of the number, 16 of the digest and the size, 1 of the phase.

    The size is there since gloo ends the process of a rank to which more is sent than it expects.
    """
    return (call.number & 0x3FFF) << 17 | (1 + (call.digest + numel) % 65534) << 1 | phase
