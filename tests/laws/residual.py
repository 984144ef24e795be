"""A stack of small residual layers with a head, a loss for each row of a batch, and its means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zfunc as zf

__all__ = ["batch", "errors", "params", "uneven"]


def params(layers: int = 3) -> Any:
    *keys, head = zf.random.split(zf.random.key(0), layers + 1)
    rows = [{"w": 0.3 * zf.random.normal(k, (16, 16)), "b": torch.zeros(16)} for k in keys]
    return {"layers": zf.Layers(rows), "head": 0.3 * zf.random.normal(head, (16, 4))}


def layer(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def errors(p: Any, batch: Any) -> Tensor:
    """The loss of each row."""
    out = zf.scan(layer, p["layers"], batch["x"].to(p["head"].dtype)) @ p["head"]
    return (out.float() - batch["y"]).square().mean(1)


def uneven(p: Any, batch: Any) -> zf.Mean:
    """The mean over the rows that the batch counts."""
    return zf.Mean((errors(p, batch) * batch["mask"]).sum(), batch["mask"].sum())


def batch(i: int) -> dict[str, Tensor]:
    x, y, mask = zf.random.split(zf.random.key(50 + i), 3)
    return {
        "x": zf.random.normal(x, (24, 16)),
        "y": zf.random.normal(y, (24, 4)),
        "mask": (zf.random.uniform(mask, (24,)) < 0.6).float(),
    }
