"""PowerSGD, step by step, against a literal simulation; and the laws of ``compress_grads``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_near, assert_same, numbers, regression
from tests.laws.models import CASES
from zfunc import optim, tree

F64 = torch.float64
STAGES = (0, 1, 2, 3)
SGD = optim.sgd(0.02, momentum=0.9)
STEPS = 5


def wide() -> Any:
    """A matrix, a stack of them, and leaves that travel as they are."""
    layers = [{"w": numbers((12, 12), i), "b": numbers((12,), 10 + i)} for i in range(2)]
    return {
        "first": numbers((6, 3, 4), 5),
        "blocks": zf.Layers(layers),
        "head": numbers((12, 1), 6),
        "gain": torch.ones((), dtype=F64),
    }


def loss(params: Any, batch: Any) -> Tensor:
    x = batch["x"] @ params["first"].reshape(6, 12)
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), params["blocks"], x)
    return ((x @ params["head"]) * params["gain"] - batch["y"]).square().mean()


def simulated(ranks: int, rank: int, started: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Parameters after each step: SGD with momentum on means of low rank."""
    params, bases = tree.flatten_names(wide()), dict(started)
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    errors = [{name: torch.zeros_like(p) for name, p in params.items()} for _ in range(ranks)]
    seen = []
    for i in range(STEPS):
        owed: list[dict[str, Tensor]] = []
        for r in range(ranks):
            rows = 12 // ranks
            mine = {k: x[r * rows : (r + 1) * rows] for k, x in regression(i, F64).items()}
            layers = [{k: params[f"blocks.{j}.{k}"] for k in "wb"} for j in range(2)]
            plain = {k: params[k] for k in ("first", "head", "gain")}
            full = {**plain, "blocks": zf.Layers(layers)}
            grads = tree.flatten_names(zf.value_and_grad(loss)(full, mine)[1])
            owed.append({name: g + errors[r][name] for name, g in grads.items()})
        for name, p in params.items():
            matrices = [row[name].reshape(p.shape[0] if p.ndim else 1, -1) for row in owed]
            if name in bases:
                left = torch.stack([m @ bases[name] for m in matrices]).mean(0)
                left = torch.linalg.qr(left).Q
                bases[name] = torch.stack([m.T @ left for m in matrices]).mean(0)
                mean = left @ bases[name].T
            else:
                mean = torch.stack(matrices).mean(0)
            for r in range(ranks):
                errors[r][name] = (matrices[r] - mean).view(p.shape)
            momentum[name] = 0.9 * momentum[name] + mean.view(p.shape)
            params = {**params, name: p - 0.02 * momentum[name]}
        seen.append(params)
    return seen


def made(stage: int, rank: int = 2, tx: Any = SGD) -> tuple[Any, Any]:
    step = zf.shard(zf.train_step(loss, tx), stage=stage, unit_bytes=600)
    step = zf.compress_grads(step, method="powersgd", rank=rank)
    return step, step.place(zf.TrainState.create(wide(), tx))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_the_published_algorithm(stage: int, ranks: int) -> None:
    def body() -> Any:
        step, state = made(stage)
        started, seen = dict(state.aux["compress_grads"]["bases"]["params"]), []
        for i in range(STEPS):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(regression(i, F64)))
            seen.append(tree.flatten_names(zf.full(state.params)))
            assert step.describe().sent_bytes == led.total_bytes
        return seen, started

    runs = zf.simulate(ranks)(body)()
    assert set(runs[0][1]) == {"first", "blocks.0.w", "blocks.1.w"}
    expected = simulated(ranks, 2, runs[0][1])
    for seen, _ in runs:
        assert_same(seen, runs[0][0])
        for got, want in zip(seen, expected, strict=True):
            assert_near(got, want, 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_does_not_pay_is_the_plain_step(stage: int) -> None:
    def body() -> Any:
        step, state = made(stage, rank=12, tx=ADAMW)
        plain = zf.shard(zf.train_step(loss, ADAMW), stage=stage, unit_bytes=600)
        other = plain.place(zf.TrainState.create(wide(), ADAMW))
        for i in range(3):
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            other, _ = plain(other, zf.local_batch(regression(i, F64)))
        return step.unplace(state).params, plain.unplace(other).params

    for got, expected in zf.simulate(3)(body)():
        assert_near(got, expected, 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_bases_and_errors_go_on(stage: int) -> None:
    """Bitwise on as many ranks; on others what is owed in the mean, and the bases, stay."""

    def body(again: bool) -> Any:
        step, state = made(stage)
        for i in range(4):
            if again and i == 2:
                state = step.place(step.unplace(state))
            state, _ = step(state, zf.local_batch(regression(i, F64)))
        bad = zf.local_batch(regression(4, F64))
        bad["x"][0, 0] = math.nan
        after, _ = step(state, bad)
        for name in ("worker", "bases"):
            assert_same(after.aux["compress_grads"][name], state.aux["compress_grads"][name])
        assert int(after.aux["compress_grads"]["skipped"]) == 1
        return step.unplace(state)

    through, straight = zf.simulate(3)(body)(True), zf.simulate(3)(body)(False)
    assert_same(through, straight)
    full = straight[0]

    def elsewhere() -> Any:
        step = made(stage)[0]
        return step.unplace(step.place(full))

    for after in zf.simulate(2)(elsewhere)():
        carried, was = after.aux["compress_grads"], full.aux["compress_grads"]
        assert_same(carried["bases"], was["bases"])
        means = [tree.map(lambda e: e.mean(0), x["worker"]["params"]) for x in (carried, was)]
        assert_near(means[0], means[1], 1e-12)


@pytest.mark.parametrize("name", ["tiny leaves", "frozen", "mixed dtypes", "uneven batch"])
def test_it_bears_all_kinds_of_trees(name: str) -> None:
    case = CASES[name]
    for stage in STAGES:

        def body(stage: int = stage, donated: bool = False) -> Any:
            step = zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600, roles=case.roles)
            step = zf.compress_grads(step, method="powersgd", rank=1)
            step = zf.donate(step) if donated else step
            state = step.place(case.state(ADAMW, F64))
            for i in range(3):
                state, _ = step(state, zf.local_batch(case.batch(i, F64)))
            return step.unplace(state)

        plain = zf.simulate(2)(body)()
        assert_same(plain[0], plain[1])
        assert_same(zf.simulate(2)(body)(donated=True), plain)


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_of_empty_leaves_has_nothing_to_send(stage: int) -> None:
    params = {"blocks": zf.Layers([{"none": torch.zeros(0, 4)}, {"none": torch.zeros(0)}])}
    params["w"] = numbers((8, 8), 3)

    def body() -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            x = zf.scan(lambda q, x: x + q["none"].sum(), p["blocks"], x @ p["w"])
            return x.square().mean()

        step = zf.shard(zf.train_step(loss, SGD), stage=stage, unit_bytes=64)
        step = zf.compress_grads(step, method="powersgd", rank=1)
        state = step.place(zf.TrainState.create(params, SGD))
        for i in range(2):
            state, _ = step(state, numbers((2, 8), i + zf.rank()))
        return step.unplace(state).params

    a, b = zf.simulate(2)(body)()
    assert_same(a, b)
    assert not torch.equal(a["w"], params["w"])
    assert a["blocks"][0]["none"].shape == (0, 4)
