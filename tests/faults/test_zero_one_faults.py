"""0/1 Adam with what makes no sense: numbers that are not finite, partners, optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, train
from tests.laws.models import stack_loss
from tests.laws.zero_one import F64, FREEZE, STACK, wrapped
from zfunc import optim


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("steps", [3, 12, 14])
def test_a_gradient_that_is_not_finite_is_skipped_everywhere(steps: int, donated: bool) -> None:
    """In a step with compressed gradients, in a local one and in one that averages."""
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02))

    def body() -> None:
        step = wrapped(STACK, tx, freeze=6, local_step_scaler=2)
        step = zf.donate(step) if donated else step
        state = step.place(STACK.state(tx, F64))
        for i in range(steps - 1):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        before = step.unplace(state)
        batch = zf.local_batch(STACK.batch(4, F64))
        if zf.rank() == 1:
            batch["x"][0, 0] = math.nan
        state, _ = step(state, batch)
        after = step.unplace(state)
        was, now = (x.aux["compress_grads"] for x in (before, after))
        assert int(after.step) == steps
        assert int(now["skipped"]) == 1
        for name in ("worker", "server", "zero_one"):
            assert_same(now[name], was[name])
        assert_same((after.params, after.opt_state), (before.params, before.opt_state))
        state, metrics = step(state, zf.local_batch(STACK.batch(5, F64)))
        assert bool(metrics["loss"].isfinite())

    zf.simulate(3)(body)()


def test_too_few_updates_before_a_late_freeze_are_told_from_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """30 steps would be enough, but second moments have learnt in 8 of them."""
    tx = optim.adam(0.01, b2=0.95)

    def body() -> None:
        step = wrapped(STACK, tx, freeze=30)
        train(step, step.place(STACK.state(tx, F64)), STACK, 31)

    zf.simulate(2)(body)()
    (said,) = [r.getMessage() for r in caplog.records if "second moments" in r.getMessage()]
    assert "frozen after 8 updates" in said
    assert "10 of them updates at least (var_update_scaler=4 " in said


@pytest.mark.parametrize(
    ("method", "freeze"), [("onebit", 100), ("zero_one", 100), ("zero_one", 5000)]
)
def test_a_late_step_with_a_new_optimizer_is_refused(method: str, freeze: int) -> None:
    """Its second moments would be frozen, or its gradients compressed, with nothing in them."""

    def body() -> None:
        step = zf.compress_grads(zf.shard(STACK.step(ADAMW), stage=0), method, freeze_step=freeze)
        state = step.place(STACK.state(ADAMW, F64).replace(step=torch.tensor(1000)))
        step(state, zf.local_batch(STACK.batch(0, F64)))

    with pytest.raises(zf.CompositionError, match=r"first step of an optimizer.*step=torch"):
        zf.simulate(2)(body)()


def test_only_adam_takes_steps_of_its_own() -> None:
    refused = (
        optim.sgd(0.1, momentum=0.9),
        optim.lamb(0.1),
        optim.lion(0.1),
        optim.chain(optim.adamw(0.1), optim.scale_by_schedule(0.5)),
        optim.masked(optim.adam(0.1), lambda path: "head" in path),
    )
    for tx in refused:

        def body(tx: Any = tx) -> None:
            step = wrapped(STACK, tx)
            state = step.place(STACK.state(tx, F64))
            step(state, zf.local_batch(STACK.batch(0, F64)))

        with pytest.raises(zf.CompositionError, match=r"optim\.adamw.*method='onebit'"):
            zf.simulate(2)(body)()


def test_gradients_averaged_before_are_refused_in_the_first_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        updates, _ = ADAMW.update(zf.reduced(grads), state.opt_state, state.params)
        return state.replace(params=optim.apply_updates(state.params, updates)), {}

    def body() -> None:
        wrap = zf.compress_grads(zf.shard(step, stage=0), "zero_one", freeze_step=FREEZE)
        wrap(wrap.place(STACK.state(ADAMW, F64)), zf.local_batch(STACK.batch(0, F64)))

    with pytest.raises(zf.CompositionError, match="averaged before the optimizer"):
        zf.simulate(2)(body)()


def test_what_cannot_keep_its_promise_says_what_to_use() -> None:
    step = STACK.step(ADAMW)
    for stage in (1, 2, 3):
        with pytest.raises(zf.CompositionError, match=r"stage=0\), or .*method='onebit'"):
            zf.compress_grads(zf.shard(step, stage=stage), "zero_one")
    sharded = zf.compress_grads(zf.shard(step, stage=0), "zero_one")
    for wrap in (zf.precision, lambda f: zf.quantize(f, target_bits=8)):
        with pytest.raises(zf.CompositionError, match="method='onebit'"):
            wrap(sharded)
    with pytest.raises(zf.CompositionError, match="already"):
        zf.compress_grads(sharded, "onebit")
    for arguments, message in (
        ({"freeze_step": 0}, "must learn first"),
        ({"var_update_scaler": 0}, "var_update_scaler=0"),
        ({"local_step_clipper": 1.5}, "local_step_clipper=1.5: expected a whole number"),
        ({"rank": 4}, "has no option rank"),
    ):
        with pytest.raises(ValueError, match=message):
            zf.compress_grads(step, "zero_one", **arguments)  # type: ignore[arg-type]
