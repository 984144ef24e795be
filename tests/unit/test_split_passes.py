"""A step whose backward runs in two parts: as schedules of pipelines run it, at every stage."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.unit.split_backwards import Products
from zfunc import optim
from zfunc.engine import unit_runs
from zfunc.engine.passes import Pass
from zfunc.engine.split_backward import SplitBackward
from zfunc.ranks.comm import ledger

D = torch.float64
WIDTH, RANKS, LAYERS = 6, 2, 3
WATCHED: dict[int, list[weakref.ref[Any]]] = defaultdict(list)  # activations, by rank


def initial() -> Any:
    keys = zf.random.split(zf.random.key(0), 9)

    def normal(key: Any, *shape: int) -> Tensor:
        return zf.random.normal(key, shape).to(D) * 0.4

    layers = [
        {
            "w": normal(keys[i], WIDTH, WIDTH),
            "v": normal(keys[i + 3], WIDTH),
            "b": torch.full((6,), 1.5, dtype=D),
        }
        for i in range(3)
    ]
    return {
        "table": normal(keys[6], 5, WIDTH),
        "g": normal(keys[7], WIDTH),
        "layers": zf.Layers(layers),
    }


def layer(p: Any, x: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x, (WIDTH,), p["v"], p["b"]) / p["b"]
    z = torch.softmax(torch.tanh(y @ p["w"]) @ p["w"].t(), -1)
    WATCHED[zf.rank()].append(weakref.ref(z.untyped_storage()))
    return x + z


class Split:
    """A loss that takes note of its input, and a backward from it in two parts, for each rank.

    Attributes:
        inputs: of each rank; ``grads``: what the first part gave for it.
        products: of matrices in the second part of the last step.
        redeemed: how often a unit was asked for again in each part, of one rank.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor | None] = {}
        self.redeemed: dict[int, list[int]] = {rank: [0, 0] for rank in range(RANKS)}
        self.products = dict.fromkeys(range(RANKS), 0)
        self.part = dict.fromkeys(range(RANKS), 0)

    def loss(self, params: Any, batch: Tensor) -> Tensor:
        x = self.inputs[zf.rank()] = batch.clone().requires_grad_()
        x = zf.scan(layer, params["layers"], x @ params["table"])
        return ((x * params["g"]) @ params["table"].t()).square().mean()

    def whole(self, owner: Pass, outs: Sequence[Tensor], seeds: Sequence[Any]) -> None:
        rank = zf.rank()
        hooks = [end.register_hook(leave) for end, leave in owner.ends]
        ends = [self.inputs[rank], owner.tick, *(end for end, _ in owner.ends)]
        self.grads[rank] = torch.autograd.grad(outs, ends, seeds, allow_unused=True)[0]
        for hook in hooks:
            hook.remove()

    def parts(self, owner: Pass, outs: Sequence[Tensor], seeds: Sequence[Any]) -> None:
        rank = zf.rank()
        seeds = [torch.ones_like(x) if g is None else g for x, g in zip(outs, seeds, strict=True)]
        ends = [owner.tick, *(end for end, _ in owner.ends)]
        back = SplitBackward(outs, [self.inputs[rank]], ends)
        (self.grads[rank],) = back.of_inputs(seeds)
        assert not [alive for alive in WATCHED[rank] if alive() is not None]
        self.part[rank] = 1
        hooks = [end.register_hook(leave) for end, leave in owner.ends]
        with Products() as products:
            back.of_weights()
        self.products[rank] = products.counted["mm"]
        for hook in hooks:
            hook.remove()
        self.part[rank] = 0

    def count(self, acquire: Any) -> Any:
        def acquire_again(run: Any) -> Any:
            self.redeemed[zf.rank()][self.part[zf.rank()]] += 1
            return acquire(run)

        return acquire_again


def run(stage: int, remat: bool, split: bool) -> tuple[Split, list[Any]]:
    """Two steps; of each rank the parameters, the loss, and bytes sent by kind."""
    way = Split()

    def rank() -> Any:
        tx = optim.sgd(0.1)
        step = zf.train_step(way.loss, tx)
        step = zf.remat(step) if remat else step
        step = zf.shard(step, stage=stage)
        state = step.place(zf.TrainState.create(initial(), tx))
        batch = torch.eye(5, dtype=D)[[1, 2, 2 * zf.rank(), 4]]
        with ledger() as led:
            for _ in range(2):
                state, metrics = step(state, batch)
        params = zf.tree.leaves(step.unplace(state).params)
        return params, metrics["loss"], dict(led.by_kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "go_back", lambda *args: (way.parts if split else way.whole)(*args))
        acquire = unit_runs.UnitRun.acquire_again
        patch.setattr(unit_runs.UnitRun, "acquire_again", way.count(acquire))
        return way, zf.simulate(RANKS)(rank)()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_in_two_parts(stage: int, remat: bool) -> None:
    """Gradients leave once, and nothing is sent, or gathered, for the second part."""
    before, expected = run(stage, remat, split=False)
    way, got = run(stage, remat, split=True)
    for rank in range(RANKS):
        for x, y in zip(got[rank][0], expected[rank][0], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        dx, other = way.grads[rank], before.grads[rank]
        assert dx is not None and other is not None
        torch.testing.assert_close(dx, other, rtol=1e-12, atol=1e-12)
        assert got[rank][1:] == expected[rank][1:]
        asked, usual = way.redeemed[rank], before.redeemed[rank][0]
        assert asked[1] == 0  # products of weights take activations, and gradients
        assert usual <= asked[0] <= 2 * usual  # a norm is asked twice, of what is there
        assert (asked[0] > 0) == (stage == 3 and not remat)
        assert way.products[rank] == (0 if remat else 2 * LAYERS + 2)
