"""Ranks that run the layers of a stack each in its own order, or leave some out: the plain mean."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from zfunc import optim

F64 = torch.float64
RANKS, LAYERS, RATE = 2, (0, 1, 2), 0.1
ORDERS = [order for count in range(len(LAYERS) + 1) for order in permutations(LAYERS, count)]
BATCH = numbers((6, 4), 1, F64)
Orders = list[tuple[tuple[int, ...], ...]]  # of each step those of each rank


def params() -> dict[str, Any]:
    layers = [{"w": numbers((4, 4), 10 + k, F64)} for k in LAYERS]
    return {"blocks": zf.Layers(layers), "head": numbers((4,), 20, F64)}


def layer(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def plain(plan: Orders) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in zf.tree.leaves(params())]
    *blocks, head = leaves
    for orders in plan:
        total = torch.zeros((), dtype=F64)
        for rank, order in enumerate(orders):
            x = BATCH.chunk(RANKS)[rank]
            for k in order:
                x = layer({"w": blocks[k]}, x)
            total = total + (x @ head).square().mean() / RANKS
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        with torch.no_grad():
            for x, g in zip(leaves, grads, strict=True):
                if g is not None:
                    x -= RATE * g
    return [x.detach() for x in leaves]


# By default all layers are one unit, which stays until the last of them has run.
@pytest.mark.parametrize("how", [{}, {"unit_bytes": 256}, {"unit_bytes": 1}], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_in_its_own_order(stage: int, how: dict[str, int]) -> None:
    for order in ORDERS:
        plan: Orders = [(LAYERS, LAYERS), (LAYERS, order), (order, LAYERS)]

        def run(plan: Orders = plan) -> list[Tensor]:
            mine: list[tuple[int, ...]] = [()]

            def loss(p: Any, x: Tensor) -> Tensor:
                for k in mine[0]:
                    x = zf.layer(layer, p["blocks"][k], x)
                return (x @ p["head"]).square().mean()

            tx = optim.sgd(RATE)
            step = zf.shard(zf.train_step(loss, tx), stage=stage, **how)
            state = step.place(zf.TrainState.create(params(), tx))
            for orders in plan:
                mine[0] = orders[zf.rank()]
                state, _ = step(state, zf.local_batch(BATCH))
            return zf.tree.leaves(step.unplace(state).params)

        for rank in zf.simulate(RANKS, timeout=30)(run)():
            torch.testing.assert_close(rank, plain(plan), rtol=0, atol=1e-12)
