"""Collectives on GPU tensors: NCCL's own, with the headers beside them over sockets.

Waiting for a native collective only makes the current stream wait, so the host never blocks on
the data. Outside a step it checks its neighbours' headers first: a rank in another collective is
found on the host before its numbers are used. Inside one (``comm.unchecked``) the headers are
checked at the step's end, all of them, so that no host waits for the others meanwhile; a step that
has returned was checked, and one that hangs the device for want of a peer is found by then.

Reductions go through a communicator of their own: collectives of one run in the order of issue,
and the gather that the next layer waits for would stand behind the reduction of the last.
Tensors on the CPU go point to point over gloo.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.ranks.adjacency import neighbours, ring
from zfunc.ranks.device_messages import DeviceMessages, coalesces
from zfunc.ranks.gloo import Header, PointToPoint
from zfunc.ranks.transfers import Direction
from zfunc.ranks.transport import Collective, Steps, Transport

__all__ = ["Native"]

DEVICE_SECONDS = 10.0  # that it gets to end what was agreed on before ranks parted
UNCHECKED = 64  # collectives whose headers may be waiting to be looked at: the sockets hold more


# Renamed in torch 2.13; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native(Transport):
    """The transport over a process group with NCCL for GPUs and gloo for the host.

    Args:
        process_group: moves all but reductions.
        cpu: moves what is on the CPU, and the headers.
        reductions: makes the process group for reductions, when the first is issued.
        late: whether headers may be checked by :meth:`settle` now.
        directions: makes the process group for messages from one rank of the group to another.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        cpu: PointToPoint,
        reductions: Callable[[], dist.ProcessGroup],
        late: Callable[[], bool],
        directions: Callable[[Direction], dist.ProcessGroup],
    ) -> None:
        self.rank, self.size = cpu.rank, cpu.size
        self._pg = process_group
        self._cpu = cpu
        self._late = late
        self._make_reductions = reductions
        self._reductions: dist.ProcessGroup | None = None
        self._aborted = self._cut_short = False
        self._issued = False  # whether anything was since the headers were last checked
        self._checked: torch.cuda.Event | None = None  # behind all that was issued until then
        self._unchecked: deque[Callable[[], Any]] = deque()
        self.messages = DeviceMessages(cpu.messages, cpu.rank, directions, self._check_later)

    def start(self, call: Collective, data: Tensor, args: tuple[Any, ...]) -> Steps[Any]:
        if self.hosted(data):
            return self._cpu.start(call, data, args)
        return super().start(call, data, args)

    def headers_sent(self, kind: str, data: Tensor | None) -> int:
        if self.hosted(data):
            return self._cpu.headers_sent(kind, data)
        return len(self._told(kind))

    def _told(self, kind: str) -> list[int]:
        """Who gets the header of a native collective."""
        # Of an all-to-all each rank gets a length of its own.
        return (neighbours if kind == "all_to_all" else ring)(self.rank, self.size)

    def hosted(self, data: Tensor | None) -> bool:
        return data is None or self._hosts(data)

    def in_rounds(self, data: Tensor | None) -> bool:
        return self.hosted(data) and self._cpu.in_rounds(data)

    def settle(self) -> None:
        self._check(0)
        if self._issued and not torch.cuda.is_current_stream_capturing():
            self._issued = False
            self._checked = self._checked or torch.cuda.Event()
            self._checked.record()

    def mark(self, call: Collective) -> None:
        headers = self._announce(call)
        self._unchecked.append(partial(self._cpu.agree, call, headers, [0] * self.size))
        self._check(1)

    def abort(self) -> bool:
        if not self._aborted:
            self._aborted = True
            self._unchecked.clear()
            self._cut_short = not self._has_arrived()
            for group in (self._pg, self._reductions, *self.messages.communicators):
                if group is not None:
                    with suppress(RuntimeError):  # another error has ended it
                        group.abort()
        return True

    def _has_arrived(self) -> bool:
        """Whether the device has done what all ranks had agreed on before; it gets some time.

        The host may be ahead of it by steps, whose results would end with the communicators.
        """
        deadline = time.monotonic() + DEVICE_SECONDS
        try:
            while self._checked is not None and not self._checked.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # the device has failed
            return False
        return True

    def cut_short(self) -> bool:
        return self._cut_short

    def leave(self, error: DesyncError) -> None:
        self._cpu.leave(error)

    def hang_up(self) -> None:
        self._cpu.hang_up()

    def _hosts(self, data: Tensor) -> bool:
        return not data.is_cuda

    def all_gather(self, call: Collective, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = _segments(full, cuts)
        headers = self._announce(call)
        if _even(cuts):
            own = segments[self.rank]
            works = [_all_gather(full, own, group=self._pg, async_op=True)]
        else:  # NCCL has no gather of uneven segments
            works = self._broadcasts(segments, full.device)
        yield
        self._finish(call, headers, works)
        return full

    def reduce_scatter(
        self, call: Collective, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        headers = self._announce(call)
        segments = _segments(full, cuts)
        longest = max(segment.numel() for segment in segments)
        if not _even(cuts):
            padded = full.new_zeros(self.size, longest)
            for row, segment in zip(padded, segments, strict=True):
                row[: segment.numel()].copy_(segment)
            full = padded.view(-1)
        numel = segments[self.rank].numel()
        into = full.new_empty(longest) if out is None or numel < longest else out
        work = _reduce_scatter(into, full, group=self._reducing(), async_op=True)
        yield
        self._finish(call, headers, [work])
        if numel == longest:
            return into
        return into[:numel].clone() if out is None else out.copy_(into[:numel])

    def all_reduce(self, call: Collective, flat: Tensor) -> Steps[Tensor]:
        headers = self._announce(call)
        works = []
        if flat.numel():
            works.append(dist.all_reduce(flat, group=self._reducing(), async_op=True))
        yield
        self._finish(call, headers, works)
        return flat

    def all_to_all(
        self, call: Collective, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        sent = torch.cat([chunk.view(-1) for chunk in chunks])
        received = sent.new_empty(sum(sizes))
        lengths = [chunk.numel() for chunk in chunks]
        headers = self._cpu.announce(call, lengths, self._told(call.kind))
        work = dist.all_to_all_single(
            received, sent, list(sizes), lengths, group=self._pg, async_op=True
        )
        yield
        self._finish(call, headers, [work], sizes)
        # Copies, so that keeping one chunk does not keep them all.
        return [part.clone() for part in received.split(list(sizes))]

    def broadcast(self, call: Collective, flat: Tensor, src: int) -> Steps[Tensor]:
        headers = self._announce(call)
        work = self._start_broadcast(flat, src)
        yield
        self._finish(call, headers, [work])
        return flat

    def exchange(self, call: Collective, data: bytes) -> Steps[list[bytes]]:
        return self._cpu.exchange(call, data)

    def _reducing(self) -> dist.ProcessGroup:
        """The communicator of reductions; made by all ranks, at their first."""
        if self._reductions is None:
            self._reductions = self._make_reductions()
        return self._reductions

    def _broadcasts(self, segments: Sequence[Tensor], device: torch.device) -> list[Any]:
        """Each segment from its rank; one launch, where the backend can."""
        if not coalesces(self._pg, device):
            return [self._start_broadcast(part, src) for src, part in enumerate(segments)]
        with dist.distributed_c10d._coalescing_manager(
            group=self._pg, device=device, async_ops=True
        ) as work:
            for src, part in enumerate(segments):
                self._start_broadcast(part, src)
        return [work]

    def _start_broadcast(self, flat: Tensor, src: int) -> Any:
        if flat.numel() == 0:
            return None
        return dist.broadcast(flat, group_src=src, group=self._pg, async_op=True)

    def _announce(self, call: Collective) -> list[Header]:
        return self._cpu.announce(call, [0] * self.size, self._told(call.kind))

    def _finish(
        self,
        call: Collective,
        headers: list[Header],
        works: list[Any],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Compare headers on the host, now or later; make the current stream wait for the data."""
        told = lengths or [0] * self.size
        self._check_later(partial(self._cpu.agree, call, headers, told))
        for work in works:
            if work is not None:
                work.wait()

    def _check_later(self, check: Callable[[], Any]) -> None:
        """Compare headers at the end of the step, or now where none is running."""
        self._issued = True
        self._unchecked.append(check)
        self._check(UNCHECKED if self._late() else 0)

    def _check(self, left: int) -> None:
        """Check the oldest headers until so many are left."""
        while len(self._unchecked) > left:
            self._unchecked.popleft()()


def _segments(full: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return [full[start:end] for start, end in pairwise(cuts)]


def _even(cuts: Sequence[int]) -> bool:
    return len({end - start for start, end in pairwise(cuts)}) == 1
