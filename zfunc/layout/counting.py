"""What counts when ranks add up: what several of them hold is taken once.

Norms, sums of squares and trust ratios are those of full leaves. A leaf that each rank has, or
that some share where a split gives two ranks the same rows, counts where the first of them has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout, Slot

__all__ = ["counted", "counted_partly", "shares"]


def counted(layout: Layout, flat: int, rank: int) -> list[tuple[Slot, int, int, int]]:
    """Those ``segments`` of a flat of which this rank has all that counts.

    Leaves of which only some elements do are in ``counted_partly``.
    """
    if layout.along is None:
        return [] if layout.flats[flat].whole and rank else layout.segments(flat, rank)
    return _split(layout, flat, rank)[0]


def counted_partly(layout: Layout, flat: int, rank: int) -> list[tuple[Slot, Tensor]]:
    """Leaves of which some elements count on this rank: where in its flat these lie."""
    return [] if layout.along is None else _split(layout, flat, rank)[1]


def _split(layout: Layout, flat: int, rank: int) -> tuple[list[Any], list[Any]]:
    first, mine = not (layout.flats[flat].whole and rank), layout.parts.rank
    key = ("counted", flat, rank, mine)
    if key not in layout._memo:
        full, some = [], []
        for slot, a, b, offset in layout.segments(flat, rank) if first else ():
            if slot.split is None:
                full += [(slot, a, b, offset)] if mine == 0 else []
            elif not slot.split.shared:
                full.append((slot, a, b, offset))
            else:
                numbers = torch.arange(slot.numel).view(slot.shape)
                owned = torch.tensor(slot.split.owned(mine), dtype=torch.long)
                at = numbers.index_select(slot.split.dim, owned).flatten()
                at = at[(at >= offset) & (at < offset + b - a)] - offset + a
                some += [(slot, at)] if len(at) else []
        layout._memo[key] = full, some
    found: tuple[list[Any], list[Any]] = layout._memo[key]
    return found


def shares(layout: Layout, flat: int, rank: int) -> list[tuple[Slot, int]]:
    """The leaves of which what this rank has counts: as one of how many.

    Raises:
        PlacementError: several ranks have some elements of a leaf, and not each as many.
    """
    if layout.along is None:
        return [] if layout.flats[flat].whole and rank else [(s, 1) for s in layout.by_flat[flat]]
    first, found = not (layout.flats[flat].whole and rank), []
    for slot in layout.by_flat[flat] if first else ():
        if slot.split is None:
            found += [(slot, 1)] if layout.parts.rank == 0 else []
            continue
        held = {len(ranks) for ranks in slot.split.holders} if slot.split.shared else {1}
        if len(held) > 1:
            raise PlacementError(
                f"{slot.path} is split so that some of its elements are on {min(held)} ranks "
                f"and others on {max(held)}, which this optimizer cannot sum over. Leave it "
                f"whole: rules={{{slot.path!r}: None}}."
            )
        found.append((slot, held.pop()))
    return found
