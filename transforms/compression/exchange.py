"""The compressed mean of a buffer over the ranks, in the two phases of its publication.

1. Every rank packs each rank's part of its numbers plus its own error, and sends it there.
2. The owner of a part averages what came, adds its error, packs that, and sends it to all.

What packing leaves out stays in the two errors, and is in the next numbers. All ranks unpack
the same bytes, so all have the same bits. Where parts stay with their owners (ZeRO 1 to 3)
the first phase is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.layout.dense import dense_of
from zfunc.layout.layout import Layout
from zfunc.ranks.comm import Group, Handle

__all__ = ["Codec", "Gathered", "Scattered", "codecs_of"]


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

    def over(self, leaves: Sequence[tuple[int, int, int]]) -> Codec:
        """The same for a buffer of which it is known what leaves lie in it."""
        ...

    def of_momentum(self) -> Codec:
        """What suits momentum as it is."""
        ...


def codecs_of(codec: Codec, layout: Layout, flat: int) -> tuple[Codec, ...]:
    """How each rank's part of a flat's dense buffer becomes bytes."""
    key = ("codecs", codec, flat)
    if key not in layout._memo:
        dense = dense_of(layout, flat)
        parts = range(len(dense.cuts) - 1)
        layout._memo[key] = tuple(codec.over(dense.leaves_of(rank)) for rank in parts)
    codecs: tuple[Codec, ...] = layout._memo[key]
    return codecs


class Scattered:
    """The first phase: this rank's part of the mean.

    Args:
        codec: of all parts of the buffer, or one for each.
        x: dense 1-D buffer; not needed any more when this returns.
        cuts: which part of it belongs to which rank.
        error: this rank's error, like ``x`` at least in float32; overwritten by the new one.
        label: names the collective.
    """

    def __init__(
        self,
        group: Group,
        codec: Codec | Sequence[Codec],
        x: Tensor,
        cuts: tuple[int, ...],
        error: Tensor,
        label: str,
    ) -> None:
        self.group, self.codecs = group, _each(codec, cuts)
        self.cuts, self.error, self.dtype = cuts, error, x.dtype
        rows = zip(self.codecs, pairwise(cuts), strict=True)
        parts = [each.pack_(x[a:b], error[a:b]) for each, (a, b) in rows]
        self._handle: Handle[list[Tensor]] = group.all_to_all(parts, label=label)
        self._mean: Tensor | None = None

    @property
    def codec(self) -> Codec:
        """Of this rank's part."""
        return self.codecs[self.group.rank]

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
        sizes = _sizes(first.codecs, first.cuts, error.dtype)
        self._cuts = (0, *accumulate(sizes))
        full = packed.new_empty(self._cuts[-1])
        self._handle = first.group.all_gather(full, packed, cuts=self._cuts, label=label)

    def write(self, out: Tensor) -> None:
        """Fill the 1-D ``out``, as long as ``x`` was, with the mean."""
        data, first = self._handle.wait(), self.first
        places = zip(first.codecs, pairwise(first.cuts), pairwise(self._cuts), strict=True)
        for codec, (a, b), (low, high) in places:
            codec.unpack_(data[low:high], out[a:b])


def _each(codec: Codec | Sequence[Codec], cuts: tuple[int, ...]) -> tuple[Codec, ...]:
    return tuple(codec) if isinstance(codec, Sequence) else (codec,) * (len(cuts) - 1)


def _sizes(codecs: Sequence[Codec], cuts: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """Bytes of each part."""
    rows = zip(codecs, pairwise(cuts), strict=True)
    return [codec.nbytes(b - a, dtype) for codec, (a, b) in rows]
