"""Layers of uneven widths with operators of split leaves, and a few steps of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import zfunc as zf
from zfunc import tree

__all__ = ["RULES", "SIZES", "WIDTH", "batch_of", "full_params", "loss_fn", "trained"]

Tree = Any
SIZES = (5, 12, 3, 8)  # widths of the layers' inner sides: tall, wide, uneven over ranks
WIDTH = 6


def full_params() -> Tree:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

    layers = [{"up": new(n, WIDTH), "down": new(WIDTH, n), "bias": new(WIDTH)} for n in SIZES]
    return {"embed": new(9, WIDTH), "layers": zf.Layers(layers), "head": new(3, WIDTH)}


def loss_fn(params: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    h = zf.embed(x, params["embed"])

    def layer(p: Tree, h: Tensor) -> Tensor:
        return h + zf.row(torch.tanh(zf.column(h, p["up"])), p["down"]) + p["bias"]

    h = zf.scan(layer, params["layers"], h)
    return torch.nn.functional.cross_entropy(zf.column(h, params["head"]), y)


RULES = {"layers.*.up": zf.Cut(0), "layers.*.down": zf.Cut(1)}


def batch_of(n: int) -> tuple[Tensor, Tensor]:
    key = zf.random.key(n)
    return zf.random.randint(key, 0, 9, (12,)), zf.random.randint(
        zf.random.fold_in(key, 1), 0, 3, (12,)
    )


def trained(step: Any, tx: Any, batches: int) -> Any:
    """Leaves of params and of the optimizer state, full, and what was sent."""
    state = step.place(zf.TrainState.create(full_params(), tx))
    with zf.comm.ledger() as sent:
        for n in range(batches):
            state, _ = step(state, step.local_batch(batch_of(n)))
    return tuple(tree.flatten_names(tree.full(x)) for x in (state.params, state.opt_state)), sent
