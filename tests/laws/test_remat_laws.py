"""Laws of ``remat``: not a bit changes, and activations are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    STEPS,
    Case,
    alone,
    assert_same,
    cut_up,
    numbers,
    plain_run,
    regression,
    sharded_runs,
    train,
    trained,
    usual,
)
from tests.laws.covering import half, turns
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import tree
from zfunc.engine.hooks import LayerInfo
from zfunc.layout.pool import _free, pool

F64 = torch.float64
STAGES = (0, 1, 2, 3)
ALL = {**READY_MADE, **HAND_WRITTEN}


def rematerialised(case: Case, policy: Any = "layer") -> Case:
    return Case(
        case.state,
        lambda tx: zf.remat(case.step(tx), policy=policy),
        case.batch,
        case.roles,
        case.tolerance,
    )


@pytest.mark.parametrize(("name", "turn"), turns(ALL))
def test_no_bit_changes(name: str, turn: int) -> None:
    """On one rank and on several, where small layers share a unit and where they do not."""
    case = ALL[name]
    for stage, ranks in half(turn):
        found = cut_up(rematerialised(case), steps=STEPS, **usual(stage, ranks))
        assert_same(found, sharded_runs(case, stage, ranks), f"stage {stage} on {ranks} ranks")


@pytest.mark.parametrize("name", ALL)
def test_no_bit_changes_without_shard(name: str) -> None:
    case = ALL[name]
    assert_same(alone(rematerialised(case), steps=STEPS), plain_run(case))
    if name != "checkpoint":  # a layer that the loss itself runs again has no fixed number
        assert_same(alone(rematerialised(case, 2), steps=STEPS), plain_run(case))


def counted(calls: list[int]) -> Callable[[Any, Any], Tensor]:
    """A loss that notes, for each run of a layer, which one it is."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for i, p in enumerate(params["blocks"]):

            def one(p: Any, x: Tensor, i: int = i) -> Tensor:
                calls.append(i)
                return block(p, x)

            x = zf.layer(one, p, x)
        return mean_square(x @ params["head"]["w"], batch["y"])

    return loss


def layers(count: int) -> Callable[[torch.dtype], Any]:
    return lambda dtype: stack(dtype, layers=count)


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("layer", [4, 3, 2, 1, 0]),
        (1, [4, 3, 2, 1, 0]),
        (2, [4, 2, 0]),
        (3, [3, 0]),
        (lambda info: info.index in (1, 4), [4, 1]),
        (lambda info: info.name == "2", [2]),
        (lambda info: False, []),
    ],
)
def test_a_policy_says_which_layers(policy: Any, again: list[int]) -> None:
    for stage in (None, 0, 3):
        calls: list[int] = []
        case = trained(layers(5), counted(calls))
        step = zf.remat(case.step(ADAMW), policy=policy)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(case.state(ADAMW, F64))
        for i in range(2):  # the second step knows the order of the first
            calls.clear()
            state, _ = step(state, regression(i, F64))
            assert calls == [0, 1, 2, 3, 4, *again]


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_activations_are_not_kept(stage: int | None) -> None:
    """Counted by what autograd is given to keep: a layer keeps its input and nothing else."""
    depth, rows, width = 4, 64, 6

    def deep(p: Any, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x @ p["w"] + p["b"])
        return x

    def body(policy: Any) -> int:
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        def loss(params: Any, batch: Any) -> Tensor:
            with saved_tensors_hooks(pack, lambda x: x):
                return zf.scan(deep, params["blocks"], batch["x"]).square().mean()

        step = zf.remat(zf.train_step(loss, ADAMW), policy=policy)
        step = step if stage is None else zf.shard(step, stage=stage)
        full = zf.TrainState.create(stack(F64, layers=depth), ADAMW)
        step(step.place(full), {"x": numbers((rows, width), 5)})
        return sum(kept.values())

    activation = rows * width * 8
    assert body("layer") <= (depth + 2) * activation  # inputs, and what the loss itself keeps
    if stage in (None, 0, 1, 2):  # at stage 3 hooks of the layers stand before the counting ones
        assert body(lambda info: False) >= 10 * depth * activation


def test_gathered_parameters_are_not_kept_either() -> None:
    """At stage 3, of units a megabyte each: as few at once as without remat, or one more."""

    class Watch(zf.Transform):
        position = 900
        enters = True
        most = 0

        def enter(self, value: Any, unit: Any) -> Any:
            value.wait()
            live = sum(not _free(x) for row in pool()._buffers.values() for x in row)
            type(self).most = max(type(self).most, live)
            return value

    def most(policy: Any) -> int:
        params = {"blocks": zf.Layers([{"w": numbers((512, 256), i)} for i in range(8)])}

        def loss(p: Any, x: Tensor) -> Tensor:
            return zf.scan(lambda q, x: torch.tanh(x @ q["w"] @ q["w"].T), p["blocks"], x).mean()

        def body() -> int:
            Watch.most = 0
            step = zf.shard(zf.train_step(loss, zf.optim.sgd(0.1)), stage=3, unit_bytes=1 << 20)
            step = step.wrap(Watch())
            step = step if policy is None else zf.remat(step, policy=policy)
            state = step.place(zf.TrainState.create(params, zf.optim.sgd(0.1)))
            for _ in range(2):
                state, _ = step(state, numbers((4, 512), 1))
            return Watch.most

        return max(zf.simulate(2)(body)())

    without = most(None)
    assert 0 < without < 6
    assert most("layer") <= without + 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_more_is_sent(ranks: int) -> None:
    """Stage 3 gathers for backward anyway."""

    def body(rematted: bool) -> int:
        step = zf.shard(READY_MADE["stack"].step(ADAMW), stage=3, unit_bytes=600)
        step = zf.remat(step) if rematted else step
        state = step.place(READY_MADE["stack"].state(ADAMW, F64))
        for i in range(3):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(regression(i, F64)))
        assert step.describe().sent_bytes == led.total_bytes
        return led.total_bytes

    assert zf.simulate(ranks)(body)(True) == zf.simulate(ranks)(body)(False)


