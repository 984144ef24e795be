"""What a step sends, computed from its layouts: the figures of ``step.describe()``.

Per rank, with N ranks and a flat of n elements: an all-gather sends this rank's part to
N - 1 peers, a reduce-scatter sends each peer its part, and an all-reduce is both. In a large
group the way is another one, and the bytes nearly the same (see ``zfunc.ranks.routes``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from zfunc.layout.layout import Layout
from zfunc.layout.rounds import in_rounds
from zfunc.ranks.routes import (
    all_gather_bytes,
    all_reduce_bytes,
    headers_each,
    reduce_scatter_bytes,
)
from zfunc.ranks.world import current

__all__ = ["PURPOSES", "Traffic", "gathered", "is_soon", "joined", "reduced"]

# By the first word of a collective's label.
PURPOSES = {
    "gather": "gather parameters",
    "join": "gather parameters",
    "reduce": "reduce gradients",
    "compress": "compressed gradients",
}


@dataclass
class Traffic:
    """Payload bytes that one rank sends, by purpose, and how many headers each neighbour gets."""

    payload: Counter[str] = field(default_factory=Counter)
    headers: int = 0

    def add(self, purpose: str, nbytes: int) -> None:
        self.payload[purpose] += nbytes
        self.headers += 1


Key = TypeVar("Key", bound=Hashable)


def is_soon(
    unit: Key,
    coming: Iterable[Key],
    room: int,
    size: Callable[[Key], int],
    layer: Callable[[Key], Hashable] = lambda unit: unit,
) -> bool:
    """Whether a unit comes next, or so soon that it and all until then take no more than ``room``.

    The units of its own ``layer`` come with it.

    >>> [is_soon("a", coming, 2, lambda unit: 1) for coming in ("ab", "bba", "bca", "b")]
    [True, True, False, False]
    >>> [is_soon("a", coming, 0, lambda unit: 1, str.lower) for coming in ("Aab", "Aba")]
    [True, False]
    """
    met, left, mine = {unit}, room - size(unit), layer(unit)
    for other in coming:
        if other == unit:
            return True
        if other not in met and layer(other) != mine:
            met.add(other)
            left -= size(other)
        if left < 0 and layer(other) != mine:
            return False
    return False


def gathered(
    traffic: Traffic, layout: Layout, units: Sequence[int], rank: int, room: int = 0
) -> None:
    """All-gathers of the units in their order; one that is needed again soon is kept.

    Args:
        room: see :func:`is_soon`.
    """
    kept: set[int] = set()
    for n, unit in enumerate(units, 1):
        if unit not in kept:
            for i in layout.units[unit].flats:
                _gather(traffic, "gather parameters", layout, i, rank)
        soon = is_soon(unit, units[n:], room, layout.unit_nbytes, layout.layer_of_unit.__getitem__)
        (kept.add if soon else kept.discard)(unit)


def joined(traffic: Traffic, layout: Layout, rank: int) -> None:
    """All-gathers of the new parameters where they are kept whole."""
    for i, flat in enumerate(layout.flats):
        if flat.trainable:
            _gather(traffic, "gather parameters", layout, i, rank)


def _gather(traffic: Traffic, purpose: str, layout: Layout, flat: int, rank: int) -> None:
    spec = layout.flats[flat]
    if not spec.whole and layout.by_flat[flat]:
        sent = all_gather_bytes(spec.cuts, spec.dtype.itemsize, rank, layout.world)
        traffic.add(purpose, sent)


def reduced(
    traffic: Traffic,
    layout: Layout,
    cut: bool,
    units: Sequence[int],
    rank: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Reductions of the gradients of the units that were used; in ``dtype``, or their own."""
    for unit in set(units):
        for i in layout.units[unit].flats:
            spec = layout.flats[i]
            if not spec.trainable:
                continue
            size = (dtype or spec.dtype).itemsize
            if cut and not spec.whole:
                sent = reduce_scatter_bytes(spec.cuts, size, rank, layout.world)
                traffic.add("reduce gradients", sent)
            elif in_rounds(spec, current().device):
                sent = reduce_scatter_bytes(spec.cuts, size, rank, layout.world)
                traffic.add("reduce gradients", sent)
                sent = all_gather_bytes(spec.cuts, size, rank, layout.world)
                traffic.add("reduce gradients", sent)
            else:
                sent = all_reduce_bytes(spec.length, size, rank, layout.world)
                traffic.add("reduce gradients", sent)
                if current().device.type != "cuda":
                    each = headers_each("all_reduce", spec.length * size, layout.world)
                    traffic.headers += each - 1
