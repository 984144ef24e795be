"""The compressed mean of a buffer over the ranks, in the two phases of its publication.

1. Every rank packs each rank's part of its numbers plus its own error, and sends it there.
2. The owner of a part averages what came, adds its error, packs that, and sends it to all.

What packing leaves out stays in the two errors, and is in the next numbers. All ranks unpack
the same bytes, so all have the same bits. Where parts stay with their owners (ZeRO 1 to 3)
the first phase is all there is.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.comm import Group, Handle
from zfunc.worlds.routes import all_gather_bytes

__all__ = ["Codec", "Gathered", "Scattered", "phase_bytes"]


class Codec(Protocol):
    """How numbers become bytes, and what that leaves out.

    ``freezes`` says whether so little is left that second moments learn nothing from it.
    """

    @property
    def freezes(self) -> bool: ...

    def nbytes(self, n: int, dtype: torch.dtype) -> int: ...

    def pack_(self, x: Tensor, error: Tensor) -> Tensor: ...

    def mean_(self, received: Any, error: Tensor) -> Tensor: ...

    def unpack(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor: ...

    def unpack_(self, data: Tensor, out: Tensor) -> None: ...


class Scattered:
    """The first phase: this rank's part of the mean.

    Args:
        x: dense 1-D buffer; not needed any more when this returns.
        cuts: which part of it belongs to which rank.
        error: this rank's error, like ``x`` at least in float32; overwritten by the new one.
        label: names the collective.
    """

    def __init__(
        self,
        group: Group,
        codec: Codec,
        x: Tensor,
        cuts: tuple[int, ...],
        error: Tensor,
        label: str,
    ) -> None:
        self.group, self.codec, self.cuts, self.error = group, codec, cuts, error
        self.dtype = x.dtype
        parts = [codec.pack_(x[a:b], error[a:b]) for a, b in pairwise(cuts)]
        self._handle: Handle[list[Tensor]] = group.all_to_all(parts, label=label)
        self._mean: Tensor | None = None

    @property
    def received(self) -> list[Tensor]:
        """What came from each rank; waits for it."""
        return self._handle.wait()

    def wait(self) -> Tensor:
        """This rank's part, of the dtype of ``x``."""
        if self._mean is None:
            n = self.cuts[self.group.rank + 1] - self.cuts[self.group.rank]
            rows = self.codec.unpack(torch.stack(self.received), n, self.error.dtype)
            self._mean = rows.mean(0).to(self.dtype)
        return self._mean


class Gathered:
    """The second phase: the whole mean.

    Args:
        first: the first phase.
        error: of this rank's part, as an owner; overwritten by the new one.
        label: names the collective.
    """

    def __init__(self, first: Scattered, error: Tensor, label: str) -> None:
        self.first = first
        packed = first.codec.mean_(first.received, error)
        sizes = [first.codec.nbytes(b - a, error.dtype) for a, b in pairwise(first.cuts)]
        self._cuts = (0, *accumulate(sizes))
        full = packed.new_empty(self._cuts[-1])
        self._handle = first.group.all_gather(full, packed, cuts=self._cuts, label=label)

    def write(self, out: Tensor) -> None:
        """Fill the 1-D ``out``, as long as ``x`` was, with the mean."""
        data, first = self._handle.wait(), self.first
        for (a, b), (low, high) in zip(pairwise(first.cuts), pairwise(self._cuts), strict=True):
            first.codec.unpack_(data[low:high], out[a:b])


def phase_bytes(
    codec: Codec, cuts: tuple[int, ...], dtype: torch.dtype, rank: int
) -> tuple[int, int]:
    """Bytes that ``rank`` sends in each phase.

    >>> from zfunc.transforms.onebit import OneBit
    >>> phase_bytes(OneBit(), (0, 4096, 8192), torch.float32, 0)
    (520, 520)
    """
    sizes = [codec.nbytes(b - a, dtype) for a, b in pairwise(cuts)]
    gathered = all_gather_bytes((0, *accumulate(sizes)), 1, rank, len(sizes))
    return sum(sizes) - sizes[rank], gathered