def noisy_loss(params: Any, batch: Any) -> Tensor:
    def noisy(p: Any, x: Tensor) -> Tensor:
        inner = zf.layer(lambda q, x: F.dropout(x @ q["w"], 0.3), p, x)  # a layer inside
        return F.dropout(torch.tanh(inner + p["b"]), 0.3) + x

    x = zf.scan(noisy, params["blocks"], batch["x"])
    return mean_square(F.dropout(x, 0.2) @ params["head"]["w"], batch["y"])


@pytest.mark.parametrize("keyed", [True, False])
def test_dropout_falls_on_the_same_elements_again(keyed: bool) -> None:
    """Decided by the state's key; without one by torch's generator, whose state is put back."""

    def run(rematted: bool, stage: int | None) -> Any:
        def step(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(noisy_loss)(state["params"], batch)
            return state, {"loss": loss, "grads": zf.full(grads)}

        one = zf.remat(step, policy="layer" if rematted else lambda info: False)
        one = one if stage is None else zf.shard(one, stage=stage)
        state: Any = {"params": stack(F64)}
        if keyed:
            state |= {"key": zf.random.key(3), "step": torch.tensor(1)}
        torch.manual_seed(5)
        return one(one.place(state), regression(0, F64))[1]

    for stage in (None, 0, 3):
        assert_same(run(True, stage), run(False, stage), f"stage {stage}")
    assert float(run(True, None)["loss"]) != float(stack_loss(stack(F64), regression(0, F64)))


def odd_loss(params: Any, batch: Any) -> Tensor:
    """Layers that take and give all kinds of things."""

    def first(p: Any, x: Tensor, flag: str, *, scale: Any, missing: Any = None) -> Any:
        assert flag == "on" and missing is None
        return {"x": block(p, x) * scale["by"], "none": None, "n": 3}, (x.sum(), "text")

    def second(p: Any, parts: Any, ids: Tensor) -> Any:
        (state, (total, text)) = parts
        assert text == "text" and state["none"] is None and state["n"] == 3
        return None, [block(p, state["x"])[ids], total]

    a, b, c = params["blocks"]
    parts = zf.layer(first, a, batch["x"], "on", scale={"by": torch.tensor(0.5, dtype=F64)})
    none, (x, total) = zf.layer(second, b, parts, torch.arange(len(batch["x"])).flip(0))
    assert none is None
    y = zf.layer(lambda p: p["w"].sum(), c)
    return mean_square(x @ params["head"]["w"], batch["y"]) + 0.01 * total.abs() + 0.1 * y.square()


def test_layers_may_take_and_give_anything() -> None:
    case = trained(stack, odd_loss)
    for stage in STAGES:
        expected = cut_up(case, 2, stage=stage)
        assert_same(cut_up(rematerialised(case), 2, stage=stage), expected)


class Net(nn.Module):
    """Layers that share a weight of the root, and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Part(self.shared) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            x = part(x)
        return self.leave(self.norm(x))


class Part(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.norm(self.own(torch.tanh(self.shared(x)))), 0.2, self.training)


def test_modules_with_shared_weights_and_statistics() -> None:
    """The second run of a layer is after its module's call is over, and moves no statistics."""
    torch.manual_seed(0)
    model = zf.functionalize(Net().double())

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, new = model.apply(params, batch["x"], buffers=buffers, mutable=True, train=True)
        return mean_square(out, batch["y"]), new

    case = Case(
        lambda tx, dtype: zf.TrainState.create(model.params, tx, key=1, buffers=model.buffers),
        lambda tx: zf.train_step(loss, tx),
        regression,
    )
    for stage in STAGES:
        for ranks in (1, 2):
            expected = cut_up(case, ranks, stage=stage, steps=3)
            assert_same(cut_up(rematerialised(case), ranks, stage=stage, steps=3), expected)
    moved = expected[0][1].buffers["norm.running_mean"]
    assert not torch.equal(moved, model.buffers["norm.running_mean"])


def test_arguments_that_mean_nothing() -> None:
    step = READY_MADE["stack"].step(ADAMW)
    for policy in ("layers", 0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="policy"):
            zf.remat(step, policy=policy)
    with pytest.raises(zf.CompositionError, match="already"):
        zf.remat(zf.remat(step))
    assert LayerInfo(4, "a").index == 4


def test_evaluation_is_not_run_twice() -> None:
    calls: list[int] = []
    loss = counted(calls)

    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": zf.evaluate(loss)(state.params, batch)}

    case = trained(stack, stack_loss)
    zf.remat(step)(case.state(ADAMW, F64), regression(0, F64))
    assert calls == [0, 1, 2]


def test_metrics_of_a_rematted_run_on_placed_state() -> None:
    """Twice the same call gives the same bits, and the state that went in is as it was."""
    step = zf.shard(zf.remat(READY_MADE["stack"].step(ADAMW)), stage=3)
    state = step.place(READY_MADE["stack"].state(ADAMW, F64))
    kept = [x.clone() for x in tree.leaves(state)]
    assert_same(step(state, regression(0, F64))[1], step(state, regression(0, F64))[1])
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(state), kept, strict=True))
    train(step, state, READY_MADE["stack"], 2)
