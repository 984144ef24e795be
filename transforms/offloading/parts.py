"""A part of a tree: a ``Sharded`` node in which only the flats of one unit have values.

What is done with a part is just what ``Sharded`` does with a complete tree. So ``map``, ``merge``
and the rest mean the same on disk and in memory, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.copies import uploaded
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.trees.kinds import kind

__all__ = ["outline", "part_of", "part_on", "part_on_host", "rank_in", "trainable_part"]


def rank_in(layout: Layout) -> int:
    """The calling rank's place among those over which a layout is sharded."""
    return Sharded(layout, ()).group.rank


def part_of(layout: Layout, flats: Mapping[int, Tensor | None]) -> Sharded:
    """A node with these flats, by their number, and no others."""
    return Sharded(layout, [flats.get(i) for i in range(len(layout.flats))])


def trainable_part(layout: Layout, unit: int, flats: Sequence[Tensor]) -> Sharded:
    """One unit of gradients, from the flats that have gradients."""
    trainable = [i for i in layout.units[unit].flats if layout.flats[i].trainable]
    return part_of(layout, dict(zip(trainable, flats, strict=True)))


def outline(layout: Layout, dtypes: Sequence[torch.dtype | None], rank: int) -> Sharded:
    """A tree without data, on ``meta``; flats without a dtype have no values."""
    flats: list[Any] = []
    for flat, dtype in zip(layout.flats, dtypes, strict=True):
        low, high = flat.bounds(rank)
        flats.append(dtype and torch.empty(high - low, dtype=dtype, device="meta"))
    return Sharded(layout, flats)


def part_on(part: Sharded, device: torch.device) -> Sharded:
    """A part whose tensors are on a device; those that are there already are not copied."""
    if kind(device) != "cpu":
        return Sharded(part.layout, uploaded(part.flats, device))
    return part_on_host(part)


def part_on_host(part: Sharded) -> Sharded:
    """The same in the host's memory."""
    return Sharded(part.layout, [x if x is None else x.to("cpu") for x in part.flats])
