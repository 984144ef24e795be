"""What every script trains: a small model, its loss, and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["batches", "loss_of", "make"]


def make() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """The mean square error; the last of nine columns is what is asked for."""
    return (model(batch[:, :8]) - batch[:, 8:]).square().mean()


def batches() -> Iterator[Tensor]:
    """Ten of 64 rows, the same on every rank."""
    for seed in range(10):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        yield torch.cat([x, x.sum(dim=1, keepdim=True)], dim=1)
