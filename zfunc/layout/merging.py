"""Fewer, larger flats: for what is exchanged once all of it is there."""

from __future__ import annotations

from dataclasses import replace

import torch

from zfunc.layout.cutting import aligned_cuts, sharing
from zfunc.layout.layout import Flat, Layout, Unit

__all__ = ["merged"]


def merged(layout: Layout, nbytes: int) -> Layout:
    """The same leaves in fewer flats: those of one kind that are cut, up to ``nbytes``.

    Each flat lies in the new one as it is, padding included, so that leaves which lie in one
    buffer of the new layout lie in flats of the old one, too.
    """
    key = ("merged", nbytes)
    if key not in layout._memo:
        layout._memo[key] = _merged_flats(layout, nbytes)
    made: Layout = layout._memo[key]
    return made


def _merged_flats(layout: Layout, nbytes: int) -> Layout:
    runs: list[list[int]] = []  # flats that become one
    last: dict[tuple[torch.dtype, bool, int], list[int]] = {}  # of each kind
    for i, flat in enumerate(layout.flats):
        kind = flat.dtype, flat.trainable, _sharing(layout, i)
        run = last.get(kind, [])
        length = flat.length + sum(layout.flats[k].length for k in run)
        if run and not flat.whole and length * flat.dtype.itemsize <= nbytes:
            run.append(i)
            continue
        runs.append([i])
        if not flat.whole:
            last[kind] = runs[-1]
    places: dict[int, tuple[int, int]] = {}  # of an old flat: its new one, and where it begins
    flats: list[Flat] = []
    units: list[Unit] = []
    for run in runs:
        at = 0
        for i in run:
            places[i] = len(flats), at
            at += layout.flats[i].length
        first = layout.flats[run[0]]
        cuts = first.cuts if len(run) == 1 else aligned_cuts(at, layout.world)
        names = [layout.units[layout.unit_of_flat[i]].name for i in run]
        name = names[0] if len(set(names)) == 1 else f"{names[0]} to {names[-1]}"
        slots = sorted(slot.index for i in run for slot in layout.by_flat[i])
        units.append(Unit(name, (len(flats),), tuple(slots)))
        flats.append(replace(first, cuts=cuts))
    moved = [
        slot and replace(slot, flat=places[slot.flat][0], start=places[slot.flat][1] + slot.start)
        for slot in layout.slots
    ]
    return replace(layout, slots=tuple(moved), flats=tuple(flats), units=tuple(units), _memo={})


def _sharing(layout: Layout, flat: int) -> int:
    return next((sharing(slot.split) for slot in layout.by_flat[flat]), 0)
