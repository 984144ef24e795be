"""`drop_layers`: which layers run, what becomes of their branches, and what is sent for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    Tree,
    assert_near,
    assert_same,
    named,
    numbers,
    regression,
    train,
    trained,
)
from tests.laws.covering import each
from tests.laws.models import stack, stack_loss
from zfunc import optim, tree
from zfunc.transforms.layer_drop import keep_probability, theta_at

CASE = trained(lambda dtype: stack(dtype, layers=5), stack_loss)
FAST = {"theta": 0.3, "gamma": 0.7}
F64 = torch.float64


def dropped(case: Case, ranks: int, steps: int = 6, donated: bool = False, **how: Any) -> Any:
    """What each rank has after training with dropped layers under ``shard(**how)``."""
    full = case.state(ADAMW, F64)

    def body() -> Any:
        step = zf.shard(zf.drop_layers(case.step(ADAMW), **FAST), unit_bytes=64, **how)
        step = zf.donate(step) if donated else step
        metrics, state = train(step, step.place(full), case, steps)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


def alone(case: Case, steps: int = 6, **how: Any) -> Any:
    step = zf.drop_layers(case.step(ADAMW), **(how or FAST))
    return train(step, step.place(case.state(ADAMW, F64)), case, steps)


def test_the_schedule() -> None:
    assert theta_at(0, 0.5, 0.1) == 1.0
    assert theta_at(10, 0.5, 0.1) == pytest.approx(0.5 * math.exp(-1.0) + 0.5, abs=1e-15)
    assert [keep_probability(i, 2, 0.5) for i in range(2)] == [0.75, 0.5]


@pytest.mark.parametrize("how", [{"theta": 1.0}, {"theta": 0.5, "gamma": 0.0}])
def test_nothing_dropped_is_the_bare_step_bitwise(how: dict[str, float]) -> None:
    bare = CASE.step(ADAMW)
    reference = train(bare, CASE.state(ADAMW, F64), CASE, 4)
    assert_same(alone(CASE, 4, **how), reference)


@pytest.mark.parametrize(("stage", "ranks"), each([0, 1, 2, 3], [1, 2, 3, 4], times=2))
def test_every_world_drops_the_same_layers(stage: int, ranks: int) -> None:
    metrics, state = alone(CASE)
    for theirs, its in dropped(CASE, ranks, stage=stage, donated=stage % 2 == 0):
        assert_near(theirs, metrics, 1e-9)
        assert_near(its, state, 1e-9)
    full = train(CASE.step(ADAMW), CASE.state(ADAMW, F64), CASE, 6)[1]
    moved = named(full.params)
    assert any(not torch.equal(x, moved[name]) for name, x in named(state.params).items())


def test_a_step_is_pure_and_wrapping_commutes() -> None:
    step = zf.drop_layers(CASE.step(ADAMW), **FAST)
    state = step.place(CASE.state(ADAMW, F64).replace(step=torch.tensor(9)))
    batch = CASE.batch(0, F64)
    assert_same(step(state, batch), step(state, batch))
    bare = CASE.step(ADAMW)
    inner = zf.shard(zf.drop_layers(bare, **FAST), stage=2)
    assert inner == zf.drop_layers(zf.shard(bare, stage=2), **FAST)


def linear(dtype: torch.dtype) -> Tree:
    return {"layers": zf.Layers([{"w": numbers((4, 4), i + 1, dtype, 0.2)} for i in range(4)])}


def branch(p: Tree, x: Tensor) -> Tensor:
    return x + x @ p["w"]


def test_the_mean_over_keys_is_the_full_stack() -> None:
    """Of a product of independent factors (1 + b W / p) with E[b] = p."""
    params, x = linear(F64), numbers((1, 4), 7)
    seen: list[Tensor] = []

    def loss(p: Tree, x: Tensor) -> Tensor:
        out = zf.scan(branch, p["layers"], x)
        seen.append(out.detach())
        return out.sum()

    tx = optim.sgd(0.0)
    step = zf.drop_layers(zf.train_step(loss, tx), theta=0.4, gamma=50.0)
    start = zf.TrainState.create(params, tx).replace(step=torch.tensor(1000))
    count = 3000
    for seed in range(count):
        step(start.replace(key=zf.random.key(seed)), x)
    outs = torch.stack(seen)
    full = zf.scan(branch, params["layers"], x)
    error = outs.std(dim=0) / math.sqrt(count)
    assert ((outs.mean(dim=0) - full).abs() < 5 * error).all()
    assert (error > 0).all() and len(outs.unique(dim=0)) == 2**4


def test_layers_are_dropped_as_often_as_the_schedule_says() -> None:
    ran: list[int] = []

    def loss(p: Tree, x: Tensor) -> Tensor:
        def block(q: Tree, x: Tensor) -> Tensor:
            ran[-1] += 1
            return branch(q, x)

        ran.append(0)
        return zf.scan(block, p["layers"], x).sum()

    tx = optim.sgd(0.0)
    step = zf.drop_layers(zf.train_step(loss, tx), theta=0.5, gamma=50.0)
    start = zf.TrainState.create(linear(F64), tx).replace(step=torch.tensor(1000))
    step(start.replace(step=torch.tensor(0)), numbers((1, 4), 7))  # all run at first
    assert ran.pop() == 4
    for seed in range(1000):
        step(start.replace(key=zf.random.key(seed)), numbers((1, 4), 7))
    expected = sum(keep_probability(i, 4, 0.5) for i in range(4))
    assert abs(sum(ran) / 1000 - expected) < 0.1


@pytest.mark.parametrize("stage", [1, 3])
def test_dropped_layers_are_absent_from_the_ledger(stage: int) -> None:
    case = trained(lambda dtype: stack(dtype, layers=5), stack_loss)

    def body() -> Any:
        step = zf.shard(zf.drop_layers(case.step(ADAMW), **FAST), stage=stage)
        state, rows = step.place(case.state(ADAMW, F64)), []
        for i in range(12):
            with zf.comm.ledger() as sent:
                state, _ = step(state, zf.local_batch(case.batch(i, F64)))
            # At stages 1 and 2 all updated parameters are gathered, which is not the pass.
            units = {x for x in sent.by_label if stage == 3 or x.startswith("reduce ")}
            rows.append((sent.total_bytes, units, step.describe().sent_bytes))
        return rows

    rows = zf.simulate(2)(body)()
    names = {f"blocks.{i}" for i in range(5)}
    assert [row[1] for row in rows[0]] == [row[1] for row in rows[1]]
    kept = [sum(any(name in label for label in units) for name in names) for _, units, _ in rows[0]]
    assert kept[0] == 5 and min(kept) < 4
    by_count: dict[int, set[int]] = {}
    for count, (total, _, described) in list(zip(kept, rows[0], strict=True))[1:]:
        by_count.setdefault(count, set()).add(total)
        assert total == described
    for sizes in by_count.values():
        assert len(sizes) == 1, by_count  # nothing is gathered in vain, whatever ran before
    ordered = [max(by_count[count]) for count in sorted(by_count)]
    assert ordered == sorted(ordered) and len(set(ordered)) == len(ordered)


@pytest.mark.parametrize("unit_bytes", [1 << 6, 1 << 13, 1 << 14, 1 << 16])
def test_layers_of_their_own_are_kept_for_backward_as_merged_ones_are(unit_bytes: int) -> None:
    """What fits into an eighth of ``unit_bytes`` at the turning point is gathered once."""

    def sent(dropping: bool) -> tuple[int, int, int | None]:
        step = zf.shard(CASE.step(ADAMW), unit_bytes=unit_bytes)
        step = zf.drop_layers(step, theta=1.0) if dropping else step
        state = step.place(CASE.state(ADAMW, F64))
        for i in range(3):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(CASE.batch(i, F64)))
        gathered = sum(n for label, n in led.by_label.items() if label.startswith("gather blocks"))
        return gathered, led.total_bytes, step.describe().sent_bytes

    merged, own = (zf.simulate(2)(sent)(dropping)[0] for dropping in (False, True))
    assert own[0] <= merged[0]
    assert own[1] == own[2] and merged[1] == merged[2]


def test_evaluation_runs_all_layers() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        inside = zf.evaluate(stack_loss)(state.params, batch)
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), {"loss": loss, "inside": inside}

    state = CASE.state(ADAMW, F64).replace(step=torch.tensor(100))
    wrapped, batch = zf.drop_layers(step, theta=0.0, gamma=1.0), regression(0, F64)
    _, metrics = wrapped(wrapped.place(state), batch)
    full = stack_loss(state.params, batch)
    torch.testing.assert_close(metrics["inside"], full, rtol=1e-12, atol=0)
    assert abs(metrics["loss"] - full) > 1e-6


def test_a_teacher_keeps_its_layers() -> None:
    teacher = stack(F64, layers=5)

    def loss(p: Tree, batch: Tree, teacher: Tree) -> Tensor:
        from tests.laws.models import forward

        seen.append(forward(teacher, batch["x"]).detach())
        return (forward(p, batch["x"]) - seen[-1]).square().mean()

    def step(state: Any, batch: Any) -> Any:
        loss_, grads = zf.value_and_grad(loss)(state["params"], batch, state["teacher"])
        return {**state, "params": tree.map(lambda p, g: p - g, state["params"], grads)}, loss_

    seen: list[Tensor] = []
    state = {
        "params": stack(F64, layers=5),
        "teacher": teacher,
        "step": torch.tensor(100),
        "key": zf.random.key(1),
    }
    batch = regression(0, F64)

    def body() -> Any:
        wrapped = zf.shard(
            zf.drop_layers(step, theta=0.2, gamma=1.0),
            stage=3,
            roles={"params": "params", "teacher": "params"},
        )
        return wrapped(wrapped.place(state), batch)[1]

    assert zf.simulate(2)(body)()[0] > 1e-6
    for out in seen:
        torch.testing.assert_close(out, seen[0], rtol=1e-12, atol=0)


# Blocks that are more than a function of one tensor


def tupled(p: Tree, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, None]:
    return x + torch.tanh(x @ p["w"]) * (1.0 if mask is None else mask), None


def test_tuples_and_keywords() -> None:
    def loss(p: Tree, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x, nothing = zf.layer(tupled, layer, x, mask=torch.ones(()))
            assert nothing is None
        return x.square().sum()

    tx = optim.sgd(0.1)
    step = zf.drop_layers(zf.train_step(loss, tx), theta=0.0, gamma=9.0)
    state = zf.TrainState.create(linear(F64), tx).replace(step=torch.tensor(50))
    ran = {float(step(state.replace(key=zf.random.key(i)), numbers((2, 4), 3))[1]["loss"])
           for i in range(20)}  # fmt: skip
    assert len(ran) > 3  # among them those of a process in which no layer had run before


def biased(p: Tree, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x + x @ p["w"] + bias, bias


def test_a_block_that_returns_more_needs_to_be_told() -> None:
    def loss(p: Tree, x: Tensor) -> Tensor:
        bias = torch.ones(4, dtype=F64)
        for layer in p["layers"]:
            x, bias = zf.layer(biased, layer, x, bias)
        return x.sum()

    tx = optim.sgd(0.0)
    state = zf.TrainState.create(linear(F64), tx).replace(step=torch.tensor(1000))
    x, how = numbers((2, 4), 3), {"theta": 0.5, "gamma": 1.0}
    with pytest.raises(zf.CompositionError, match=r"layer layers\.\d .*skip="):
        zf.drop_layers(zf.train_step(loss, tx), **how)(state, x)
    step = zf.drop_layers(zf.train_step(loss, tx), **how, skip=lambda x, bias: (x, bias))
    losses = [float(step(state.replace(key=zf.random.key(i)), x)[1]["loss"]) for i in range(500)]
    full = float(loss(state.params, x))
    spread = torch.tensor(losses).std().item() / math.sqrt(500)
    assert spread > 0 and abs(sum(losses) / 500 - full) < 5 * spread
    wrong = zf.drop_layers(zf.train_step(loss, tx), **how, skip=lambda x, bias: x)
    keys = [state.replace(key=zf.random.key(i)) for i in range(9)]
    with pytest.raises(zf.CompositionError, match="same structure"):
        [wrong(keyed, x) for keyed in keys]


# Bad input


def test_bad_arguments() -> None:
    step = CASE.step(ADAMW)
    for how in ({"theta": 1.5}, {"theta": -0.1}, {"theta": math.nan}):
        with pytest.raises(ValueError, match="theta"):
            zf.drop_layers(step, **how)
    for gamma in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="gamma"):
            zf.drop_layers(step, gamma=gamma)
    with pytest.raises(TypeError, match="skip"):
        zf.drop_layers(step, skip=3)
    with pytest.raises(zf.CompositionError, match="already"):
        zf.drop_layers(zf.drop_layers(step))


def test_states_that_cannot_drop() -> None:
    flat = trained(
        lambda dtype: {"w": numbers((6, 1), 1, dtype)},
        lambda p, batch: (batch["x"] @ p["w"] - batch["y"]).square().mean(),
    )
    with pytest.raises(zf.CompositionError, match="no stack of layers"):
        alone(flat)
    step = zf.drop_layers(lambda state, batch: (state, {}))
    with pytest.raises(zf.PlacementError, match="'step'"):
        step({"params": linear(F64), "key": zf.random.key(0)}, None)
    with pytest.raises(zf.PlacementError, match="'key'"):
        step({"params": linear(F64), "step": torch.tensor(0)}, None)
