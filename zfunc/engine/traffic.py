"""What a step sends, computed from its layouts: the figures of ``step.describe()``.

Per rank, with N ranks and a flat of n elements: an all-gather sends this rank's part to
N - 1 peers, a reduce-scatter sends each peer its part, and an all-reduce is both. In a large
group the way is another one, and the bytes nearly the same (see ``zfunc.ranks.routes``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zfunc.engine.communication import Communication
from zfunc.engine.hooks import Traffic
from zfunc.engine.plans import is_soon
from zfunc.layout.layout import Layout
from zfunc.layout.rounds import in_rounds
from zfunc.ranks.adjacency import neighbours, ring
from zfunc.ranks.comm import Group
from zfunc.ranks.routes import (
    all_gather_bytes,
    all_reduce_bytes,
    headers_each,
    reduce_scatter_bytes,
)
from zfunc.ranks.world import current
from zfunc.trees.kinds import kind

__all__ = ["added", "gathered", "joined", "reduced"]


def added(traffic: Traffic, purpose: str, nbytes: int, ranks: Group, each: int = 1) -> None:
    """One collective more: what this rank sends, and ``each`` header to a neighbour."""
    told = ring if kind(current().device) == "cuda" else neighbours  # beside NCCL
    traffic.add(purpose, nbytes, ranks.axis, each * len(told(ranks.rank, ranks.size)))


def gathered(
    traffic: Traffic, layout: Layout, units: Sequence[int], ranks: Group, room: int = 0
) -> None:
    """All-gathers of the units in their order; one that is needed again soon is kept.

    Args:
        room: see :func:`zfunc.engine.plans.is_soon`.
    """
    kept: set[int] = set()
    for n, unit in enumerate(units, 1):
        if unit not in kept:
            for i in layout.units[unit].flats:
                _gather(traffic, "gather parameters", layout, i, ranks)
        soon = is_soon(unit, units[n:], room, layout.unit_nbytes, layout.layer_of_unit.__getitem__)
        (kept.add if soon else kept.discard)(unit)


def joined(traffic: Traffic, layout: Layout, ranks: Group) -> None:
    """All-gathers of the new parameters where they are kept whole."""
    for i, flat in enumerate(layout.flats):
        if flat.trainable:
            _gather(traffic, "gather parameters", layout, i, ranks)


def _gather(traffic: Traffic, purpose: str, layout: Layout, flat: int, ranks: Group) -> None:
    spec = layout.flats[flat]
    if not spec.whole and layout.by_flat[flat] and ranks.size > 1:
        sent = all_gather_bytes(spec.cuts, spec.dtype.itemsize, ranks.rank, ranks.size)
        added(traffic, purpose, sent, ranks)


def reduced(
    traffic: Traffic,
    layout: Layout,
    cut: bool,
    units: Sequence[int],
    over: Communication,
    dtype: torch.dtype | None = None,
) -> None:
    """Reductions of the gradients of the units that were used; in ``dtype``, or their own."""
    purpose, ranks, replicated = "reduce gradients", over.group, over.replicas.size > 1
    for unit in set(units):
        for i in layout.units[unit].flats:
            spec = layout.flats[i]
            if not spec.trainable:
                continue
            size = (dtype or spec.dtype).itemsize
            parted = cut and not spec.whole
            if not parted and not in_rounds(spec, current().device, replicated):
                _all_reduce(traffic, spec.length * size, size, over.everyone)
                continue
            if ranks.size > 1:
                sent = reduce_scatter_bytes(spec.cuts, size, ranks.rank, ranks.size)
                added(traffic, purpose, sent, ranks)
            if replicated:
                low, high = spec.bounds(ranks.rank)
                _all_reduce(traffic, (high - low) * size, size, over.replicas)
            if not parted:
                sent = all_gather_bytes(spec.cuts, size, ranks.rank, ranks.size)
                added(traffic, purpose, sent, ranks)


def _all_reduce(traffic: Traffic, nbytes: int, size: int, ranks: Group) -> None:
    sent = all_reduce_bytes(nbytes // size, size, ranks.rank, ranks.size)
    on_gpu = kind(current().device) == "cuda"
    each = 1 if on_gpu else headers_each("all_reduce", nbytes, ranks.size)
    added(traffic, "reduce gradients", sent, ranks, each)
