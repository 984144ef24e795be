"""Laws of ``compress_grads``: plain before it begins, the published algorithm behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    alone,
    assert_near,
    assert_same,
    cut_up,
    named,
    numbers,
    train,
)
from tests.laws.compressed import CLIPPED, F64, STACK, STAGES, runs_of, wrapped
from tests.laws.covering import Covering, each, pairs
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import stack_loss
from zfunc import optim, tree

OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": optim.sgd(0.02, momentum=0.9),
    "sgd": optim.sgd(0.02),
    "lion": optim.lion(0.002),
    "lamb": optim.lamb(0.02),
    "clipped": CLIPPED,
    "clipped lamb": optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(0.02)),
}
SOME = {
    name: {**READY_MADE, **HAND_WRITTEN}[name]
    for name in ("tiny leaves", "frozen", "mixed dtypes", "uneven batch", "gan", "the head")
}


@pytest.mark.parametrize(("name", "stage"), each(OPTIMIZERS, STAGES, times=2))
def test_before_it_begins_nothing_changes(name: str, stage: int) -> None:
    tx = OPTIMIZERS[name]
    plain = cut_up(STACK, 3, tx, steps=4, stage=stage, unit_bytes=600)
    for freeze in (4, "auto") if name == "adamw" else (4,):
        runs = runs_of(STACK, 3, stage, freeze, tx, steps=3)
        for run, expected in zip(runs, plain, strict=True):
            assert_same(run[0], expected[0][:3])
            assert not any("compress" in path for path in named(run[1]))


def test_on_one_rank_nothing_ever_changes() -> None:
    reference = alone(STACK, steps=6)
    for stage in STAGES:
        assert_same(runs_of(STACK, 1, stage, 2)[0], reference)
    metrics, state = train(
        zf.compress_grads(STACK.step(ADAMW), freeze_step=2), STACK.state(ADAMW, F64), STACK, 6
    )
    assert_same((metrics, state), reference)


@pytest.mark.parametrize(("name", "stage", "ranks"), pairs(SOME, STAGES, (2, 3)))
def test_ranks_agree_and_donating_changes_nothing(name: str, stage: int, ranks: int) -> None:
    runs = runs_of(SOME[name], ranks, stage, 2)
    for run in runs:
        assert_same(run, runs[0])
    assert_same(runs_of(SOME[name], ranks, stage, 2, donated=True), runs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_pure(stage: int) -> None:
    def body() -> None:
        step = wrapped(STACK, ADAMW, stage, 1)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(3):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        kept = [x.clone() for x in tree.leaves(state)]
        batch = zf.local_batch(STACK.batch(3, F64))
        first, second = step(state, batch), step(state, batch)
        assert_same(step.unplace(first[0]), step.unplace(second[0]))
        for x, y in zip(tree.leaves(state), kept, strict=True):
            assert torch.equal(x, y)

    zf.simulate(2)(body)()


@pytest.mark.parametrize(
    ("method", "stage", "bare"), pairs(["onebit", "int8", "powersgd"], STAGES, (False, True))
)
def test_gradients_that_share_memory_are_not_written_into(
    method: str, stage: int, bare: bool
) -> None:
    """Autograd gives both summands of a + b one gradient; each of them is a flat of its own."""
    params = {"a": numbers((64, 32), 1), "b": numbers((64, 32), 2), "c": numbers((2,), 3)}
    params["d"] = numbers((2,), 4)

    def trained_params(apart: bool) -> Any:
        def loss(p: Any, batch: Any) -> Tensor:
            a, b, c, d = (x * 1 if apart else x for x in p.values())
            rows = (a + b) * batch["x"].square().mean()
            return rows.square().mean() + (c + d).square().sum()

        def body() -> Any:
            how = {"freeze_step": 2} if method == "onebit" else {}
            step = zf.shard(zf.train_step(loss, ADAMW), stage=stage, unit_bytes=64)
            step = zf.compress_grads(step, method=method, **how)
            step = zf.precision(step, reduce=torch.bfloat16) if bare else step
            state = step.place(zf.TrainState.create(tree.map(kind, params), ADAMW, key=7))
            for i in range(4):
                state, _ = step(state, zf.local_batch({"x": kind(numbers((12, 6), i))}))
            return step.unplace(state).params

        def kind(x: Tensor) -> Tensor:
            return x.float() if bare else x

        return zf.simulate(2)(body)()

    assert_same(trained_params(False), trained_params(True))


def test_transforms_commute() -> None:
    step = STACK.step(ADAMW)
    wraps: list[Callable[[Any], Any]] = [
        lambda f: zf.shard(f, stage=1),
        zf.donate,
        lambda f: zf.compress_grads(f, freeze_step=3),
    ]
    a, b, c = wraps
    assert a(b(c(step))) == c(a(b(step))) == b(c(a(step)))
    with pytest.raises(zf.CompositionError, match="already"):
        c(a(c(step)))


@pytest.mark.parametrize(("method", "stage"), each(["int8", "int4"], STAGES))
def test_integers_follow_the_plain_run(method: str, stage: int) -> None:
    """From the first step, with any optimizer and with second moments that go on."""
    near = ["sgd", "momentum"]  # the others turn small changes into steps of full size
    others = [name for name in OPTIMIZERS if name not in near]
    turn = stage + (method == "int4")
    names = [near[turn % 2], *others[stage::4]]
    for name in OPTIMIZERS if Covering.whole else names:
        tx = OPTIMIZERS[name]
        plain = cut_up(STACK, 3, tx, steps=6, stage=stage, unit_bytes=600)[0]

        def body(tx: Any = tx) -> Any:
            step = wrapped(STACK, tx, stage, "auto", method=method)
            metrics, state = train(step, step.place(STACK.state(tx, F64)), STACK, 6)
            assert not state.aux["compress_grads"]["skipped"]
            return metrics, step.unplace(state)

        runs = zf.simulate(3)(body)()
        for run in runs:
            assert_same(run, runs[0])
        if name in near:
            gap = 0.005 if method == "int8" else 0.05
            assert_near(runs[0][1].params, plain[1].params, gap, name)
            assert not torch.equal(runs[0][1].params["head"]["w"], plain[1].params["head"]["w"])


# States that go elsewhere


@pytest.mark.parametrize("stage", STAGES)
def test_full_states_go_on_bitwise(stage: int) -> None:
    """Unplaced and placed again in the compression phase, errors and all."""

    def body(again: bool) -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(8):
            if again and i == 5:
                state = step.place(step.unplace(state))
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    assert_same(zf.simulate(3)(body)(True), zf.simulate(3)(body)(False))


@pytest.mark.parametrize(("method", "stage"), each(["onebit", "int8", "powersgd"], STAGES, times=2))
def test_saved_states_go_on_bitwise(method: str, stage: int, tmp_path: Path) -> None:
    """Placed states, saved by every rank and restored in the compression phase."""

    def body(saving: bool) -> Any:
        step = wrapped(STACK, ADAMW, stage, 2, method=method)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(7):
            if saving and i == 4:
                zf.save(tmp_path, state, step=i)
                state = zf.restore(tmp_path, step.place(STACK.state(ADAMW, F64)))
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    assert_same(zf.simulate(2)(body)(True), zf.simulate(2)(body)(False))


def test_a_saved_compressed_state_goes_on_alone(tmp_path: Path) -> None:
    """On one rank there is no place for errors; what to do instead is in the error."""

    def begin() -> Any:
        step = wrapped(STACK, ADAMW, 0, 2)
        _, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 4)
        zf.save(tmp_path, state, step=4)
        return step.unplace(state)

    def placed() -> Any:
        step = wrapped(STACK, ADAMW, 0, 2)
        return step, step.place(STACK.state(ADAMW, F64))

    full, (step, alone) = zf.simulate(3)(begin)()[0], placed()
    with pytest.raises(zf.CheckpointError, match=r"Only in .*simulate\(2\).*unplace it there"):
        zf.restore(tmp_path, alone)

    def opened() -> Any:
        step, state = placed()
        return step.unplace(zf.restore(tmp_path, state))

    state = step.place(zf.simulate(2)(opened)()[0])
    assert_same((state.params, state.opt_state), (full.params, full.opt_state))
    step(state, STACK.batch(4, F64))


@pytest.mark.parametrize("stage", STAGES)
def test_saved_errors_keep_their_mean_on_other_ranks(stage: int, tmp_path: Path) -> None:
    def begin() -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        _, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 5)
        zf.save(tmp_path, state, step=5)
        return step.unplace(state)

    full = zf.simulate(4)(begin)()[0]

    def go_on() -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = zf.restore(tmp_path, step.place(STACK.state(ADAMW, F64)))
        step(state, zf.local_batch(STACK.batch(5, F64)))
        return step.unplace(state)

    for after in zf.simulate(3)(go_on)():
        assert_near(owed(after), owed(full), 1e-12)
        assert_same((after.params, after.opt_state), (full.params, full.opt_state))


@pytest.mark.parametrize("stages", [(0, 0), (0, 3), (2, 2), (3, 0), (1, 0)])
def test_errors_keep_their_mean_on_other_ranks(stages: tuple[int, int]) -> None:
    """But those of momentum, at stage 0, and of gradients mean nothing to each other."""
    alike = bool(stages[0]) == bool(stages[1])

    def begin() -> Any:
        step = wrapped(STACK, ADAMW, stages[0], 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(5):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    full = zf.simulate(4)(begin)()[0]

    def go_on() -> Any:
        step = zf.compress_grads(
            zf.shard(STACK.step(ADAMW), stage=stages[1], unit_bytes=1 << 20), freeze_step=2
        )
        state = step.place(full)
        step(state, zf.local_batch(STACK.batch(5, F64)))
        return step.unplace(state)

    for after in zf.simulate(3)(go_on)():
        kept = owed(full) if alike else tree.map(torch.zeros_like, owed(full))
        assert_near(owed(after), kept, 1e-12)
        assert_same(after.opt_state, full.opt_state)


def owed(state: Any) -> Any:
    """What errors will add to the mean."""
    errors = state.aux["compress_grads"]
    worker = tree.map(lambda e: e.mean(0), errors["worker"]["params"])
    server = errors["server"].get("params")
    return worker if server is None else tree.map(torch.add, worker, server)


# When it begins


@pytest.mark.parametrize("stage", [0, 2])
def test_auto_waits_until_second_moments_have_settled(stage: int) -> None:
    """Gradients that keep their size settle at once; those that shrink do not."""
    tx = optim.adamw(1e-9, b2=0.9)

    def first_step(decay: float) -> int:
        def loss(params: Any, batch: Any) -> Tensor:
            return (params["w"] * batch).sum()

        def body() -> int:
            step = zf.compress_grads(zf.shard(zf.train_step(loss, tx), stage=stage))
            state = step.place(zf.TrainState.create({"w": torch.ones(64, dtype=F64)}, tx))
            for i in range(60):
                if state.aux["compress_grads"]["frozen"]:
                    return i
                state, _ = step(state, numbers((64,), 0) * decay**i)
            return 60

        (steps,) = set(zf.simulate(2)(body)())
        return steps

    assert first_step(1.0) == 20  # two windows of 1 / (1 - 0.9) steps
    assert first_step(0.9) == 60


def test_auto_does_not_wait_for_moments_that_there_are_none_of() -> None:
    tx = optim.sgd(0.01)

    def body() -> bool:
        step = wrapped(STACK, tx, 2, "auto")
        state, _ = step(step.place(STACK.state(tx, F64)), zf.local_batch(STACK.batch(0, F64)))
        return bool(state.aux["compress_grads"]["frozen"])

    assert zf.simulate(2)(body)() == [True, True]


# Steps that look at gradients themselves


def handwritten(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        updates, opt_state = ADAMW.update(change(grads), state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"loss": loss}

    return step


def test_what_is_not_linear_is_refused_in_the_first_step() -> None:
    def clamped(g: Tensor) -> Tensor:
        return g.clamp(-1, 1)

    def body(change: Callable[[Any], Any], steps: int) -> None:
        step = zf.compress_grads(zf.shard(handwritten(change), stage=0), freeze_step=2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(steps):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))

    refused: list[Callable[[Any], Any]] = [
        lambda grads: tree.map(clamped, grads),
        lambda grads: {**grads, "head": {**grads["head"], "w": grads["head"]["w"].clamp(0)}},
        lambda grads: {**grads, "head": {**grads["head"], "w": torch.abs(grads["head"]["w"])}},
        lambda grads: tree.map_leaves(lambda path, g: clamped(g), grads),
        zf.full,
    ]
    for change in refused:
        with pytest.raises(zf.CompositionError, match=r"zf\.reduced\(grads\)"):
            zf.simulate(2)(body)(change, 1)
    fine: list[Callable[[Any], Any]] = [
        lambda grads: tree.map(clamped, zf.reduced(grads)),
        lambda grads: tree.map(zf.linear_map(lambda g: g * 2), grads),
        lambda grads: tree.map(torch.add, grads, grads),
    ]
    for change in fine:
        zf.simulate(2)(body)(change, 4)


def test_an_optimizer_of_ones_own_is_given_the_mean() -> None:
    """Like that of sgd with the same direction, which knows to ask for it."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: g * -0.02 + 0 * g.abs(), grads), state

    mine = optim.GradientTransformation(lambda params: (), update)
    runs = runs_of(STACK, 2, 0, 2, mine)
    reference = runs_of(STACK, 2, 0, 2, optim.sgd(0.02))
    for run, expected in zip(runs, reference, strict=True):
        assert_near(run[1].params, expected[1].params, 1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_norms_are_one_number_that_bounds_that_of_the_mean(stage: int) -> None:
    def body() -> tuple[float, float]:
        seen = []

        def step(state: Any, batch: Any) -> Any:
            _, grads = zf.value_and_grad(stack_loss)(state.params, batch)
            seen.append(float(tree.global_norm(grads)))
            return state.replace(step=state.step + 1), {}

        wrap = zf.compress_grads(zf.shard(step, stage=stage), freeze_step=1)
        state = wrap.place(STACK.state(ADAMW, F64))
        for _ in range(2):
            state, _ = wrap(state, zf.local_batch(STACK.batch(0, F64)))
        return seen[0], seen[1]

    results = zf.simulate(3)(body)()
    assert len(set(results)) == 1
    mean, root_mean_square = results[0]
    assert mean < root_mean_square < 3 * mean
