"""Trees of which each stage of a pipeline has its own layers: who has which unit.

The flats of such a tree are cut over the ranks of all stages together. A unit has length on the
ranks of its own stage alone, and none on the others, so that norms, optimizers and files find each
element once, as they do in any sharded tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from zfunc.layout.layout import ALIGN, Layout
from zfunc.ranks.comm import Group

__all__ = ["Stages", "cuts_among", "owners_of_chunks", "ranks_of_chunks", "spread"]


@dataclass(frozen=True)
class Stages:
    """In which chunk of a model each leaf is, and which ranks have that chunk.

    Attributes:
        chunk_of: by leaf index.
        holders: by chunk the ranks that share its leaves, as indices into the layout's group.
    """

    chunk_of: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]


def spread(length: int, world: int, holders: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts of a flat that a few of ``world`` ranks share evenly.

    >>> spread(100, 4, (2, 3))
    (0, 0, 0, 64, 128)
    """
    part = -(-length // (ALIGN * len(holders))) * ALIGN
    cuts = [0]
    for rank in range(world):
        cuts.append(cuts[-1] + (part if rank in holders else 0))
    return tuple(cuts)


def ranks_of_chunks(layout: Layout) -> tuple[int, ...] | None:
    """Which stage of a pipeline has each chunk of a placed tree; None of one without stages.

    Stages are ranks of the first axis over which such a tree is cut, and the others those over
    which a stage's part of it is.
    """
    found = owners_of_chunks(layout)
    chunks = range(max(unit.chunk for unit in layout.units) + 1) if found else ()
    return tuple(found[k] for k in chunks) if found and len(found) == len(chunks) else None


def owners_of_chunks(layout: Layout) -> dict[int, int]:
    """Which stage has each chunk that has elements; nothing of a tree without stages."""
    key = "owners of chunks"
    if key not in layout._memo:
        layout._memo[key] = _owners(layout)
    found: dict[int, int] = layout._memo[key]
    return found


def _owners(layout: Layout) -> dict[int, int]:
    if layout.axis == () or layout.mesh is None or not any(unit.chunk for unit in layout.units):
        return {}
    axis = layout.axis if isinstance(layout.axis, str) else layout.axis[0]
    members, found = layout.ranks.members, dict[int, int]()
    for unit in layout.units:
        cuts = next((x.cuts for i in unit.flats if (x := layout.flats[i]).length), ())
        holder = next((i for i in range(len(cuts) - 1) if cuts[i + 1] > cuts[i]), None)
        if holder is not None:
            found[unit.chunk] = layout.mesh.coordinates(members[holder])[axis]
    return found


def cuts_among(layout: Layout, flat: int, ranks: Group) -> tuple[int, ...]:
    """How a flat is cut over some of the layout's ranks; all zeros if they have nothing of it.

    ``ranks`` are those that a unit is gathered among: all of the layout's, or those of one stage.
    """
    cuts = layout.flats[flat].cuts
    if ranks.size + 1 == len(cuts):
        return cuts
    key = ("cuts among", flat, ranks.members, ranks.rank)
    if key not in layout._memo:
        everyone = layout.ranks
        at = [
            everyone.members.index(member)
            for member in ranks.members or (everyone.members[everyone.rank],)
        ]
        sizes = [cuts[i + 1] - cuts[i] for i in at]
        found = [0]
        for size in sizes:
            found.append(found[-1] + size)
        layout._memo[key] = tuple(found)
    among: tuple[int, ...] = layout._memo[key]
    return among
