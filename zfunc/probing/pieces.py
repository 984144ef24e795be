"""What can go to different ranks: heads, groups of heads, neurons; and which ranks get which.

The first piece is found by asking, the others are taken to lie beside it in the same way. That is a
guess, and a rank's part is tried before it is believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zfunc.probing.reaches import Masks, Reaches
from zfunc.ranks.comm import even_cuts

__all__ = ["PieceLabels", "assignments"]

ODD = 256  # at most so many pieces are looked for one by one
BLOCKS = 16  # the most blocks that a fused weight is thought to have


@dataclass(frozen=True)
class PieceLabels:
    """Of each input of each row, by the row's name, the piece that it belongs to."""

    count: int
    labels: dict[str, Tensor]

    def dealt(self, ranks: Tensor, ways: int) -> list[Masks]:
        """Each rank's inputs, from the rank of every piece."""
        of = {name: ranks[label] for name, label in self.labels.items()}
        return [{name: x == r for name, x in of.items()} for r in range(ways)]


def assignments(
    reaches: Reaches, ways: int, grains: Mapping[str, int]
) -> tuple[int, Iterator[list[Masks]]]:
    """How many pieces there are, and which inputs of rows each rank may have: proposals.

    Args:
        grains: by the names of rows, at multiples of how many inputs they are best split.
    """
    seed = reaches.none()
    seed[reaches.pairing.rows[0]][0] = True
    pieces = _tiled(reaches.closed(seed)) or _one_by_one(reaches)
    if pieces.count >= ways:
        return pieces.count, _proposals(pieces, ways, 1, grains)
    finer = _finer(reaches, seed, ways)
    if finer is None:
        return pieces.count, iter(())
    return pieces.count, _proposals(finer, ways, pieces.count, grains)


def _tiled(piece: Masks) -> PieceLabels | None:
    """A piece and its shifts, if these make up everything: each run moves by its length."""
    labels, counts = {}, set()
    for name, mask in piece.items():
        size = int(mask.sum())
        if not size or len(mask) % size:
            return None
        counts.add(len(mask) // size)
        labels[name] = torch.full((len(mask),), -1)
        for start, stop in _runs(mask):
            length = (stop - start) * (len(mask) // size)
            if start + length > len(mask):
                return None
            labels[name][start : start + length] = torch.arange(length) // (stop - start)
    if len(counts) != 1 or any(bool((x < 0).any()) for x in labels.values()):
        return None
    return PieceLabels(counts.pop(), labels)


def _runs(mask: Tensor) -> list[tuple[int, int]]:
    edge = torch.zeros(1, dtype=torch.int32)
    edges = torch.diff(mask.int(), prepend=edge, append=edge)
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _one_by_one(reaches: Reaches) -> PieceLabels:
    """Every piece, asked for; one piece for the rest where there are too many."""
    labels = {name: torch.full((width,), -1) for name, width in reaches.widths.items()}
    for count in range(ODD):
        name = next((name for name, x in labels.items() if bool((x < 0).any())), None)
        if name is None:
            return PieceLabels(count, labels)
        seed = reaches.none()
        seed[name][int((labels[name] < 0).int().argmax())] = True
        for other, mask in reaches.closed(seed).items():
            labels[other][mask] = count
    return PieceLabels(
        ODD + 1, {name: x.where(x >= 0, torch.tensor(ODD)) for name, x in labels.items()}
    )


def _finer(reaches: Reaches, seed: Masks, ways: int) -> PieceLabels | None:
    """Pieces that share outputs of columns (keys and values): those that share the fewest."""
    best, least, seen = None, 0, set()
    for name, mask in reaches.backward(seed).columns.items():
        for start, stop in _runs(mask):
            some = torch.zeros_like(mask)
            some[start:stop] = True
            pieces = _tiled(reaches.forward({name: some}))
            if pieces is None or pieces.count < ways or pieces.count in seen:
                continue
            seen.add(pieces.count)
            held = _held(reaches, next(_proposals(pieces, ways, 1, {})))
            if best is None or held < least:
                best, least = pieces, held
    return best


def _held(reaches: Reaches, ranks: list[Masks]) -> int:
    """How many outputs of columns all ranks have, together."""
    found = (reaches.backward(rows).columns for rows in ranks)
    return sum(int(mask.sum()) for columns in found for mask in columns.values())


def _proposals(
    pieces: PieceLabels, ways: int, groups: int, grains: Mapping[str, int]
) -> Iterator[list[Masks]]:
    """``groups``: that share outputs of columns, with as many pieces each."""
    n, grain = pieces.count, _together(pieces, grains)
    yield pieces.dealt(_spread(n, ways, grain), ways)
    if 1 < groups < ways and n % groups == 0:  # no rank takes of two groups
        inner, parts = n // groups, []
        for first, last in pairwise(even_cuts(ways, groups)):
            parts.append(first + _spread(inner, last - first, grain))
        if inner >= ways // groups + bool(ways % groups):
            yield pieces.dealt(torch.cat(parts), ways)
    for blocks in range(2, min(n // ways, BLOCKS) + 1):  # some of each of so many blocks
        if n % blocks == 0:
            yield pieces.dealt(_spread(n // blocks, ways, grain).repeat(blocks), ways)


def _together(pieces: PieceLabels, grains: Mapping[str, int]) -> int:
    """How many pieces end where what shares a scale ends, in each row."""
    found = 1
    for name, label in pieces.labels.items():
        width = max(1, len(label) // pieces.count)  # some pieces may lie in other rows alone
        found = math.lcm(found, math.lcm(grains.get(name, 1), width) // width)
    return found


def _spread(count: int, ways: int, grain: int = 1) -> Tensor:
    """The rank of each of some pieces in order, as even as can be, more on the first ones.

    ``grain`` of them stay together, if there are enough of these.
    """
    blocks = -(-count // grain)
    if blocks < ways:
        blocks, grain = count, 1
    ends = [min(count, end * grain) for end in even_cuts(blocks, ways)]
    return torch.cat([torch.full((b - a,), r) for r, (a, b) in enumerate(pairwise(ends))])
