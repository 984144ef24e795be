"""The laws of ``compress_grads`` under 0/1 Adam: what is kept, saved, sent and said."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_near, assert_same, cut_up, train
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import stack_loss
from tests.laws.zero_one import F64, FREEZE, HOW, STACK, policy, wrapped
from zfunc import optim, tree
from zfunc.layout.dense import dense_of


@pytest.mark.parametrize("name", ["stack", "frozen", "mixed dtypes", "uneven batch", "tiny leaves"])
def test_ranks_agree_and_donating_changes_nothing(name: str) -> None:
    case = {**READY_MADE, **HAND_WRITTEN}[name]

    def body(donated: bool) -> Any:
        step = wrapped(case, ADAMW)
        step = zf.donate(step) if donated else step
        metrics, state = train(step, step.place(case.state(ADAMW, F64)), case, 14)
        return metrics, step.unplace(state)

    runs = zf.simulate(3)(body)(False)
    for run in runs:
        assert_same(run, runs[0])
    assert_same(zf.simulate(3)(body)(True), runs)


@pytest.mark.parametrize("name", ["gan", "the head"])
def test_several_optimizers_and_parts_of_a_tree(name: str) -> None:
    case = HAND_WRITTEN[name]

    def body() -> Any:
        step = wrapped(case, ADAMW)
        metrics, state = train(step, step.place(case.state(ADAMW, F64)), case, 12)
        return metrics, step.unplace(state)

    runs = zf.simulate(2)(body)()
    for run in runs:
        assert_same(run, runs[0])
    assert all(torch.isfinite(x).all() for x in tree.leaves(runs[0][1]) if x.is_floating_point())


def test_before_compression_begins_it_is_the_plain_step() -> None:
    plain = cut_up(STACK, 3, ADAMW, steps=4, stage=0, unit_bytes=600)

    def body() -> Any:
        step = wrapped(STACK, ADAMW, freeze=9, var_update_scaler=4)
        metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 4)
        return metrics, state.params, state.opt_state

    for (metrics, params, opt_state), (expected, full) in zip(
        zf.simulate(3)(body)(), plain, strict=True
    ):
        assert_same(metrics, expected)
        assert_same(zf.full(params), full.params)
        assert_same(zf.full(opt_state), full.opt_state)


def test_on_one_rank_nothing_ever_changes() -> None:
    plain = cut_up(STACK, 1, ADAMW, steps=12, stage=0, unit_bytes=600)[0]

    def body() -> Any:
        step = wrapped(STACK, ADAMW)
        metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 12)
        return metrics, step.unplace(state)

    assert_same(zf.simulate(1)(body)()[0], plain)


def test_a_step_is_pure() -> None:
    def body() -> None:
        step = wrapped(STACK, ADAMW)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(14):
            batch = zf.local_batch(STACK.batch(i, F64))
            kept = [x.clone() for x in tree.leaves(state)]
            first, second = step(state, batch), step(state, batch)
            assert_same(step.unplace(first[0]), step.unplace(second[0]))
            for x, y in zip(tree.leaves(state), kept, strict=True):
                assert torch.equal(x, y)
            state = first[0]

    zf.simulate(2)(body)()


@pytest.mark.parametrize("pause", [5, 10, 12, 13])
def test_full_states_go_on_bitwise(pause: int) -> None:
    """Unplaced and placed again while gradients are compressed, and between averages."""

    def body(again: bool) -> Any:
        step = wrapped(STACK, ADAMW)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(18):
            if again and i == pause:
                state = step.place(step.unplace(state))
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    assert_same(zf.simulate(3)(body)(True), zf.simulate(3)(body)(False))


def test_saved_states_go_on_bitwise(tmp_path: Any) -> None:
    def body(saving: bool) -> Any:
        step = wrapped(STACK, ADAMW)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(16):
            if saving and i == 13:
                zf.save(tmp_path, state, step=i)
                state = zf.restore(tmp_path, state)
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        return step.unplace(state)

    assert_same(zf.simulate(2)(body)(True), zf.simulate(2)(body)(False))


@pytest.mark.parametrize("first", ["onebit", "zero_one"])
def test_errors_do_not_outlive_a_change_of_method(first: str) -> None:
    """Movements are smaller than momentum by the learning rate: errors would be leaps."""
    second = {"onebit": "zero_one", "zero_one": "onebit"}[first]

    def made(method: str) -> Any:
        options = HOW if method == "zero_one" else {}
        return zf.compress_grads(
            zf.shard(STACK.step(ADAMW), stage=0), method, freeze_step=FREEZE, **options
        )

    def body() -> None:
        step, other = made(first), made(second)
        _, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 13)
        full = step.unplace(state)
        assert any(bool(x.any()) for x in tree.leaves(full.aux["compress_grads"]["worker"]))
        state = other.place(full)
        carried = state.aux["compress_grads"]
        assert int(carried["count"]) == 13 and bool(carried["frozen"])
        assert not any(x.any() for x in tree.leaves((carried["worker"], carried["server"])))
        moved, _ = other(state, zf.local_batch(STACK.batch(13, F64)))
        far = tree.map(torch.sub, zf.full(moved.params), full.params)
        assert max(float(x.abs().max()) for x in tree.leaves(far)) < 0.3  # 15 times the rate

    zf.simulate(2)(body)()


def test_drift_and_momentum_keep_their_mean_on_other_ranks() -> None:
    def begin() -> Any:
        step = wrapped(STACK, ADAMW)
        _, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 13)
        return step.unplace(state)

    full = zf.simulate(4)(begin)()[0]
    assert float(full.aux["compress_grads"]["zero_one"]["rates"]["params"].max()) > 0

    def go_on() -> Any:
        step = wrapped(STACK, ADAMW)
        state = step.place(full)
        after = step.unplace(state)
        step(state, zf.local_batch(STACK.batch(13, F64)))
        return after

    for after in zf.simulate(3)(go_on)():
        mine, theirs = (x.aux["compress_grads"]["zero_one"] for x in (after, full))
        for kind in ("drift", "momentum"):
            means = [tree.map(lambda e: e.mean(0), x[kind]["params"]) for x in (mine, theirs)]
            assert_near(means[0], means[1], 1e-12)
        assert_same(mine["rates"], theirs["rates"])
        assert_same((after.params, after.opt_state), (full.params, full.opt_state))


# What is sent, and what it says


def two_phases(layout: Any, ranks: int) -> int:
    """n/8 bytes and 8 for each 2,048 elements, to others, of others' parts and of one's own."""
    total, rank = 0, zf.rank()
    for i in range(len(layout.flats)):
        cuts = dense_of(layout, i).cuts
        sizes = [-(-(b - a) // 8) + 8 * -(-(b - a) // 2048) for a, b in pairwise(cuts)]
        total += sum(sizes) - sizes[rank] + (ranks - 1) * sizes[rank]
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_sent_is_what_it_says(ranks: int) -> None:
    """Plain gradients, two phases of signs, or nothing of the size of the model."""

    def body() -> None:
        step = wrapped(STACK, ADAMW)
        state = step.place(STACK.state(ADAMW, F64))
        for t, kind in policy():
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(STACK.batch(t, F64)))
            assert step.describe().sent_bytes == led.total_bytes
            sent = {"reduce": 0, "compress": 0}
            for label, n in led.by_label.items():
                if label.split()[0] in sent:
                    sent[label.split()[0]] += n
            if ranks == 1:
                assert not any(sent.values())
                continue
            signs = two_phases(state.aux["compress_grads"]["worker"]["params"].layout, ranks)
            assert bool(sent["reduce"]) == (kind == "dense"), t
            assert sent["compress"] == (signs if kind in ("compressed", "average") else 0), t

    zf.simulate(ranks)(body)()


@pytest.mark.parametrize("rest", [True, False])
def test_auto_freezes_when_second_moments_have_settled(rest: bool) -> None:
    """Gradients that keep their size settle at once; those that shrink do not."""
    tx = optim.adamw(1e-9, b2=0.9)

    def loss(params: Any, batch: Any) -> Tensor:
        return (params["w"] * batch).sum()

    def body() -> int:
        step = zf.compress_grads(zf.shard(zf.train_step(loss, tx), stage=0), "zero_one")
        state = step.place(zf.TrainState.create({"w": torch.ones(64, dtype=F64)}, tx))
        for i in range(30):
            if int(state.aux["compress_grads"]["zero_one"]["frozen_at"]) >= 0:
                return i
            state, _ = step(state, torch.ones(64, dtype=F64) * (1.0 if rest else 0.8**i))
        return 30

    assert set(zf.simulate(2)(body)()) == {20 if rest else 30}


@pytest.mark.parametrize(
    ("dtype", "decay", "near"), [(F64, 0.0, 1e-9), (F64, 1001.0, 1e-9), (torch.bfloat16, 0.0, 0.05)]
)
def test_second_moments_are_looked_at_once(dtype: torch.dtype, decay: float, near: float) -> None:
    """Also where AdamW takes no fused walk: all its parameters in one step, moments in 16 bits."""
    b2, window = 0.8, 5
    tx = optim.adamw(1e-3, b2=b2, weight_decay=decay)

    def body() -> None:
        step = zf.shard(zf.train_step(weighted, tx), stage=0)
        step = zf.compress_grads(step, "zero_one", freeze_step="auto", var_update_scaler=2)
        state = step.place(zf.TrainState.create({"w": torch.ones(16, dtype=dtype)}, tx))
        for t in range(1, 2 * window + 1):
            state, _ = step(state, torch.full((16,), 1 + 0.1 * t, dtype=dtype))
            if t % window == 0:
                seen = float(state.aux["compress_grads"]["norm"])
                nu = zf.full(state.opt_state.nu)["w"].double()
                assert seen == pytest.approx(float(nu.sum()) / (1 - b2**t), rel=near)

    zf.simulate(2)(body)()


def test_updates_are_what_was_added() -> None:
    """An optimizer's updates can be looked at, also those of steps that a rank takes alone."""

    def step(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(stack_loss)(state.params, batch)
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        looked = tree.map(torch.clone, updates)
        params = optim.apply_updates(state.params, updates)
        new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new, {"updates": looked}

    def body() -> None:
        wrap = zf.compress_grads(zf.shard(step, stage=0), "zero_one", freeze_step=FREEZE, **HOW)
        state = wrap.place(STACK.state(ADAMW, F64))
        for i in range(14):
            new, metrics = wrap(state, zf.local_batch(STACK.batch(i, F64)))
            moved = tree.map(torch.sub, zf.full(new.params), zf.full(state.params))
            assert_near(metrics["updates"], moved, 1e-12)
            state = new

    zf.simulate(2)(body)()


def weighted(params: Any, batch: Tensor) -> Tensor:
    """A loss whose gradient is the batch."""
    return (params["w"] * batch).sum()


def test_a_run_that_goes_on_from_step_0_keeps_what_its_second_moments_know() -> None:
    """They are as many updates old as the optimizer has made, whatever the state's step."""
    b2, before, tx = 0.9, 5, optim.adam(1e-3, b2=0.9)
    sizes = [1.0 + 0.5 * i for i in range(FREEZE)]

    def body() -> list[float]:
        step = zf.shard(zf.train_step(weighted, tx), stage=0)
        step = zf.compress_grads(step, "zero_one", freeze_step=FREEZE, **HOW)
        state, seen = zf.TrainState.create({"w": torch.ones(8, dtype=F64)}, tx), []
        nu = {"w": torch.full((8,), 1 - b2**before, dtype=F64)}  # of squares that were 1
        old = state.opt_state._replace(count=torch.tensor(before), nu=nu)
        state = step.place(state.replace(opt_state=old))
        for size in sizes:
            state, _ = step(state, torch.full((8,), size, dtype=F64))
            nu = zf.full(state.opt_state.nu)["w"] / (1 - b2 ** int(state.opt_state.count))
            seen.append(float(nu[0]))
        return seen

    expected, v, learnt = [], 1 - b2**before, before
    for size, (_, kind) in zip(sizes, policy(), strict=False):
        if kind == "dense":
            v, learnt = b2 * v + (1 - b2) * size**2, learnt + 1
        expected.append(v / (1 - b2**learnt))
    for seen in zf.simulate(2)(body)():
        assert seen == pytest.approx(expected, rel=1e-9)


def test_a_rate_of_0_leaves_momentum_where_it_is() -> None:
    """Nothing has moved, so an average would find no momentum in it."""
    tx = optim.adam(lambda count: 0.01 if int(count) < FREEZE else 0.0)

    def body() -> None:
        step = zf.shard(zf.train_step(weighted, tx), stage=0)
        step = zf.compress_grads(step, "zero_one", freeze_step=FREEZE, **HOW)
        state = step.place(zf.TrainState.create({"w": torch.ones(8, dtype=F64)}, tx))
        for _ in range(FREEZE):
            state, _ = step(state, torch.ones(8, dtype=F64))
        kept = zf.full(state.opt_state.mu)
        for _ in range(6):
            state, _ = step(state, torch.ones(8, dtype=F64))
            assert_same(zf.full(state.opt_state.mu), kept)

    zf.simulate(2)(body)()
