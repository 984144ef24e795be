"""Buffers that come back: memory for gathered parameters and gradients on their way out.

The system hands out fresh pages one fault at a time, which on a CPU costs more than
filling them. A buffer is free again when nothing but the pool refers to its storage,
so whoever took it need not give it back, and a view that somebody kept is safe. On
other devices torch's own allocator does this already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfunc.ranks.comm import Group
from zfunc.ranks.world import current
from zfunc.trees.kinds import kind

__all__ = ["Pool", "empty", "pool"]

HOST = torch.device("cpu")
WORTHWHILE = 1 << 20  # bytes; smaller blocks malloc recycles itself
_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private, so perhaps absent


def empty(numel: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Fresh memory: an uninitialised 1-D tensor."""
    return torch.empty(numel, dtype=dtype, device=device)


class Pool:
    """Recycled 1-D buffers of one rank, by their size in bytes."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """An uninitialised 1-D tensor of ``numel`` elements."""
        nbytes = numel * dtype.itemsize
        if nbytes < WORTHWHILE or _use_count is None or kind(device or HOST) != "cpu":
            return empty(numel, dtype, device)
        row = self._buffers.setdefault(nbytes, [])
        buffer = next((x for x in row if _free(x)), None)
        if buffer is None:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            row.append(buffer)
        return buffer.view(dtype)

    def trim(self) -> None:
        """Return the memory of all buffers that are free."""
        for nbytes, row in self._buffers.items():
            self._buffers[nbytes] = [x for x in row if not _free(x)]


def _free(buffer: Tensor) -> bool:
    storage = buffer.untyped_storage()  # a reference of its own, beside the buffer's
    return _use_count is not None and _use_count(storage._cdata) == 2


def pool(ranks: Group | None = None) -> Pool:
    """The pool of the calling rank, which is one of a group's, if that is given."""
    memo = (current() if ranks is None else ranks.world).memo
    if "pool" not in memo:
        memo["pool"] = Pool()
    return memo["pool"]
