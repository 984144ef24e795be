"""A small tree with two stacks of layers, and what losses of it are put together from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.pipelines import F64


def params() -> Any:
    def matrices(seed: int, n: int) -> Any:
        return zf.Layers([{"w": numbers((6, 6), seed + i, F64, 0.4)} for i in range(n)])

    first, scale = numbers((6, 6), 1, F64, 0.4), numbers((6,), 2, F64, 1.0)
    return {"first": {"w": first}, "blocks": matrices(10, 4), "more": matrices(20, 2), "s": scale}


def layer(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def through(p: Any, x: Any, fn: Callable[..., Any] = layer) -> Any:
    return zf.scan(fn, p["more"], zf.scan(fn, p["blocks"], x))


def end(x: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(x.sum(1, keepdim=True), batch["y"])


def base(p: Any, batch: Any) -> Tensor:
    return end(through(p, layer(p["first"], batch["x"])) * p["s"], batch)


def layers_twice(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for each in p["blocks"]:
        x = zf.layer(layer, each, zf.layer(layer, each, x))
    return end(zf.scan(layer, p["more"], x), batch)
