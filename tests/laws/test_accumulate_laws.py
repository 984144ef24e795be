"""Laws of ``accumulate``: the big batch's step, whatever the number of microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    assert_like_alone,
    assert_near,
    assert_same,
    cut_up,
    numbers,
    regression,
    trained,
)
from tests.laws.cases import alone as alone_
from tests.laws.covering import each, pairs, places, turns
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import block, forward, mean_square, stack, stack_loss
from zfunc import optim, tree
from zfunc.layout.layout import Layout

F64 = torch.float64
STAGES = (0, 1, 2, 3)
CLOSED = {  # their losses close over the batch, so there is nothing to cut
    *("the head", "the layers", "one layer", "one leaf", "one of two alike", "a dict of parts"),
    *("a list of parts", "mean teacher", "gan", "joint"),
}
ALL = {**READY_MADE, **{k: v for k, v in HAND_WRITTEN.items() if k not in CLOSED}}


def accumulated(case: Case, n: int) -> Case:
    return Case(
        case.state,
        lambda tx: zf.accumulate(case.step(tx), n),
        case.batch,
        case.roles,
        case.tolerance,
    )


@pytest.mark.parametrize(("name", "turn"), turns(ALL))
def test_equals_the_big_batch(name: str, turn: int) -> None:
    case = ALL[name]
    reference = alone_(case, steps=3)
    n = 2 if name == "uneven batch" else 3
    for stage, ranks in places(turn, (1, 2)):
        how = {"stage": stage, "steps": 3, "unit_bytes": 600, "donated": ranks == 1}
        runs = cut_up(accumulated(case, n), ranks, **how)
        assert_like_alone(runs, reference, case.tolerance)
    metrics, state = alone_(accumulated(case, n), steps=3)
    assert_near(metrics, reference[0], case.tolerance)
    assert_near(state, reference[1], case.tolerance)


@pytest.mark.parametrize(("n", "ranks"), each([1, 2, 3], [1, 2, 3, 4], times=2))
def test_worlds_and_numbers_of_microbatches(n: int, ranks: int) -> None:
    case = trained(stack, stack_loss, batch=lambda i, t: regression(i, t, rows=72))
    reference = alone_(case)
    for stage in STAGES:
        runs = cut_up(accumulated(case, n), ranks, stage=stage)
        assert_like_alone(runs, reference, 1e-9)
        if n == 1:
            assert_same(runs, cut_up(case, ranks, stage=stage))


def masked_loss(params: Any, batch: Any) -> zf.Mean:
    error = (forward(params, batch["x"]) - batch["y"]).square()
    return zf.Mean((error * batch["kept"]).sum(), batch["kept"].sum())


@pytest.mark.parametrize("first_kept", [0, 3])
def test_exact_means_of_masked_and_uneven_microbatches(first_kept: int) -> None:
    """Also where the first microbatch, from which the others are judged, has no element."""

    def batch(i: int, dtype: torch.dtype) -> Any:
        kept = (numbers((11, 1), 50 + i) > -0.2).to(dtype)
        kept[:4] = 0
        kept[:first_kept] = 1
        return {**regression(i, dtype, rows=11), "kept": kept}

    case = trained(stack, masked_loss, batch=batch)
    reference = alone_(case)
    for stage in (0, 2, 3):
        for ranks in (1, 2):
            runs = cut_up(accumulated(case, 4), ranks, stage=stage)
            assert_like_alone(runs, reference, 1e-9)


def test_an_uneven_batch_of_a_plain_loss_is_an_error() -> None:
    case = trained(stack, stack_loss)
    step = zf.accumulate(case.step(ADAMW), 5)
    with pytest.raises(zf.CompositionError, match=r"batch\.x of 12 rows into 5 equal"):
        step(case.state(ADAMW, F64), regression(0, F64))
    few = zf.accumulate(zf.train_step(masked_loss, ADAMW), 5)
    batch = {**regression(0, F64, rows=3), "kept": torch.ones(3, 1)}
    with pytest.raises(zf.CompositionError, match=r"of 3 rows into 5"):
        few(case.state(ADAMW, F64), batch)


def test_arguments_that_mean_nothing() -> None:
    case = trained(stack, stack_loss)
    for n in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match="microbatches"):
            zf.accumulate(case.step(ADAMW), n)
    with pytest.raises(zf.CompositionError, match="already"):
        zf.accumulate(zf.accumulate(case.step(ADAMW), 2), 2)
    head = HAND_WRITTEN["the head"]
    with pytest.raises(zf.CompositionError, match="instead of closing over it"):
        zf.accumulate(head.step(ADAMW), 2)(head.state(ADAMW, F64), regression(0, F64))
    batch = {**regression(0, F64), "weights": torch.ones(5)}
    with pytest.raises(zf.CompositionError, match=r"batch\.weights has 5 rows.* 12"):
        zf.accumulate(case.step(ADAMW), 2)(case.state(ADAMW, F64), batch)


WIDE = {
    "first": numbers((64, 64), 9),
    "blocks": zf.Layers([{"w": numbers((64, 64), i)} for i in range(4)]),
}


def wide_loss(p: Any, x: Tensor) -> Tensor:
    x = x @ p["first"]  # so that backward needs the weights of all layers
    return zf.scan(lambda q, x: torch.tanh(x @ q["w"]), p["blocks"], x).square().mean()


@pytest.mark.parametrize(("stage", "ranks", "rematted"), pairs(STAGES, (2, 3), (False, True)))
def test_reductions_per_update(stage: int, ranks: int, rematted: bool) -> None:
    """One at stages 0 and 1, one for each microbatch at 2 and 3."""

    def body(n: int) -> tuple[int, int]:
        step = zf.accumulate(zf.train_step(wide_loss, ADAMW), n)
        step = zf.remat(step) if rematted else step
        step = zf.shard(step, stage=stage, unit_bytes=1 << 16)
        state = step.place(zf.TrainState.create(WIDE, ADAMW))
        for i in range(2):
            with zf.comm.ledger() as led:
                state, _ = step(state, numbers((12, 64), i))
        assert step.describe().sent_bytes == led.total_bytes
        reduced = sum(b for label, b in led.by_label.items() if label.startswith("reduce"))
        gathered = sum(b for k, b in led.by_label.items() if k.split()[0] in ("gather", "join"))
        return reduced, gathered

    once, thrice = zf.simulate(ranks)(body)(1)[0], zf.simulate(ranks)(body)(3)[0]
    assert thrice[0] == once[0] * (3 if stage >= 2 else 1)
    assert thrice[1] == once[1] * (3 if stage == 3 else 1)


@dataclass(frozen=True)
class Before(zf.Transform):
    """A hook through which gradients go before they are summed: they are packed for it."""

    name: ClassVar[str] = "before"
    position: ClassVar[int] = 600

    def leave(self, value: Any, unit: Any) -> Any:
        return value


before = zf.transform_of(Before)


SUMMED = ["stack", "frozen", "mixed dtypes", "tiny leaves", "unused", "checkpoint", "a layer twice"]
SUMMED += [
    "albert",
    "untracked first",
    "layers return weights",
    "gradient penalty",
    "no layer used",
]


@pytest.mark.parametrize(("stage", "name"), each([0, 1], SUMMED))
def test_gradients_are_summed_in_place_to_the_same_bit(name: str, stage: int) -> None:
    case = accumulated(ALL[name], 3)
    packed = Case(
        case.state, lambda tx: before(case.step(tx)), case.batch, case.roles, case.tolerance
    )
    assert_same(*(cut_up(each, 2, stage=stage, steps=2, unit_bytes=600) for each in (case, packed)))


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_are_not_packed_to_be_summed(hook: bool) -> None:
    """Never of leaves, but for each microbatch where a hook comes before the sum."""
    packed: list[str] = []

    def pack(layout: Layout, flat: int, *how: Any) -> Tensor:
        packed.append(layout.by_flat[flat][0].path)
        return real(layout, flat, *how)

    def body() -> Any:
        step = zf.accumulate(zf.train_step(stack_loss, ADAMW), 4)
        step = zf.shard(before(step) if hook else step, stage=1, unit_bytes=600)
        state = step.place(zf.TrainState.create(stack(F64, 5), ADAMW))
        packed.clear()
        zf.psum(torch.zeros(1))  # or another rank's step would be at work before
        step(state, step.local_batch(regression(0, F64, rows=24)))

    real = Layout.pack
    with patch.object(Layout, "pack", pack):
        zf.simulate(2)(body)()
    blocks = [path for path in packed if path.startswith("blocks")]
    assert len(blocks) == 2 * 5 * (4 if hook else 0)


def part_of_the_time_loss(params: Any, batch: Any) -> Tensor:
    """Layers that only some microbatches use; the last one uses the fewest."""
    x, kind = batch["x"], int(batch["kind"].max())
    for i, p in enumerate(params["blocks"]):
        if i <= kind:
            x = zf.layer(block, p, x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def test_units_that_some_microbatches_use() -> None:
    """The same on all ranks: what the last one did not touch leaves nevertheless."""

    def batch(i: int, dtype: torch.dtype) -> Any:
        return {**regression(i, dtype), "kind": torch.tensor([2, 1, 0] * 4)[torch.arange(12)]}

    def step(tx: Any) -> Any:
        def by_hand(state: Any, batch: Any) -> Any:
            loss, grads = 0.0, None
            for k in range(2):
                rows = {key: x[6 * k : 6 * k + 6] for key, x in batch.items()}
                one, new = zf.value_and_grad(part_of_the_time_loss)(state.params, rows)
                grads = new if grads is None else tree.map(torch.add, grads, new)
                loss = loss + one / 2
            grads = tree.map(lambda g: g / 2, grads)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optim.apply_updates(state.params, updates)
            return state.replace(params=params, opt_state=opt_state), {"loss": loss}

        return by_hand

    def sorted_batch(i: int, dtype: torch.dtype) -> Any:
        kinds = torch.tensor([2] * 6 + [0] * 6)
        return {**regression(i, dtype), "kind": kinds}

    case = trained(stack, part_of_the_time_loss, batch=sorted_batch)
    reference = alone_(Case(case.state, step, sorted_batch))

    def body(stage: int) -> Any:
        one = zf.shard(zf.accumulate(case.step(ADAMW), 2), stage=stage, unit_bytes=600)
        state, metrics = one.place(case.state(ADAMW, F64)), []
        for i in range(4):
            whole = sorted_batch(i, F64)
            mine = [
                zf.local_batch(tree.map(lambda x, k=k: x[6 * k : 6 * k + 6], whole)) for k in (0, 1)
            ]
            both = tree.map(lambda a, b: torch.cat([a, b]), *mine)
            state, out = one(state, both)
            metrics.append({"loss": out["loss"]})
        return metrics, one.unplace(state)

    for stage in STAGES:
        for metrics, state in zf.simulate(2)(body)(stage):
            assert_near(metrics, reference[0], 1e-9, f"stage {stage}")
            assert_near(state.params, reference[1].params, 1e-9, f"stage {stage}")


def test_randomness_differs_from_microbatch_to_microbatch() -> None:
    """The whole batch's in the first one; a function of the state's key alone."""
    drawn: list[Tensor] = []
    keys: list[int] = []

    def loss(params: Any, batch: Any, key: Tensor) -> Tensor:
        keys.append(int(key))

        def noisy(p: Any, x: Tensor) -> Tensor:
            drawn.append(F.dropout(torch.ones(40), 0.5))
            return block(p, x)

        x = zf.scan(noisy, params["blocks"], batch["x"])
        return mean_square(x @ params["head"]["w"], batch["y"])

    case = trained(stack, loss)
    state = case.state(ADAMW, F64)

    def run(n: int) -> tuple[list[Tensor], list[int]]:
        drawn.clear()
        keys.clear()
        zf.accumulate(case.step(ADAMW), n)(state, regression(0, F64))
        return list(drawn), list(keys)

    once, thrice, again = run(1), run(3), run(3)
    assert len(once[0]) == 3 and len(thrice[0]) == 9
    assert all(torch.equal(a, b) for a, b in zip(thrice[0], again[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once[0], thrice[0][:3], strict=True))
    patterns = {bytes(x.view(torch.uint8).numpy()) for x in thrice[0]}
    assert len(patterns) == 9
    assert len(set(thrice[1])) == 3 and thrice[1] == again[1] and thrice[1][0] == once[1][0]


def test_buffers_are_threaded_and_aux_is_averaged() -> None:
    """As n forward passes in a row would do; whether the loss has an aux besides or not."""
    torch.manual_seed(0)
    model = zf.functionalize(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)).double())

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, new = model.apply(params, batch["x"], buffers=buffers, mutable=True, train=True)
        return mean_square(out, batch["y"]), new

    def loss_and_aux(params: Any, batch: Any, buffers: Any) -> Any:
        value, new = loss(params, batch, buffers)
        return value, (new, {"size": batch["x"].mean(), "rows": len(batch["x"])})

    batch = regression(0, F64)
    buffers = model.buffers
    for k in range(3):
        x = batch["x"][4 * k : 4 * k + 4]
        buffers = model.apply(model.params, x, buffers=buffers, mutable=True, train=True)[1]
    for stage in (None, *STAGES):
        for has_aux, fn in ((False, loss), (True, loss_and_aux)):
            step = zf.accumulate(zf.train_step(fn, ADAMW, has_aux=has_aux), 3)
            step = step if stage is None else zf.shard(step, stage=stage)
            full = zf.TrainState.create(model.params, ADAMW, buffers=model.buffers)
            state, metrics = step(step.place(full), batch)
            assert_near(step.unplace(state).buffers, buffers, 1e-12)
            if has_aux:
                assert float(metrics["size"]) == pytest.approx(float(batch["x"].mean()), abs=1e-12)
                assert metrics["rows"] == 4


def test_what_belongs_to_the_state_is_not_cut() -> None:
    """A teacher and a table of the state, a number, a 0-d tensor: all microbatches have them."""
    params = stack(F64)

    def loss(params: Any, batch: Any, teacher: Any, table: Tensor, by: float, at: Tensor) -> Tensor:
        assert table.shape == (12, 6) and by == 0.5 and at.shape == ()
        wanted = forward(teacher, batch["x"]) + (table.sum(0) * by * at).sum()
        return mean_square(forward(params, batch["x"]), wanted)

    def make(tx: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            value, grads = zf.value_and_grad(loss)(
                state["params"], batch, state["teacher"], state["table"], 0.5, torch.tensor(2)
            )
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
            new = optim.apply_updates(state["params"], updates)
            return {**state, "params": new, "opt_state": opt_state}, {"loss": value}

        return step

    case = Case(
        lambda tx, dtype: {
            "params": params,
            "opt_state": tx.init(params),
            "teacher": stack(dtype),
            "table": numbers((12, 6), 9),
        },
        make,
        regression,
    )
    reference = alone_(case)
    for stage in STAGES:
        assert_like_alone(cut_up(accumulated(case, 2), 2, stage=stage), reference, 1e-9)


def test_losses_that_change_their_kind_are_an_error() -> None:
    def loss(params: Any, batch: Any) -> Any:
        value = stack_loss(params, batch)
        return value if batch["x"][0, 0] == regression(0, F64)["x"][0, 0] else zf.Mean(value, 1)

    case = trained(stack, loss)
    with pytest.raises(ValueError, match=r"zf\.Mean for one microbatch"):
        zf.accumulate(case.step(ADAMW), 2)(case.state(ADAMW, F64), regression(0, F64))


@pytest.mark.parametrize("size", [8, 200])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_share_memory_are_not_written_into(stage: int, size: int) -> None:
    """Autograd gives both summands of a + b one gradient; each of them is a flat of its own."""
    params = {"a": numbers((64, size), 1), "b": numbers((64, size), 2)}

    def loss(p: Any, batch: Any) -> Tensor:
        return ((p["a"] + p["b"]) * batch["x"].square().mean()).square().mean()

    case = trained(lambda t: tree.map(torch.clone, params), loss)
    ones = {"x": torch.ones(12, 6, dtype=F64)}
    case = Case(case.state, case.step, lambda i, t: ones)
    reference = alone_(case)
    for one in (case, accumulated(case, 3)):
        for ranks in (1, 2):
            runs = cut_up(one, ranks, stage=stage, unit_bytes=64)
            assert_like_alone(runs, reference, 1e-9)
