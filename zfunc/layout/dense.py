"""A flat without its padding: the leaves of a buffer one behind the other.

Padding is zero and no gradient's, so what is compressed leaves it out: it would share in the
scales, and its error would be carried along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zfunc.layout.layout import Layout, Slot

__all__ = ["Dense", "dense_of", "spread_part", "squeezed_part"]


@dataclass(frozen=True)
class Dense:
    """Where the leaves of one flat lie in it, and without its padding.

    Attributes:
        slots: the leaves, in order.
        starts: where each begins in the dense buffer.
        cuts: what of the dense buffer each rank owns; it ends with the length.
        gapless: whether the dense buffer is the beginning of the flat, as it lies.
    """

    slots: tuple[Slot, ...]
    starts: tuple[int, ...]
    cuts: tuple[int, ...]
    gapless: bool

    @property
    def length(self) -> int:
        return self.cuts[-1]

    def leaves_of(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """What a rank owns of each leaf: ``(start, stop)`` in its part, and the leaf's elements."""
        low, high = self.cuts[rank : rank + 2]
        found = []
        for slot, start in zip(self.slots, self.starts, strict=True):
            a, b = max(start, low), min(start + slot.numel, high)
            if a < b:
                found.append((a - low, b - low, slot.numel))
        return tuple(found)

    def squeezed(self, full: Tensor) -> Tensor:
        """The dense buffer of a full flat; the same memory where that is possible."""
        if self.gapless:
            return full[: self.length]
        return torch.cat([full[s.start : s.start + s.numel] for s in self.slots])

    def spread(self, dense: Tensor, full: Tensor) -> None:
        """Write a dense buffer into a full flat; padding is left as it is."""
        if self.gapless:
            full[: self.length] = dense
            return
        for slot, start in zip(self.slots, self.starts, strict=True):
            full[slot.start : slot.start + slot.numel] = dense[start : start + slot.numel]

    def views(self, dense: Tensor) -> list[Tensor]:
        """The leaves in a dense buffer; further dimensions in front of it are kept."""
        return [
            dense[..., start : start + slot.numel].unflatten(-1, slot.shape)
            if slot.shape
            else dense[..., start]
            for slot, start in zip(self.slots, self.starts, strict=True)
        ]


def dense_of(layout: Layout, flat: int) -> Dense:
    """The dense buffer of one of a layout's flats.

    >>> from zfunc.layout.cutting import make_layout
    >>> dense_of(make_layout({"a": torch.zeros(70), "b": torch.zeros(3)}, world=2), 0).cuts
    (0, 70, 73)
    """
    key = ("dense", flat)
    if key not in layout._memo:
        slots = tuple(slot for slot in layout.by_flat[flat] if slot.numel)
        starts, at = [], 0
        for slot in slots:
            starts.append(at)
            at += slot.numel
        flats = layout.flats[flat]
        edges = (0, flats.length) if flats.whole else flats.cuts
        cuts = tuple(
            sum(min(max(edge - slot.start, 0), slot.numel) for slot in slots) for edge in edges
        )
        gapless = all(slot.start == start for slot, start in zip(slots, starts, strict=True))
        layout._memo[key] = Dense(slots, tuple(starts), cuts, gapless)
    return layout._memo[key]


def squeezed_part(layout: Layout, flat: int, rank: int, local: Tensor) -> Tensor:
    """The dense buffer of what ``rank`` owns of a flat, a copy unless it has no gaps."""
    pieces = layout.segments(flat, rank)
    if not pieces:
        return local[:0]
    ends = [b for _, _, b, _ in pieces]
    if [a for _, a, _, _ in pieces] == [0, *ends[:-1]]:
        return local[: ends[-1]]
    return torch.cat([local[a:b] for _, a, b, _ in pieces])


def spread_part(layout: Layout, flat: int, rank: int, dense: Tensor) -> Tensor:
    """A rank's part of a flat, padding included, from its dense buffer."""
    low, high = layout.flats[flat].bounds(rank)
    if len(dense) == high - low:
        return dense
    local, at = dense.new_zeros(high - low), 0
    for _, a, b, _ in layout.segments(flat, rank):
        local[a:b] = dense[at : at + b - a]
        at += b - a
    return local
