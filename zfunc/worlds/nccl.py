"""Collectives on GPU tensors: NCCL's own, with the headers beside them over gloo.

Waiting for a native collective only makes the current stream wait, so the host never blocks on
the data. It does check its neighbour's header first: a rank in another collective is found on
the host before its numbers are used. Tensors on the CPU go point to point over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zfunc.errors import DesyncError
from zfunc.worlds.gloo import Header, PointToPoint
from zfunc.worlds.transport import Call, Steps

__all__ = ["Native"]


# Renamed in torch 2.13; the older names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """The transport over a process group with NCCL for GPUs and gloo for the host."""

    def __init__(self, process_group: dist.ProcessGroup, cpu: PointToPoint) -> None:
        self.rank, self.size = cpu.rank, cpu.size
        self._pg = process_group
        self._cpu = cpu
        # Ranks in a ring that all agree with their neighbours agree.
        self._ring = sorted({(self.rank - 1) % self.size, (self.rank + 1) % self.size})

    def announces_to(self, kind: str, data: Tensor | None) -> int:
        everyone = data is None or self._hosts(data) or kind == "all_to_all"
        return self.size - 1 if everyone else len(self._ring)

    def _hosts(self, data: Tensor) -> bool:
        return not data.is_cuda

    def all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        if self._hosts(full):
            return self._cpu.all_gather(call, full, cuts)
        return self._all_gather(call, full, cuts)

    def _all_gather(self, call: Call, full: Tensor, cuts: Sequence[int]) -> Steps[Tensor]:
        segments = _segments(full, cuts)
        headers = self._announce(call)
        if _even(cuts):
            own = segments[self.rank]
            works = [_all_gather(full, own, group=self._pg, async_op=True)]
        else:  # NCCL has no gather of uneven segments
            works = [self._start_broadcast(part, src) for src, part in enumerate(segments)]
        yield
        self._finish(call, headers, works)
        return full

    def reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
    ) -> Steps[Tensor]:
        if self._hosts(full):
            return self._cpu.reduce_scatter(call, full, cuts, out)
        return self._reduce_scatter(call, full, cuts, out)

    def _reduce_scatter(
        self, call: Call, full: Tensor, cuts: Sequence[int], out: Tensor | None
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
        work = _reduce_scatter(into, full, group=self._pg, async_op=True)
        yield
        self._finish(call, headers, [work])
        if numel == longest:
            return into
        return into[:numel].clone() if out is None else out.copy_(into[:numel])

    def all_reduce(self, call: Call, flat: Tensor, cuts: Sequence[int] | None) -> Steps[Tensor]:
        if self._hosts(flat):
            return self._cpu.all_reduce(call, flat, cuts)
        return self._all_reduce(call, flat)

    def _all_reduce(self, call: Call, flat: Tensor) -> Steps[Tensor]:
        headers = self._announce(call)
        works = [dist.all_reduce(flat, group=self._pg, async_op=True)] if flat.numel() else []
        yield
        self._finish(call, headers, works)
        return flat

    def all_to_all(
        self, call: Call, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        if self._hosts(chunks[self.rank]):
            return self._cpu.all_to_all(call, chunks, sizes)
        return self._all_to_all(call, chunks, sizes)

    def _all_to_all(
        self, call: Call, chunks: Sequence[Tensor], sizes: Sequence[int]
    ) -> Steps[list[Tensor]]:
        sent = torch.cat([chunk.view(-1) for chunk in chunks])
        received = sent.new_empty(sum(sizes))
        lengths = [chunk.numel() for chunk in chunks]
        # Lengths that do not match would hang the GPU: the host compares them before it starts.
        self._cpu.agree(call, self._cpu.announce(call, lengths), sizes)
        work = dist.all_to_all_single(
            received, sent, list(sizes), lengths, group=self._pg, async_op=True
        )
        yield
        self._finish(call, [], [work])
        # Copies, so that keeping one chunk does not keep them all.
        return [part.clone() for part in received.split(list(sizes))]

    def broadcast(self, call: Call, flat: Tensor, src: int) -> Steps[Tensor]:
        if self._hosts(flat):
            return self._cpu.broadcast(call, flat, src)
        return self._broadcast(call, flat, src)

    def _broadcast(self, call: Call, flat: Tensor, src: int) -> Steps[Tensor]:
        headers = self._announce(call)
        work = self._start_broadcast(flat, src)
        yield
        self._finish(call, headers, [work])
        return flat

    def exchange(self, call: Call, data: bytes) -> Steps[list[bytes]]:
        return self._cpu.exchange(call, data)

    def _start_broadcast(self, flat: Tensor, src: int) -> Any:
        if flat.numel() == 0:
            return None
        return dist.broadcast(flat, group_src=src, group=self._pg, async_op=True)

    def _announce(self, call: Call) -> list[Header]:
        return self._cpu.announce(call, [0] * self.size, self._ring)

    def _finish(self, call: Call, headers: list[Header], works: list[Any]) -> None:
        """Compare headers on the host, then make the current stream wait for the data."""
        try:
            self._cpu.agree(call, headers, [0] * self.size)
        except DesyncError:
            self._pg.abort()  # or the kernels already started would wait for ever
            raise
        for work in works:
            if work is not None:
                work.wait()


def _segments(full: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    return [full[start:end] for start, end in pairwise(cuts)]


def _even(cuts: Sequence[int]) -> bool:
    return len({end - start for start, end in pairwise(cuts)}) == 1
