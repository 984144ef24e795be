"""What the papers say, literally: float64, one process, one list entry per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["TwoPhases", "integers", "signs"]


def signs(c: Tensor, group: int | None, scaling: str) -> Tensor:
    """``scale * sign(c)``, sign(0) being 1, with a scale for each run of ``group`` elements."""
    out = torch.empty_like(c)
    for a in range(0, len(c), group or max(len(c), 1)):
        run = c[a : a + group] if group else c
        size = run.norm() / len(run) ** 0.5 if scaling == "rms" else run.abs().mean()
        out[a : a + len(run)] = size * torch.where(run >= 0, 1.0, -1.0).double()
    return out


def integers(c: Tensor, group: int, top: int) -> Tensor:
    """``scale * round(c / scale)``, the largest number of a group being ``top`` scales."""
    out = torch.zeros_like(c)
    for a in range(0, len(c), group):
        run = c[a : a + group]
        scale = run.abs().max() / top
        if scale > 0:
            out[a : a + len(run)] = scale * (run / scale).round().clamp(-top, top)
    return out


@dataclass
class TwoPhases:
    """The compressed mean of buffers of ``cuts[-1]`` elements, one from each rank.

    Attributes:
        cuts: ``rank r`` serves elements ``cuts[r]`` to ``cuts[r + 1]``.
        sent: what a buffer is after compression.
        whole: whether there is a second phase; without it the mean is that of the first.
    """

    cuts: Sequence[int]
    sent: Callable[[Tensor], Tensor] = lambda c: signs(c, 2048, "mean")
    whole: bool = True
    worker: list[Tensor] = field(default_factory=list)
    server: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        ranks, n = len(self.cuts) - 1, self.cuts[-1]
        self.worker = [torch.zeros(n, dtype=torch.float64) for _ in range(ranks)]
        self.server = torch.zeros(n, dtype=torch.float64)

    def mean(self, inputs: Sequence[Tensor]) -> Tensor:
        """What every rank gets; the errors are the next ones afterwards."""
        out = torch.zeros_like(self.server)
        for a, b in pairwise(self.cuts):
            received = []
            for x, error in zip(inputs, self.worker, strict=True):
                c = x[a:b].double() + error[a:b]
                received.append(self.sent(c))
                error[a:b] = c - received[-1]
            mean = torch.stack(received).mean(0)
            if self.whole:
                c = mean + self.server[a:b]
                mean = self.sent(c)
                self.server[a:b] = c - mean
            out[a:b] = mean
        return out
