"""What ``compress_grads`` does with numbers and arguments that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, numbers, train
from tests.laws.compressed import CLIPPED, F64, STACK, STAGES, runs_of, wrapped
from tests.laws.covering import pairs
from tests.laws.models import stack
from zfunc import optim, tree

# Faults


@pytest.mark.parametrize(
    ("stage", "bad", "donated"), pairs(STAGES, [float("nan"), float("inf")], [False, True])
)
def test_a_gradient_that_is_not_finite_is_skipped_everywhere(
    stage: int, bad: float, donated: bool
) -> None:
    def body() -> None:
        step = wrapped(STACK, CLIPPED, stage, 2)
        step = zf.donate(step) if donated else step
        state = step.place(STACK.state(CLIPPED, F64))
        for i in range(4):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        before = step.unplace(state)
        batch = zf.local_batch(STACK.batch(4, F64))
        if zf.rank() == 1:
            batch["x"][0, 0] = bad
        state, _ = step(state, batch)
        after = step.unplace(state)
        assert int(after.step) == 5 and int(after.aux["compress_grads"]["skipped"]) == 1
        assert_same(after.params, before.params)
        assert_same(after.opt_state, before.opt_state)
        for errors in ("worker", "server"):
            assert_same(after.aux["compress_grads"][errors], before.aux["compress_grads"][errors])
        state, metrics = step(state, zf.local_batch(STACK.batch(5, F64)))
        assert bool(metrics["loss"].isfinite())

    zf.simulate(3)(body)()


# Bad input


def test_bad_arguments_say_what_there_is() -> None:
    step = STACK.step(ADAMW)
    for arguments, message in (
        ({"method": "twobit"}, "there are 'onebit', 'zero_one', 'int8', 'int4', 'powersgd'"),
        ({"method": "powersgd", "rank": 0}, "rank=0"),
        ({"freeze_step": -1}, "freeze_step=-1: expected"),
        ({"freeze_step": 0.2}, "freeze_step=0.2: expected"),
        ({"freeze_step": True}, "freeze_step=True: expected"),
        ({"groups": 3}, "has no option groups; it has group"),
        ({"group": 100}, "group=100"),
        ({"scaling": "max"}, "scaling='max'"),
    ):
        with pytest.raises(ValueError, match=message):
            zf.compress_grads(step, **arguments)  # type: ignore[arg-type]


def test_second_moments_that_nothing_went_into_are_refused() -> None:
    with pytest.raises(zf.CompositionError, match="freeze_step of 1 at least"):
        runs_of(STACK, 2, 1, 0)
    runs_of(STACK, 2, 1, 0, optim.sgd(0.01))


@pytest.mark.parametrize("method", ["onebit", "zero_one"])
def test_an_early_freeze_is_warned_of_once(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where second moments look back 20 steps, ten are the fewest; without any there is none."""
    for freeze, tx, said in ((3, optim.adam(0.01, b2=0.95), 1), (10, optim.adam(0.01, b2=0.95), 0)):

        def body(freeze: int = freeze, tx: Any = tx) -> None:
            step = wrapped(STACK, tx, 0, freeze, method=method)
            train(step, step.place(STACK.state(tx, F64)), STACK, freeze + 3)

        caplog.clear()
        zf.simulate(2)(body)()
        found = [r for r in caplog.records if f"frozen after {freeze} updates" in r.getMessage()]
        assert len(found) == said
        assert all("freeze_step='auto'" in r.getMessage() for r in found)


def test_a_state_of_another_step_is_refused() -> None:
    def body() -> None:
        plain = zf.shard(STACK.step(ADAMW), stage=2)
        with pytest.raises(zf.PlacementError, match="carries no errors of compression"):
            zf.compress_grads(plain)(
                plain.place(STACK.state(ADAMW, F64)), zf.local_batch(STACK.batch(0, F64))
            )

    zf.simulate(2)(body)()


def test_several_optimizers_that_donate_cannot_be_skipped_together() -> None:
    """The first has spent its memory when the second meets a NaN: that is said."""
    tx = optim.sgd(0.01, momentum=0.9)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).square().sum()

    def both(state: Any, batch: Any) -> Any:
        new = dict(state)
        for name in ("a", "b"):
            _, grads = zf.value_and_grad(loss)(state[name], batch[name])
            updates, new["of " + name] = tx.update(grads, state["of " + name], state[name])
            new[name] = optim.apply_updates(state[name], updates)
        return new

    def body(donated: bool) -> None:
        roles = {"a": "params", "b": "params", "of a": "opt_state", "of b": "opt_state"}
        step = zf.compress_grads(zf.shard(both, stage=2, roles=roles), freeze_step=1)
        step = zf.donate(step) if donated else step
        params = {"w": numbers((100,), 1)}
        models = {"a": params, "b": params, "of a": tx.init(params), "of b": tx.init(params)}
        state = step.place(models)
        good = {"a": numbers((100,), 2), "b": numbers((100,), 3)}
        for _ in range(3):
            state = step(state, good)
        bad = {**good, "b": good["b"] * torch.nan}
        if donated:
            with pytest.raises(zf.NonFiniteError, match="Leave out donate"):
                step(state, bad)
        else:
            assert_same(step.unplace(step(state, bad))["a"], step.unplace(state)["a"])

    for donated in (False, True):
        zf.simulate(2)(body)(donated)


def test_errors_take_what_describe_says() -> None:
    def body(stage: int) -> tuple[int, int, int]:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, torch.float32))
        carried = state.aux["compress_grads"]
        sizes = [tree.size_bytes(carried[name]) for name in ("worker", "server")]
        return sizes[0], sizes[1], len(state.params.layout.flats)

    count = sum(x.numel() for x in tree.leaves(stack(F64)))
    for stage in STAGES:
        for worker, server, flats in zf.simulate(2)(body)(stage):
            assert worker == 4 * count
            assert server <= (4 * (count // 2 + 96 * flats) if stage == 0 else 0)
