"""What a step sends, computed from its layouts: the figures of ``step.describe()``.

Per rank, with N ranks and a flat of n elements: an all-gather sends this rank's part to
N - 1 peers, a reduce-scatter sends each peer its part, and an all-reduce is both. In a large
group the way is another one, and the bytes nearly the same (see ``zfunc.ranks.routes``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zfunc.engine.hooks import Traffic
from zfunc.engine.plans import is_soon
from zfunc.layout.layout import Layout
from zfunc.layout.rounds import in_rounds
from zfunc.ranks.routes import (
    all_gather_bytes,
    all_reduce_bytes,
    headers_each,
    reduce_scatter_bytes,
)
from zfunc.ranks.world import current

__all__ = ["gathered", "joined", "reduced"]


def gathered(
    traffic: Traffic, layout: Layout, units: Sequence[int], rank: int, room: int = 0
) -> None:
    """All-gathers of the units in their order; one that is needed again soon is kept.

    Args:
        room: see :func:`zfunc.engine.plans.is_soon`.
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
