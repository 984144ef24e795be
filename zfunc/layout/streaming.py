"""How nodes made of flats go to files and come back: span by span, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from zfunc.errors import PlacementError
from zfunc.layout.layout import Layout, Slot
from zfunc.layout.splits import Strided
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import laid_out
from zfunc.ranks.world import current
from zfunc.trees.marks import carry
from zfunc.trees.nodes import LeafInfo, Placed, Span

__all__ = ["OfFlats", "spans_of_flat"]


class OfFlats(Placed):
    """A node that has a layout, and this rank's flats in memory."""

    if TYPE_CHECKING:
        layout: Layout
        flats: tuple[Tensor | None, ...]

        @property
        def group(self) -> Group:
            """The ranks among which the flats are cut."""

    def leaf_infos(self) -> list[LeafInfo]:
        return _infos(self.layout, [None if x is None else x.dtype for x in self.flats])

    def spans(self) -> list[Span]:
        rank, flats = self.group.rank, self._by_unit()
        return [span for i in flats for span, _, _ in spans_of_flat(self.layout, i, rank)]

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        for i in self._by_unit():
            local = self.flats[i]
            assert local is not None
            for span, a, b in spans_of_flat(self.layout, i, self.group.rank):
                yield span, local[a:b]

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Any:
        flats: list[Tensor | None] = [None if x is None else _zeros(x) for x in self.flats]
        for i in self._by_unit():
            local = flats[i]
            assert local is not None
            for span, a, b in spans_of_flat(self.layout, i, self.group.rank):
                fill(span, local[a:b])
        return type(self)(self.layout, flats)  # type: ignore[call-arg]

    def _by_unit(self) -> list[int]:
        """Numbers of the flats that have values, unit by unit."""
        return [i for unit in self.layout.units for i in unit.flats if self.flats[i] is not None]


def _zeros(x: Tensor) -> Tensor:
    return cast(Tensor, carry(torch.zeros_like(x, memory_format=torch.contiguous_format), x))


def _infos(layout: Layout, dtypes: Sequence[torch.dtype | None]) -> list[LeafInfo]:
    infos = []
    for slot, keys in zip(layout.slots, layout.spec.paths(), strict=True):
        dtype = None if slot is None else dtypes[slot.flat]
        if slot is not None and slot.split is not None and slot.code is not None:
            raise PlacementError(
                f"{slot.path} is in low bits, and {slot.split.ways} ranks have parts of it, which "
                "checkpoints do not hold: quant.save(path, zf.full(params)) writes the full ones "
                "(all ranks call zf.full, one of them writes)."
            )
        shape = None if slot is None or dtype is None else slot.full
        infos.append(LeafInfo(tuple(keys), shape, dtype))
    return infos


def spans_of_flat(layout: Layout, flat: int, rank: int) -> list[tuple[Span, int, int]]:
    """``(span, start, stop)``: what a rank of the layout's axis holds of a flat's leaves.

    ``local[start:stop]`` are the elements of the span.
    """
    whole = layout.flats[flat].whole
    same = {split: replicas(layout, whole, split) for split in (False, True)}
    return [
        (
            Span(
                slot.index, offset, offset + b - a, same[slot.split is not None], rows(layout, slot)
            ),
            a,
            b,
        )
        for slot, a, b, offset in layout.segments(flat, rank)
    ]


def rows(layout: Layout, slot: Slot, first: int = 0) -> Strided | None:
    """Which elements of the full leaf this rank's part has, in full rows from ``first`` on."""
    split = slot.split
    return None if split is None else split.rows(slot.shape, layout.parts.rank, first)


def replicas(layout: Layout, whole: bool, split: bool = False) -> tuple[int, ...]:
    """The ranks of the world that hold the same part of a flat as the calling one.

    Args:
        split: of leaves of which ranks along another axis have other parts.
    """
    world = current()
    mesh = laid_out(layout.mesh)
    cut = () if whole or layout.axis == () else mesh.checked(layout.axis)
    cut = (*cut, layout.along) if split and layout.along else cut
    others = tuple(name for name in mesh.names if name not in cut)
    return mesh.members(others, world.rank) if others else (world.rank,)
