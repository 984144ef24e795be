"""Overflows and loss scales: a gradient that is not finite leaves a step out, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, regression, trained
from tests.laws.covering import pairs
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import forward, stack
from tests.laws.test_precision_laws import F16, F32, STAGES, cast_loss, wrapped
from zfunc import optim, tree
from zfunc.optim import DynamicScale, next_scale


def spoiled(leaf: str, value: float) -> Any:
    """A loss whose gradient at one leaf is not finite, on rank 0 alone, when the batch says so."""

    def loss(params: Any, batch: Any) -> Tensor:
        bad = value if batch["bad"] and zf.rank() == 0 else 0.0
        return cast_loss(params, batch) + bad * tree.get(params, leaf).sum().float()

    return loss


@pytest.mark.parametrize(
    ("stage", "leaf", "value"),
    pairs(
        (None, *STAGES),
        ("first.b", "blocks.1.w", "head.w"),
        (float("nan"), float("inf")),
    ),
)
def test_an_overflow_anywhere_leaves_the_step_out_everywhere(
    stage: int | None, leaf: str, value: float
) -> None:
    case = trained(stack, spoiled(leaf, value))

    def body() -> None:
        for donated in (False, True):
            step = zf.precision(case.step(ADAMW), compute=F16, loss_scale=DynamicScale(power=4))
            step = wrapped(step, stage, donated)
            batch = zf.local_batch(regression(0, F32))
            state, fine = step(step.place(case.state(ADAMW, F32)), {**batch, "bad": False})
            before = step.unplace(state)
            state, metrics = step(state, {**batch, "bad": True})
            after = step.unplace(state)
            assert not bool(fine["overflow"]) and "overflow_leaf" not in fine
            assert bool(metrics["overflow"]) and metrics["overflow_leaf"] == leaf
            assert float(metrics["loss_scale"]) == 16
            assert_same(after.replace(step=before.step), before)
            assert int(after.step) == int(before.step) + 1
            state, _ = step(state, {**batch, "bad": True})
            state, metrics = step(state, {**batch, "bad": False})
            assert float(metrics["loss_scale"]) == 8  # the second overflow halved it
            assert not torch.equal(
                step.unplace(state).params["head"]["w"], before.params["head"]["w"]
            )

    zf.simulate(1 if stage is None else 2)(body)()


def test_states_of_the_users_own_are_reverted_too() -> None:
    """A dict with an average; no metrics dict, nothing added to what the step returns."""
    params = stack(F32)

    def step(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(spoiled("head.w", float("inf")))(state["params"], batch)
        updates, opt_state = ADAMW.update(grads, state["opt_state"], state["params"])
        new = optim.apply_updates(state["params"], updates)
        average = tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], new)
        return {
            "params": new,
            "opt_state": opt_state,
            "average": average,
            "step": state["step"] + 1,
        }

    full = {
        "params": params,
        "opt_state": ADAMW.init(params),
        "average": tree.map(torch.clone, params),
        "step": torch.tensor(0),
    }

    rules = DynamicScale(power=4)

    def body(stage: int) -> None:
        one = zf.shard(zf.precision(step, compute=F16, loss_scale=rules), stage=stage)
        state = one.place(full)
        batch = {**zf.local_batch(regression(0, F32)), "bad": True}
        skipped = one.unplace(one(state, batch))
        assert int(skipped["step"]) == 1
        assert_same({**skipped, "step": full["step"]}, full)
        assert not torch.equal(
            one.unplace(one(state, {**batch, "bad": False}))["average"]["head"]["w"],
            params["head"]["w"],
        )

    for stage in STAGES:
        zf.simulate(2)(body)(stage)


def test_an_overflow_at_the_smallest_scale_is_an_error() -> None:
    case = trained(stack, spoiled("head.w", float("inf")))
    rules = DynamicScale(power=1, hysteresis=1, minimum=2.0)
    step = zf.precision(case.step(ADAMW), compute=F16, loss_scale=rules)
    with pytest.raises(zf.NonFiniteError, match=r"head\.w overflows at a loss scale of 2"):
        step(step.place(case.state(ADAMW, F32)), {**regression(0, F32), "bad": True})


def test_an_overflow_after_memory_was_given_away_is_an_error() -> None:
    """It cannot be left out; without donation it can."""
    gan = HAND_WRITTEN["gan"]

    def bad_step(state: Any, batch: Any) -> Any:
        new, _ = gan.step(ADAMW)(state, batch)
        zf.value_and_grad(lambda p: forward(p, batch["x"]).sum() * float("inf"))(new["g"])
        return new, {}

    step = zf.precision(bad_step, roles=gan.roles)
    full = gan.state(ADAMW, F32)
    state, metrics = step(step.place(full), regression(0, F32))
    assert bool(metrics["overflow"])
    assert_same(step.unplace(state), full)
    step = zf.donate(step)
    with pytest.raises(zf.NonFiniteError, match="donated and overwritten"):
        step(step.place(full), regression(0, F32))


def reference_scale(rules: DynamicScale, overflows: list[bool]) -> list[float]:
    """The rules once more, as an iteration counter would have them."""
    scale, hysteresis, last, out = 2.0**rules.power, rules.hysteresis, -1, []
    for step, overflow in enumerate(overflows):
        out.append(scale)
        if overflow:
            if hysteresis == 1:
                scale = max(scale / 2, rules.minimum)
            else:
                hysteresis -= 1
            last = step
        else:
            hysteresis = rules.hysteresis if rules.consecutive else hysteresis
            since = step - last - 1
            if since > 0 and since % rules.window == 0:
                hysteresis = rules.hysteresis
                scale = min(scale * 2, 2.0**127)
    return out


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_scales_follow_the_rules(window: int, hysteresis: int, consecutive: bool) -> None:
    rules = DynamicScale(4, window, hysteresis, minimum=2.0**-40, consecutive=consecutive)
    overflows = (torch.rand(200, generator=torch.Generator().manual_seed(window)) < 0.2).tolist()
    state, scales = rules.init(), []
    for overflow in overflows:
        kept = [x.clone() for x in state]
        scales.append(float(state.scale))
        new = next_scale(state, overflow, rules)
        assert all(torch.equal(x, y) for x, y in zip(state, kept, strict=True))
        state = new
    assert scales == reference_scale(rules, overflows)
    assert len(set(scales)) > 3


@pytest.mark.parametrize("power", [128, 2000, float("nan")])
def test_a_scale_that_float32_has_not_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match="power is an exponent"):
        DynamicScale(power=power)
    assert DynamicScale(power=127).init().scale.isfinite()


def test_the_first_doubling_takes_one_good_step_more_than_the_window() -> None:
    rules = DynamicScale(power=3, window=4)
    state = rules.init()
    scales = []
    for _ in range(10):
        state = next_scale(state, False, rules)
        scales.append(float(state.scale))
    assert scales == [8.0] * 4 + [16.0] * 4 + [32.0] * 2
