"""Layers with checkpoints inside: what backward computes anew is no further call of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from zfunc import optim
from zfunc.probing.plans import plan_of

WIDTH = 8
TX = optim.sgd(0.3)
IDS = torch.arange(40).view(4, 10) % 7


class Plain(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.how = {"use_reentrant": reentrant}

    def mixed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.gate(x)) * self.up(x)

    def whole(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.mixed(self.norm(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)


class All(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.whole, x, **self.how)
        return out


class Columns(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(checkpoint(self.mixed, self.norm(x), **self.how))
        return out


class Between(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(checkpoint(torch.tanh, self.up(self.norm(x)), **self.how))
        return out


class Nested(All):
    def mixed(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().mixed, x, **self.how)
        return out


class Counting(Plain):
    """A checkpoint that is wrong by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def counted(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.mixed(x * self.calls[0])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(checkpoint(self.counted, x, **self.how))
        return out


def model_of(layer: Callable[[], nn.Module]) -> zf.Functional:
    torch.manual_seed(0)
    parts = nn.Embedding(10, WIDTH), layer(), layer(), nn.Linear(WIDTH, 10)
    return zf.functionalize(nn.Sequential(*parts).double())


@pytest.mark.parametrize("layer", [All, Columns, Between, Nested])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_checkpoint_changes_no_plan(layer: type[Plain], sequence: bool) -> None:
    found = plan_of(model_of(layer), 2, sequence=sequence)
    want = plan_of(model_of(Plain), 2, sequence=sequence)
    if layer is Between:  # which has no gate
        assert {"1.up.weight", "2.down.weight"} <= found.splits.keys()
        return
    assert (found.splits, found.roles, found.whole) == (want.splits, want.roles, want.whole)
    assert found.streams == want.streams and found.uncut == want.uncut


@pytest.mark.parametrize("layer", [All, Columns, Between, Nested])
def test_it_trains_like_one_process(layer: type[Plain]) -> None:
    model = model_of(layer)
    params = model.params

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        logits = model.apply(params, ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def trained(step: zf.Step) -> list[Tensor]:
        state = step.place(zf.TrainState.create(params, TX))
        for _ in range(3):
            state, _ = step(state, step.local_batch(IDS))
        return zf.tree.leaves(step.unplace(state).params)

    step = zf.train_step(loss_fn, TX)
    want = trained(step)
    for sequence in (False, True):
        ours = zf.shard(zf.split(step, model, tensor=2, sequence=sequence), stage=3)
        for found in zf.simulate(2)(trained)(ours):
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_that_computes_something_else_says_so() -> None:
    plan = plan_of(model_of(Counting), 2)
    assert "1.up.weight" not in plan.splits
    assert "computes something else in backward" in plan.whole["1"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("layer", [All, Columns])
def test_a_reentrant_checkpoint_keeps_products_whole_and_says_why(layer: Any) -> None:
    plan = plan_of(model_of(lambda: layer(reentrant=True)), 2)
    assert "1.up.weight" not in plan.splits
    assert "use_reentrant=True, in whose place zf.remat" in plan.whole["1.up"]


def test_a_layer_that_cannot_be_tried_runs_on_the_whole_stream() -> None:
    plan = plan_of(model_of(lambda: Between(reentrant=True)), 2, sequence=True)
    assert "use_reentrant=True" in plan.whole["1"]
    assert plan.uncut["1"].startswith("it fails on the example (RuntimeError: When use_reentrant")
