"""Optimizers and schedules by optax's names against optax's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.unit.optax_cases import (
    COUNTS,
    FACTORED,
    JOINED,
    MATRICES,
    SAME,
    SCHEDULES,
    SHAPES,
    STEPS,
    gradients,
    matrices,
    parameters,
)
from zfunc import optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut

RECORDED = json.loads(Path(__file__).with_name("optax.json").read_text())
Tree = Any


def tensors(numbers: dict[str, list[float]]) -> Tree:
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}


OURS = {name: getattr(optim, maker)(*args, **how) for name, (maker, args, how) in SAME.items()}
OURS["lookahead"] = optim.lookahead(optim.adam(0.1), 3, 0.4)
OURS["MultiSteps"] = optim.MultiSteps(optim.adam(0.1), 3)
OURS["inject_hyperparams"] = optim.inject_hyperparams(optim.adam)(
    lambda count: 0.1 / (1 + count.double()), b1=0.8
)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_an_optimizer_trains_as_optax_does(name: str, placed: bool, additive: bool) -> None:
    tx, params = OURS[name], tensors(parameters())
    layout = make_layout(params)
    place = (lambda x: cut(layout, x, 0)) if placed else (lambda x: x)
    params, state = place(params), tx.init(place(params))
    for step in range(STEPS):
        grads = place(tensors(gradients(step)))
        updates, state = (tx.additive if additive else tx.update)(grads, state, params)
        params = optim.apply_updates(params, updates)
    want = tensors(RECORDED["trained"][name])
    assert want.keys() == SHAPES.keys()
    for leaf, x in tree.full(params).items():
        torch.testing.assert_close(x, want[leaf], rtol=1e-11, atol=1e-12)


ADAFACTORS = {
    name: getattr(optim, maker)(*args, **how) for name, (maker, args, how) in FACTORED.items()
}
ADAFACTORS["scale_by_factored_rms"] = optim.scale_by_factored_rms(min_dim_size_to_factor=3)


@pytest.mark.parametrize("name", ADAFACTORS)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_factored_moments_are_optax_s_on_three_ranks(name: str, stage: int | None) -> None:
    tx = ADAFACTORS[name]

    def shaped(numbers: dict[str, list[float]]) -> Tree:
        return {leaf: x.view(MATRICES[leaf]) for leaf, x in tensors(numbers).items()}

    def loss_fn(params: Tree, step: int) -> torch.Tensor:
        pairs = zip(params.values(), shaped(matrices(step)).values(), strict=True)
        return torch.stack([(p * g).sum() for p, g in pairs]).sum()

    def body() -> Tree:
        step = zf.train_step(loss_fn, tx)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = zf.TrainState.create(shaped(matrices()), tx)
        state = state if stage is None else step.place(state)
        for number in range(STEPS):
            state, _ = step(state, number)
        return tree.full(state.params)

    # optax computes the rate of decay in float32, but for the last.
    exact = {"rtol": 1e-6, "atol": 1e-7}
    if name in ("clip_by_block_rms", "scale_by_param_block_rms", "scale_by_factored_rms"):
        exact = {"rtol": 1e-9, "atol": 1e-10}
    for found in zf.simulate(1 if stage is None else 3)(body)():
        for leaf, x in tensors(RECORDED["factored"][name]).items():
            torch.testing.assert_close(found[leaf].reshape(-1), x, **exact)


def made() -> dict[str, Any]:
    found = {
        name: getattr(optim, maker)(*args, **how)
        for name, (_, (maker, args, how)) in SCHEDULES.items()
    }
    names, boundaries = JOINED
    return found | {"join_schedules": optim.join_schedules([found[n] for n in names], boundaries)}


@pytest.mark.parametrize("name", RECORDED["schedules"])
def test_a_schedule_is_optax_s(name: str) -> None:
    found = [made()[name](count) for count in COUNTS]
    counted = [made()[name](torch.tensor(count)) for count in COUNTS]
    want = torch.tensor(RECORDED["schedules"][name], dtype=torch.float64)
    torch.testing.assert_close(
        torch.stack(found), want, rtol=1e-6, atol=1e-7
    )  # optax's are float32
    torch.testing.assert_close(torch.stack(counted), torch.stack(found), rtol=0, atol=0)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_warmup_stable_decay_is_three_schedules_in_a_row(shape: Any, warmup: int) -> None:
    schedule = optim.warmup_stable_decay(2.0, warmup, 20, 6, end=0.2, start=0.1, shape=shape)
    falls = {
        "linear": optim.linear(2.0, 0.2, 6),
        "cosine": optim.cosine(2.0, 6, end=0.2),
        "sqrt": lambda n: 2.0 - 1.8 * (torch.as_tensor(n).double() / 6).clamp(0, 1).sqrt(),
    }
    parts = [optim.constant(2.0), falls[shape]]
    at = [14]
    if warmup:
        parts, at = [optim.linear(0.1, 2.0, warmup), *parts], [warmup, *at]
    want = optim.join_schedules(parts, at)
    for count in range(25):
        assert schedule(count).item() == pytest.approx(want(count).item(), rel=1e-12)


BAD: dict[str, Any] = {
    "joined at": lambda: optim.join_schedules([optim.constant(1.0)], [3]),
    "ascending": lambda: optim.join_schedules([optim.constant(1.0)] * 3, [5, 5]),
    "negative": lambda: optim.piecewise_constant(1.0, {3: -0.5}),
    "rate is 0": lambda: optim.exponential(1.0, 0.0, 3),
    "steps is 0": lambda: optim.polynomial(1.0, 0.0, 1, 0),
    "decay is 0": lambda: optim.warmup_stable_decay(1.0, 0, 9, 0),
    "steps - warmup - decay": lambda: optim.warmup_stable_decay(1.0, 5, 9, 5),
    "'linear', 'cosine', 'sqrt'": lambda: optim.warmup_stable_decay(1.0, 0, 9, 3, shape="root"),  # type: ignore[arg-type]
    "max_delta is 0": lambda: optim.clip(0.0),
    "sync_period is 0": lambda: optim.lookahead(optim.sgd(0.1), 0, 0.5),
    "every_k is 0": lambda: optim.MultiSteps(optim.sgd(0.1), 0),
    "static_args names rate; sgd takes lr": lambda: optim.inject_hyperparams(optim.sgd, "rate"),
}


@pytest.mark.parametrize("told", BAD)
def test_bad_arguments_say_what_is_wrong(told: str) -> None:
    with pytest.raises(ValueError, match=told):
        BAD[told]()


def test_lookahead_needs_the_parameters() -> None:
    tx = optim.lookahead(optim.sgd(0.1), 2, 0.5)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(torch.ones(1), tx.init(torch.ones(1)))


def test_numbers_that_are_changed_in_a_run() -> None:
    tx = optim.inject_hyperparams(optim.adamw)(0.1, mask=lambda path: path == "w", weight_decay=0.5)
    params = tensors(parameters())
    state = tx.init(params)
    assert {name: x.item() for name, x in state.hyperparams.items()} == {
        "lr": 0.1,
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.5,
    }
    state.hyperparams["lr"] = 0.01  # a number, as users write it
    updates, after = tx.update(tensors(gradients(0)), state, params)
    plain = optim.adamw(0.01, mask=lambda path: path == "w", weight_decay=0.5)
    want, _ = plain.update(tensors(gradients(0)), plain.init(params), params)
    torch.testing.assert_close(tree.full(updates), tree.full(want), rtol=0, atol=0)
    assert after.hyperparams["lr"].item() == 0.01


def test_multi_steps_of_a_growing_number() -> None:
    tx = optim.MultiSteps(optim.sgd(1.0), lambda update: update + 1, use_grad_mean=False)
    state, seen = tx.init(torch.zeros(1)), []
    for n in range(6):
        updates, state = tx.update(torch.tensor([float(2**n)]), state)
        seen.append(-updates.item())
    assert seen == [1.0, 0.0, 6.0, 0.0, 0.0, 56.0]
