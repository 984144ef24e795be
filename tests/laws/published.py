"""1-bit Adam, 1-bit LAMB and momentum as published, literally: one process, one flat buffer.

Parameters lie in the order in which the module defines them. Every rank adds its own gradient to
the common momentum, compresses the whole with one scale, the root mean square; the owner of each
part averages, adds its error, and compresses that with one scale of its own.

Sources: Tang et al., 1-bit Adam, 2021; Li et al., 1-bit LAMB, 2021. Biases are corrected, and
second moments frozen after theirs, so that the warm-up is that of ``zfunc``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.laws.compression import TwoPhases, signs

__all__ = ["Published"]

EPS = {"adam": 1e-8, "lamb": 1e-6}
B1 = 0.9


@dataclass
class Published:
    """A module in training.

    Attributes:
        optimizer: ``"momentum"``, ``"adam"`` or ``"lamb"``.
        freeze: steps before compression.
        b2: decay of second moments.
        loss: of the module and a rank's batch.
    """

    module: nn.Module
    optimizer: str
    ranks: int
    freeze: int
    b2: float
    loss: Callable[[nn.Module, Tensor], Tensor]
    steps: int = 0
    ratios: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = list(self.module.parameters())
        self.sizes = [p.numel() for p in self.params]
        n = sum(self.sizes)
        self.m, self.v, self.fresh = (torch.zeros(n) for _ in range(3))
        part = -(-n // self.ranks)
        cuts = [min(part * rank, n) for rank in range(self.ranks + 1)]
        self.phases = TwoPhases(cuts, lambda c: signs(c, None, "rms"))
        self.ratios = [torch.zeros(()) for _ in self.params]
        self.factors = [torch.ones(()) for _ in self.params]

    def step(self, batch: Tensor, lr: float) -> None:
        self.steps += 1
        t, begun = self.steps, self.steps > self.freeze
        own = [self._gradient(part) for part in batch.chunk(self.ranks)]
        gain = 1.0 if self.optimizer == "momentum" else 1 - B1
        old, local = self.m, [B1 * self.m + gain * g for g in own]
        if begun:
            scale = self._scaling() if self.optimizer == "lamb" else torch.ones(len(old))
            self.m = self.phases.mean([x * scale for x in local]).float() / scale
        else:
            self.m = torch.stack(local).mean(0)
            self.v = self.b2 * self.v + (1 - self.b2) * torch.stack(own).mean(0) ** 2
            self.fresh = self.v.clone()
        if self.optimizer == "momentum":
            self._move(lr * self.m)
            return
        corrected = 1 - self.b2 ** min(t, self.freeze)
        root = (self.v / corrected).sqrt() + EPS[self.optimizer]
        u = self.m / (1 - B1**t) / root
        if self.optimizer == "lamb":
            u = u * self._spread(self._coefficients(u, root, old, corrected, begun))
        self._move(lr * u)

    def _gradient(self, batch: Tensor) -> Tensor:
        found = torch.autograd.grad(self.loss(self.module, batch), self.params)
        return torch.cat([g.reshape(-1) for g in found])

    def _scaling(self) -> Tensor:
        """What brings all leaves' momentum to one size; decided once, when compression begins."""
        if self.steps == self.freeze + 1:
            sizes = torch.stack([x.square().mean().sqrt() for x in self.m.split(self.sizes)])
            self.coefficients = self._spread(list(sizes.mean() / sizes))
        return self.coefficients

    def _coefficients(
        self, u: Tensor, root: Tensor, old: Tensor, corrected: float, begun: bool
    ) -> list[Tensor]:
        if not begun:
            rows = zip(self.params, u.split(self.sizes), strict=True)
            found = [(p.norm() / x.norm()).clamp(0.01, 10) for p, x in rows]
            self.ratios = [0.9 * a + 0.1 * b for a, b in zip(self.ratios, found, strict=True)]
            return found
        g = (self.m - B1 * old) / (1 - B1)
        self.fresh = self.b2 * self.fresh + (1 - self.b2) * g * g
        new = (self.fresh / corrected).sqrt() + EPS["lamb"]
        factors = [x.max().clamp(0.5, 4) for x in (root / new).split(self.sizes)]
        rows = zip(factors, self.factors, strict=True)
        self.factors = [f.clamp(last * 0.9, last * 1.1) for f, last in rows]
        return [a * f for a, f in zip(self.ratios, self.factors, strict=True)]

    def _spread(self, values: Sequence[Tensor]) -> Tensor:
        rows = zip(values, self.sizes, strict=True)
        return torch.cat([x.detach().expand(size) for x, size in rows])

    def _move(self, update: Tensor) -> None:
        with torch.no_grad():
            for p, u in zip(self.params, update.split(self.sizes), strict=True):
                p -= u.view(p.shape)
