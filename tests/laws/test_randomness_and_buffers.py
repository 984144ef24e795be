"""Dropout is a function of key, step and rank; buffers are state, averaged over ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import ADAMW, Case, alone, assert_near, assert_same, cut_up, regression
from tests.laws.models import block, forward, mean_square, stack
from zfunc import optim, tree

F64 = torch.float64


def dropped(p: Any, x: Tensor) -> Tensor:
    return F.dropout(block(p, x), 0.3)


def dropout_loss(params: Any, batch: Any) -> Tensor:
    x = F.dropout(batch["x"], 0.2) + 0.01 * torch.randn_like(batch["x"])
    x = zf.scan(dropped, params["blocks"], x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def keyed_loss(params: Any, batch: Any, key: Tensor) -> Tensor:
    noise = zf.random.normal(key, tuple(batch["x"].shape), dtype=F64)
    return mean_square(forward(params, batch["x"] + 0.1 * noise), batch["y"])


def random_case(loss: Any, seed: int = 5) -> Case:
    return Case(
        lambda tx, dtype: zf.TrainState.create(stack(dtype), tx, key=seed),
        lambda tx: zf.train_step(loss, tx),
        regression,
    )


@pytest.mark.parametrize("loss", [dropout_loss, keyed_loss])
def test_randomness_depends_on_key_step_and_rank_alone(loss: Any) -> None:
    """Not on the stage, the cut, the process's own generator, or on what ran before."""
    case = random_case(loss)
    torch.manual_seed(1)
    reference = cut_up(case, 3, stage=0)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    for how in ({"stage": 2}, {"stage": 3}, {"stage": 3, "unit_bytes": 1, "prefetch": 0}):
        for run, expected in zip(cut_up(case, 3, **how), reference, strict=True):
            assert_near(run, expected, 1e-9)
    assert torch.equal(before, torch.get_rng_state())
    other = cut_up(random_case(loss, seed=6), 3, stage=3)
    assert other[0][0][0]["loss"] != reference[0][0][0]["loss"]
    for run in cut_up(case, 1, stage=3):
        assert_same(run, alone(case))


def test_every_step_and_rank_and_layer_draws_numbers_of_its_own() -> None:
    masks: list[Tensor] = []

    def loss(params: Any, batch: Any) -> Tensor:
        def one(p: Any, x: Tensor) -> Tensor:
            masks.append(F.dropout(torch.ones(40), 0.5))
            return x @ p["w"]

        x = zf.scan(one, params["blocks"], batch["x"])
        return (x @ params["head"]["w"]).mean()

    cut_up(random_case(loss), 2, stage=3, steps=3)
    assert len(masks) == 2 * 3 * 3
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)


def test_dropout_under_recomputation_is_that_of_the_forward() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = checkpoint(lambda x, p=p: zf.layer(block, p, x), x, use_reentrant=False)
            x = F.dropout(x, 0.2)
        return mean_square(x @ params["head"]["w"], batch["y"])

    def plain(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = F.dropout(zf.layer(block, p, x), 0.2)
        return mean_square(x @ params["head"]["w"], batch["y"])

    expected = cut_up(random_case(plain), 2, stage=3)
    for run, wanted in zip(cut_up(random_case(loss), 2, stage=3), expected, strict=True):
        assert_near(run, wanted, 1e-9)


def test_evaluation_draws_nothing_from_the_process() -> None:
    def body() -> Any:
        step = zf.shard(random_case(dropout_loss).step(ADAMW), stage=3)
        state = step.place(random_case(dropout_loss).state(ADAMW, F64))
        x = regression(0, F64)["x"]
        return [zf.evaluate(forward)(state.params, x) for _ in range(2)]

    plain = forward(stack(F64), regression(0, F64)["x"])
    for outs in zf.simulate(2)(body)():
        for out in outs:
            assert_near(out, plain, 1e-12)
            assert not out.requires_grad


# Buffers


def normed() -> zf.Functional:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = layers, nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x)

    return zf.functionalize(Net().double().train())


def norm_loss(model: zf.Functional) -> Any:
    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, new = model.apply(params, batch["x"], buffers=buffers, mutable=True)
        return mean_square(out, batch["y"]), new

    return loss


def averaged_over_parts(model: zf.Functional, parts: int, steps: int) -> tuple[list[Any], Any]:
    """What data parallelism means for BatchNorm: each part has statistics of its own."""
    state = zf.TrainState.create(model.params, ADAMW, buffers=model.buffers)
    losses = []
    for i in range(steps):
        batch = regression(i, F64)
        rows = [{k: v.chunk(parts)[j] for k, v in batch.items()} for j in range(parts)]
        outs = [
            zf.value_and_grad(norm_loss(model), has_aux=True)(state.params, b, state.buffers)
            for b in rows
        ]
        losses.append(sum(loss for (loss, _), _ in outs) / parts)
        grads = tree.map(lambda *g: sum(g) / parts, *(g for _, g in outs))
        buffers = optree.tree_map(
            lambda *b: sum(b) / parts if b[0].is_floating_point() else b[0],
            *(new for (_, new), _ in outs),
        )
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(
            params=params, opt_state=opt_state, buffers=buffers, step=state.step + 1
        )
    return losses, state


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_norm_statistics_are_means_over_ranks(stage: int) -> None:
    model = normed()
    case = Case(
        lambda tx, dtype: zf.TrainState.create(model.params, tx, buffers=model.buffers),
        lambda tx: zf.train_step(norm_loss(model), tx),
        regression,
    )
    given = {name: b.clone() for name, b in model.buffers.items()}
    for ranks in (1, 2, 3):
        losses, state = averaged_over_parts(model, ranks, 3)
        for metrics, end in cut_up(case, ranks, steps=3, stage=stage):
            assert_near([m["loss"] for m in metrics], losses, 1e-9)
            assert_near(end, state, 1e-9)
            assert end.buffers["layers.0.1.num_batches_tracked"] == 3
    assert_same(model.buffers, given)


def tied_across_units() -> zf.Functional:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
            self.layers[2].weight = self.layers[0].weight
            self.outer = nn.Linear(5, 6, bias=False)
            self.outer.weight = nn.Parameter(self.outer.weight.detach())
            self.last = nn.Linear(6, 5)
            self.last.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.outer(torch.tanh(self.inner(x)))
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.last(x).sum(1, keepdim=True)

    return zf.functionalize(Net().double())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_tied_within_and_across_units(stage: int) -> None:
    model = tied_across_units()

    def loss(params: Any, batch: Any) -> Tensor:
        return mean_square(model.apply(params, batch["x"]), batch["y"])

    case = Case(
        lambda tx, dtype: zf.TrainState.create(model.params, tx),
        lambda tx: zf.train_step(loss, tx),
        regression,
    )
    assert "layers.2.weight" not in tree.flatten_names(model.params)
    reference = alone(case)
    for ranks in (1, 2, 3):
        for metrics, end in cut_up(case, ranks, stage=stage, donated=ranks == 2):
            assert_near((metrics, end), reference, 1e-9)
