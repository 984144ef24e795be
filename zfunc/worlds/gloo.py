"""Collectives on CPU tensors, point to point over gloo.

Gloo's own collectives copy more than they must. Here each rank sends its segments straight from
where they are and receives straight to where they belong: one message per peer, no staging.
Receives are posted before sends, so a message never waits to be asked for.

Messages are tagged with the collective's number and digest, and headers go over sockets beside
them. A rank that took another path sends under other tags: its data are never taken for something
else, and its header tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.worlds.transport import Call, Steps, mismatch, missized, silence, told
from zfunc.worlds.wires import Wires

__all__ = ["PointToPoint"]

PATIENCE = 3.0  # seconds for a peer to say what it is in
SCRATCH_BYTES, WORTH_KEEPING = 64 * 2**20, 2**18
CARD_BYTES = 512
ANY = -1  # a message length that the header alone tells

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


class PointToPoint:
    """The transport over the gloo backend of a process group."""

    def __init__(self, process_group: dist.ProcessGroup, timeout: float) -> None:
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._gloo: Any = process_group._get_backend(torch.device("cpu"))
        self._world_ranks = dist.get_process_group_ranks(process_group)
        self._seconds = timeout
        self._timeout = timedelta(seconds=timeout)
        # Each rank starts with its right neighbour, so that nobody is everybody's first.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._all = range(self.size)
        self._first = 1 if self.rank == 0 else 0  # the first peer in rank order
        self._scratch = Scratch()
        self._wires = Wires(self.rank, self.size, self._introduce, timeout)

    def announces_to(self, kind: str, data: Tensor | None) -> int:
        return self.size - 1

    def all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        headers = self.announce(call, [own.numel()] * self.size)
        received = [self._receive(call, peer, segments[peer]) for peer in self._peers]
        sent = [self._send(call, peer, own) for peer in self._peers]
        yield
        self.agree(call, headers, [segment.numel() for segment in segments])
        self._finish(call, received + sent)
        return full

    def reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        segments = [full[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        headers = self.announce(call, [segment.numel() for segment in segments])
        out = torch.empty_like(own) if out is None else out
        parts = [self._scratch.take(own) if self._spare(rank) else own for rank in self._all]
        in_place = out.data_ptr() == own.data_ptr()
        parts[self._first] = self._scratch.take(own) if in_place else out
        received = [self._receive(call, peer, parts[peer]) for peer in self._peers]
        sent = [self._send(call, peer, segments[peer]) for peer in self._peers]
        yield
        self.agree(call, headers, [own.numel()] * self.size)
        self._finish(call, received)
        self._sum(parts, out)
        self._finish(call, sent)
        for rank in self._all:
            if self._spare(rank) or (in_place and rank == self._first):
                self._scratch.give(parts[rank])
        return out

    def all_reduce(self, call: Call, flat: Tensor, cuts: Sequence[int] | None) -> Steps[Tensor]:
        if cuts is None:
            return self._all_reduce_whole(call, flat)
        return self._all_reduce_segments(call, flat, cuts)

    def _all_reduce_whole(self, call: Call, flat: Tensor) -> Steps[Tensor]:
        headers = self.announce(call, [flat.numel()] * self.size)
        parts = [flat if rank == self.rank else self._scratch.take(flat) for rank in self._all]
        received = [self._receive(call, peer, parts[peer]) for peer in self._peers]
        sent = [self._send(call, peer, flat) for peer in self._peers]
        yield
        self.agree(call, headers, [flat.numel()] * self.size)
        self._finish(call, received + sent)
        self._sum(parts, flat)
        for peer in self._peers:
            self._scratch.give(parts[peer])
        return flat

    def _all_reduce_segments(self, call: Call, flat: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = [flat[start:end] for start, end in pairwise(cuts)]
        own = segments[self.rank]
        yield from self.reduce_scatter(call, flat, cuts, own)
        received = [self._receive(call, peer, segments[peer], phase=1) for peer in self._peers]
        sent = [self._send(call, peer, own, phase=1) for peer in self._peers]
        self._finish(call, received + sent)
        return flat

    def all_to_all(
        self, call: Call, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        headers = self.announce(call, [chunk.numel() for chunk in chunks])
        like = chunks[self.rank]
        parts = [like.new_empty(size) for size in sizes]
        parts[self.rank].copy_(like)
        received = [self._receive(call, peer, parts[peer]) for peer in self._peers]
        sent = [self._send(call, peer, chunks[peer]) for peer in self._peers]
        yield
        self.agree(call, headers, sizes)
        self._finish(call, received + sent)
        return parts

    def broadcast(self, call: Call, flat: Tensor, src: int) -> Steps[Tensor]:
        headers = self.announce(call, [flat.numel()] * self.size)
        if self.rank == src:
            messages = [self._send(call, peer, flat) for peer in self._peers]
        else:
            messages = [self._receive(call, src, flat)]
        yield
        self.agree(call, headers, [flat.numel()] * self.size)
        self._finish(call, messages)
        return flat

    def exchange(self, call: Call, data: bytes) -> Steps[list[bytes]]:
        headers = self.announce(call, [len(data)] * self.size)
        sent = [self._send(call, peer, _tensor(data)) for peer in self._peers]
        yield
        lengths = self.agree(call, headers, [ANY] * self.size)
        parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        received = [self._receive(call, peer, parts[peer]) for peer in self._peers]
        self._finish(call, received + sent)
        parts[self.rank] = _tensor(data)
        return [part.numpy().tobytes() for part in parts]

    def _introduce(self, card: bytes) -> list[bytes]:
        """Exchange cards of the same size for all, before there are wires."""
        call = Call("connect", "", 0, 0)
        cards = [torch.empty(CARD_BYTES, dtype=torch.uint8) for _ in self._all]
        cards[self.rank] = _tensor(card.ljust(CARD_BYTES))
        received = [self._receive(call, peer, cards[peer]) for peer in self._peers]
        sent = [self._send(call, peer, cards[self.rank]) for peer in self._peers]
        self._finish(call, received + sent)
        return [part.numpy().tobytes().rstrip() for part in cards]

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

    def _send(self, call: Call, peer: int, data: Tensor, phase: int = 0) -> Message:
        if data.numel() == 0:
            return peer, None
        return peer, self._gloo.send([data], peer, _tag(call, phase))

    def _receive(self, call: Call, peer: int, into: Tensor, phase: int = 0) -> Message:
        if into.numel() == 0:
            return peer, None
        return peer, self._gloo.recv([into], peer, _tag(call, phase))

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
        return headers

    def agree(self, call: Call, headers: list[Header], expected: Sequence[int]) -> list[int]:
        """Check every peer's header; returns the lengths that they tell, by rank."""
        lengths = [0] * self.size
        for peer, ticket in headers:
            try:
                digest, length = self._wires.receive(peer, ticket)
            except OSError as error:
                raise self._lost(call, peer, error) from error
            if digest != call.digest:
                self._wires.tell(told(call.digest))
                theirs = self._wires.ask(peer, PATIENCE) or told(digest)
                raise mismatch(call, self._world_ranks[peer], theirs)
            if expected[peer] not in (length, ANY):
                raise missized(call, self._world_ranks[peer], length, expected[peer])
            lengths[peer] = length
        return lengths

    def _finish(self, call: Call, messages: Sequence[Message]) -> None:
        for peer, work in messages:
            if work is None:
                continue
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost(call, peer, error) from error

    def _lost(self, call: Call, peer: int, error: Exception) -> DesyncError:
        rank = self._world_ranks[peer]
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            return silence(call, [rank], self._seconds)
        return DesyncError(f"{call}: rank {rank} is gone: {error}")


def _tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tag(call: Call, phase: int) -> int:
    """31 bits: 14 of the number, 16 of the digest, 1 of the phase."""
    return (call.number & 0x3FFF) << 17 | (1 + call.digest % 65534) << 1 | phase
