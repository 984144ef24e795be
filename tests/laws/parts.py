"""A placed node of parts of leaves: each split over T ranks, and its parts again over D."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import zfunc as zf
from zfunc.layout.splits import Split
from zfunc.ranks.world import current
from zfunc.trees.nodes import LeafInfo, Placed, Span

__all__ = ["Parts"]


class Parts(Placed):
    """This rank's part of each leaf: of a split, and of that a stretch of elements."""

    def __init__(self, values: dict[str, Tensor], splits: dict[str, Split], ways: int) -> None:
        data, self.tensor = divmod(zf.rank(), ways)
        self.ways, self.data, self.splits = ways, current().size // ways, splits
        self.dtypes = {name: (tuple(x.shape), x.dtype) for name, x in values.items()}
        self.at, self.parts = [], {}
        for i, (name, x) in enumerate(values.items()):
            split = splits.get(name)
            mine = x if split is None else split.local(x, self.tensor)
            start, stop = self._ends(mine.numel(), i)[data : data + 2]
            same = tuple(range(current().size)) if split is None else (zf.rank(),)
            rows = None if split is None else split.rows(x.shape, self.tensor)
            if split is None:
                start, stop = 0, mine.numel()
            self.at.append(Span(i, start, stop, same, rows))
            self.parts[name] = mine.reshape(-1)[start:stop].clone()

    def _ends(self, numel: int, seed: int) -> list[int]:
        inner = sorted(random.Random(seed).choices(range(numel + 1), k=self.data - 1))
        return [0, *inner, numel]

    def leaf_infos(self) -> list[LeafInfo]:
        return [LeafInfo((name,), *what) for name, what in self.dtypes.items()]

    def names(self) -> list[str]:
        return list(self.dtypes)

    def held(self) -> Sequence[Tensor | None]:
        return list(self.parts.values())

    def spans(self) -> list[Span]:
        return self.at

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        yield from zip(self.at, self.parts.values(), strict=True)

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Parts:
        new = object.__new__(Parts)
        new.__dict__ |= self.__dict__
        new.parts = {name: torch.full_like(x, -1) for name, x in self.parts.items()}
        for span, x in new.streamed():
            fill(span, x)
        return new
