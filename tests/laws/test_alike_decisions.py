"""Ranks that work on the same rows decide alike: along ``tensor`` as along ``data``.

A transform that asks for a tensor axis and does nothing stands for one that splits leaves. What is
wrong is wrong on one rank alone, as it is where each has other parts of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, bits, regression, trained
from tests.laws.models import forward, mean_square, stack
from zfunc import optim, tree
from zfunc.engine.meshed import Meshed
from zfunc.optim import DynamicScale
from zfunc.quant.curvature import top_eigenvalues
from zfunc.ranks.meshes import Mesh

F16, F32, F64 = torch.float16, torch.float32, torch.float64
STAGES = (0, 1, 2, 3)
GRID = zf.mesh(data=2, tensor=2)
LAST = 3  # the rank on which something goes wrong


@dataclass(frozen=True)
class Tensors(Meshed):
    """Asks for a tensor axis, and does nothing."""

    mesh: Mesh | None = None
    position: ClassVar[int] = 430

    @property
    def axes(self) -> Mapping[str, int]:
        return {"tensor": 2}


def wrapped(step: Any, stage: int, donated: bool = False) -> Any:
    step = zf.shard(step, stage=stage, unit_bytes=600)
    step = step.wrap(Tensors())
    return zf.donate(step) if donated else step


def spoiled(params: Any, batch: Any) -> Tensor:
    """Its gradient is not finite at one leaf, on one rank, where the batch says so."""
    x = batch["x"].to(params["first"]["w"].dtype)
    bad = float("inf") if batch["bad"] and zf.rank() == LAST else 0.0
    out = mean_square(forward(params, x), batch["y"])
    return out + bad * tree.get(params, "blocks.1.w").sum().to(out.dtype)


SPOILED = trained(stack, spoiled)


def batch_of(i: int, dtype: torch.dtype, bad: bool = False) -> Any:
    return {**zf.local_batch(regression(i, dtype), GRID), "bad": bad}


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_tensor_rank_leaves_the_step_out_everywhere(
    stage: int, donated: bool
) -> None:
    def body() -> Any:
        step = zf.precision(SPOILED.step(ADAMW), compute=F16, loss_scale=DynamicScale(power=4))
        step = wrapped(step, stage, donated)
        state, fine = step(step.place(SPOILED.state(ADAMW, F32)), batch_of(0, F32))
        before = step.unplace(state)
        state, metrics = step(state, batch_of(0, F32, bad=True))
        after = step.unplace(state)
        assert not bool(fine["overflow"]) and bool(metrics["overflow"])
        assert metrics["overflow_leaf"] == "blocks.1.w"
        assert_same(after.replace(step=before.step), before)
        state, _ = step(state, batch_of(0, F32, bad=True))
        state, last = step(state, batch_of(1, F32))
        assert not bool(last["overflow"]) and float(last["loss_scale"]) == 8
        return step.unplace(state)

    states = zf.simulate(4)(body)()
    for state in states[1:]:
        assert_same(state, states[0])


@pytest.mark.parametrize("method", ["onebit", "int8", "powersgd"])
@pytest.mark.parametrize("stage", [0, 2])
def test_compression_skips_everywhere(stage: int, method: str) -> None:
    def body() -> Any:
        step = zf.compress_grads(SPOILED.step(ADAMW), method, freeze_step=1)
        step = wrapped(step, stage)
        state = step.place(SPOILED.state(ADAMW, F64))
        for i in range(2):
            state, _ = step(state, batch_of(i, F64))
        before = step.unplace(state)
        state, _ = step(state, batch_of(2, F64, bad=True))
        after = step.unplace(state)
        assert_same(after.params, before.params)
        state, _ = step(state, batch_of(3, F64))
        return int(after.aux["compress_grads"]["skipped"]), step.unplace(state).params

    found = zf.simulate(4)(body)()
    assert [skipped for skipped, _ in found] == [1] * 4
    for _, params in found[1:]:
        assert_same(params, found[0][1])


def uneven(params: Any, batch: Any) -> Tensor:
    """Gradients that become smaller on one tensor rank, and not on the other: other leaves."""
    factor = batch["fade"] if zf.rank() % 2 else 1.0
    return mean_square(forward(params, batch["x"]), batch["y"]) * factor


@pytest.mark.parametrize("stage", [0, 2])
def test_compression_begins_everywhere_in_the_same_step(stage: int) -> None:
    case, tx = trained(stack, uneven), optim.adamw(1e-4, b2=0.8)

    def body() -> list[bool]:
        step = zf.compress_grads(case.step(tx), "onebit", freeze_step="auto")
        step = wrapped(step, stage)
        state, found = step.place(case.state(tx, F64)), []
        for i in range(40):
            state, _ = step(state, {**batch_of(0, F64), "fade": 1.0 if i < 7 else 0.3})
            found.append(bool(state.aux["compress_grads"]["frozen"]))
        return found

    found = zf.simulate(4)(body)()
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0].index(True) > 10  # where it began on ranks that look at their own alone


def partly(params: Any, batch: Any) -> Tensor:
    """The last rank alone uses one leaf."""
    used = params["rare"].sum() if zf.rank() == LAST else 0.0
    return mean_square(batch["x"] @ params["w"], batch["y"]) + used


def test_a_leaf_that_one_tensor_rank_uses_rests_nowhere() -> None:
    def made(dtype: torch.dtype) -> Any:
        return {"w": torch.ones(6, 1, dtype=dtype), "rare": torch.ones(3), "never": torch.ones(2)}

    def body() -> Any:
        tx = optim.adamw(0.1)
        step = wrapped(zf.train_step(partly, tx, skip_unused=True), 2)
        state = step.place(zf.TrainState.create(made(F64), tx))
        batch = zf.local_batch(regression(0, F64), GRID)
        state, _ = step(state, batch)
        return step.unplace(state).aux["skip_unused"]["missed"].tolist()

    assert zf.simulate(4)(body)() == [[[1, 0, 0]]] * 4  # never, rare, w


def test_coins_of_layers_are_the_same() -> None:
    """And so are the key of a loss, and the loss and all parameters, bit for bit."""
    keys: dict[int, Any] = {}

    def loss(params: Any, batch: Any, key: Tensor) -> Tensor:
        keys[zf.rank()] = key.tolist()
        return mean_square(forward(params, batch["x"]), batch["y"])

    case = trained(stack, loss)

    def body() -> Any:
        step = wrapped(zf.drop_layers(case.step(ADAMW), theta=0.3, gamma=10.0), 3)
        state, losses = step.place(case.state(ADAMW, F64)), []
        for i in range(6):
            state, metrics = step(state, zf.local_batch(regression(i, F64), GRID))
            losses.append(bits(metrics["loss"]))
        return losses, step.unplace(state)

    found = zf.simulate(4)(body)()
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert_same(state, found[0][1])
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_curvature_is_looked_at_as_often_and_is_the_same() -> None:
    """The larger one, where ranks have other parts of a layer."""

    def curved(params: Any, batch: Any) -> Tensor:
        scale = torch.tensor([3.0, 1.0, 0.5] if zf.rank() % 2 else [5.0, 4.99, 4.98])
        return 0.5 * (scale * params["w"].square()).sum() * batch.mean()

    def step_fn(state: Any, batch: Any) -> Any:
        found = top_eigenvalues(curved, state.params, batch, max_iter=40)
        _, grads = zf.value_and_grad(curved)(state.params, batch)
        return state, {"top": found[""], "norm": tree.global_norm(grads)}

    def body() -> float:
        step = wrapped(zf.Step(step_fn), 0)
        state = step.place(zf.TrainState.create({"w": torch.ones(3)}, optim.sgd(0.1)))
        return float(step(state, torch.ones(2))[1]["top"])

    found = zf.simulate(4)(body)()
    assert len(set(found)) == 1 and abs(found[0] - 5.0) < 0.02


# Rows


TOLD = r"ranks along 'tensor' of mesh\(data=2, tensor=2\) work together .* step\.local_batch"
CASE = SPOILED
Change = Callable[[Any], Any]


def errors_of(body: Callable[[], Any], ranks: int = 4) -> list[str]:
    """What each rank raised, and "" where it raised nothing."""

    def caught() -> str:
        try:
            body()
        except zf.PlacementError as error:
            return str(error)
        return ""

    return zf.simulate(ranks, timeout=60)(caught)()


def run(batches: list[Any], stage: int = 2, donated: bool = False, **how: Any) -> Any:
    step = wrapped(CASE.step(ADAMW), stage, donated)
    state = step.place(CASE.state(ADAMW, F64))
    for batch in batches:
        state, _ = step(state, batch)
    return step.unplace(state)


def mine(i: int) -> Any:
    return batch_of(i, F64)


def other(batch: Any) -> Any:
    """On one rank of one tensor group, other rows."""
    return {**batch, "x": batch["x"].flip(0)} if zf.rank() == LAST else batch


@pytest.mark.parametrize("stage", STAGES)
def test_other_rows_in_the_first_call_raise_on_all_ranks(stage: int) -> None:
    found = errors_of(lambda: run([other(mine(0))], stage))
    assert len(set(found)) == 1
    assert torch.tensor([bool(text) for text in found]).all()
    with pytest.raises(zf.PlacementError, match=TOLD):
        raise zf.PlacementError(found[0])


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_other_rows_in_a_later_call_raise_on_all_ranks(at: int, donated: bool) -> None:
    reached: list[int] = []

    def body() -> None:
        step = wrapped(CASE.step(ADAMW), 2, donated)
        state = step.place(CASE.state(ADAMW, F64))
        for i in range(4):
            state, _ = step(state, other(mine(i)) if i == at else mine(i))
            reached.append(i)

    found = errors_of(body)
    assert len(set(found)) == 1 and "step.local_batch" in found[0]
    assert max(reached) == at - 1


def test_rows_of_the_whole_world_raise() -> None:
    """What ``zf.local_batch`` cuts outside a step, where there is no mesh."""
    found = errors_of(lambda: run([{**zf.local_batch(regression(0, F64)), "bad": False}]))
    assert len(set(found)) == 1 and "step.local_batch" in found[0]


def test_a_new_shape_on_one_rank_alone_raises_on_all() -> None:
    def body() -> None:
        shorter = {**mine(1), "x": mine(1)["x"][:-1], "y": mine(1)["y"][:-1]}
        run([mine(0), shorter if zf.rank() == LAST else mine(1)])

    found = errors_of(body)
    assert all("step.local_batch" in text for text in found), found


CHANGES: dict[str, tuple[Any, Any]] = {
    "number": (1, 2),
    "text": ("a", "b"),
    "array": (np.arange(3), np.array([0, 2, 1])),
    "bits of a float": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "order": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "bool": (torch.tensor([True, False]), torch.tensor([False, True])),
    "16 bits": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "strided": (torch.arange(6).view(2, 3).T, torch.arange(6).view(3, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_is_seen(name: str) -> None:
    """In the first call and later, as a keyword, too."""
    one, two = CHANGES[name]

    def body(late: bool, keyword: bool) -> None:
        tx = optim.sgd(0.1)

        def step_fn(state: Any, batch: Any, more: Any = None) -> Any:
            _, grads = zf.value_and_grad(lambda p: p["w"].square().sum())(state.params)
            return state, {"norm": tree.global_norm(grads)}

        step = wrapped(zf.Step(step_fn), 0)
        state = step.place(zf.TrainState.create({"w": torch.ones(3)}, tx))
        for i in range(2):
            what = two if zf.rank() == 0 and i == late else one
            if keyword:
                state, _ = step(state, 0, more={"a": [what]})
            else:
                state, _ = step(state, {"a": [what]})

    for late in (False, True):
        found = errors_of(lambda late=late: body(late, keyword=late))
        assert all("step.local_batch" in text for text in found), found


def test_equal_rows_raise_nothing_and_give_the_plain_numbers() -> None:
    """Bit for bit those of two data ranks alone; what goes around for it is counted apart."""

    def alone() -> Any:
        step = zf.shard(CASE.step(ADAMW), stage=2, unit_bytes=600)
        state = step.place(CASE.state(ADAMW, F64))
        for i in range(3):
            state, _ = step(state, {**zf.local_batch(regression(i, F64)), "bad": False})
        return step.unplace(state)

    def body() -> Any:
        with zf.ranks.comm.ledger() as led:
            state = run([mine(i) for i in range(3)])
        return state, led

    expected, found = zf.simulate(2)(alone)()[0], zf.simulate(4)(body)()
    for state, led in found:
        assert_same(state, expected)
        assert set(led.by_axis) <= {"data", "data+tensor"}


def test_nothing_is_looked_at_where_no_rank_shares_its_rows() -> None:
    def body() -> Any:
        mesh = zf.mesh(replica=2, data=2)
        step = zf.shard(CASE.step(ADAMW), stage=2, mesh=mesh)
        state = step.place(CASE.state(ADAMW, F64))
        with zf.ranks.comm.ledger() as led:
            step(state, {**step.local_batch(regression(0, F64)), "bad": zf.rank() == 7})
        return [label for label in led.by_label if "rows" in label]

    assert zf.simulate(4)(body)() == [[]] * 4
