"""``split`` beside replicas: split over ``tensor``, cut over ``data``, whole over ``replica``.

Eight ranks, on which one batch goes through the same layers as in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same, bits
from tests.laws.split_steps import RULES, TX, Batch, alone, batch, block, loss_of, params, run
from zfunc import optim, tree
from zfunc.optim import DynamicScale
from zfunc.ranks.connected import ConnectedGroup

STAGES = (0, 1, 2, 3)
MESH = zf.mesh(replica=2, data=2, tensor=2)


def on_all(step: Any, stage: int, mesh: Any = MESH) -> zf.Step:
    return zf.shard(zf.split(step, rules=RULES, mesh=mesh), stage=stage, unit_bytes=600)


def seen(state: Any) -> list[bytes]:
    """The bits of what a rank holds."""
    return [bits(x) for x in tree.leaves(state) if isinstance(x, Tensor)]


@pytest.mark.parametrize("stage", STAGES)
def test_eight_ranks_train_as_one_process_does(stage: int) -> None:
    """Replicas hold the same bits, and every rank tells the same metrics."""

    def body() -> Any:
        step = on_all(zf.train_step(loss_of, TX), stage)
        state, metrics = step.place(zf.TrainState.create(params(), TX, key=7)), []
        for i in range(3):
            state, out = step(state, step.local_batch(batch(i, rows=8)))
            metrics.append(out)
        return (metrics, step.unplace(state)), seen(state)

    found = zf.simulate(8)(body)()
    for rank, (mine, held) in enumerate(found):
        assert_near(mine, alone(rows=8), 1e-9)
        assert_same(mine, found[0][0], f"rank {rank}")
        assert held == found[rank % 4][1]
    assert (stage == 0) == (found[0][1] == found[2][1])  # data ranks hold parts of their own


def masked_loss(params: Any, batch: Batch) -> zf.Mean:
    """Over words that count, of which ranks have other numbers, and some have none."""
    x = zf.scan(block, params["blocks"], zf.embed(batch["ids"], params["table"]))
    logits = zf.column(x[:, :-1], params["table"])
    each = zf.cross_entropy(logits, batch["ids"][:, 1:], reduction="none")
    return zf.Mean((each * batch["seen"]).sum(), batch["seen"].sum())


def masked(i: int) -> Batch:
    seen = torch.zeros(8, 4, dtype=torch.float64)
    seen[3 + i % 2 :, 1:] = 1.0
    return {**batch(i, rows=8), "seen": seen}


@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_elements_is_one_over_replicas_and_data(stage: int) -> None:
    def trained(wrap: Callable[[Any], Any]) -> Any:
        step = wrap(zf.train_step(masked_loss, TX))
        state, metrics = step.place(zf.TrainState.create(params(), TX)), []
        for i in range(2):
            state, out = step(state, step.local_batch(masked(i)))
            metrics.append(out)
        return metrics, step.unplace(state)

    want = trained(lambda f: zf.shard(f, stage=0))
    for mine in zf.simulate(8)(lambda: trained(lambda f: on_all(f, stage)))():
        assert_near(mine, want, 1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_norms_count_each_leaf_once(stage: int) -> None:
    full = params()

    def body() -> None:
        step = on_all(zf.train_step(loss_of, TX), stage)
        placed = step.place(zf.TrainState.create(full, TX)).params
        assert_near(tree.global_norm(placed), tree.global_norm(full), 1e-12)
        assert_near(tree.leaf_norms(placed), tree.leaf_norms(full), 1e-12)
        assert_same(zf.full(placed), full)

    zf.simulate(8)(body)()


@pytest.mark.parametrize("stage", STAGES)
def test_trust_ratios_are_those_of_full_leaves(stage: int) -> None:
    tx = optim.lamb(0.02)
    step = zf.train_step(loss_of, tx)
    for mine in zf.simulate(8)(lambda: run(step, lambda f: on_all(f, stage), tx=tx, rows=8))():
        assert_near(mine, alone(tx, rows=8), 1e-9)


class Spoil(torch.autograd.Function):
    """Zero, whose derivative is a number that is given."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, by: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(leaf)
        ctx.by = by
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.full_like(ctx.saved_tensors[0], ctx.by), None


@pytest.mark.parametrize("leaf", ["up", "out"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_one_part_of_a_leaf_leaves_the_step_out_on_all(
    stage: int, leaf: str
) -> None:
    """On the second tensor rank of the first data rank of the second replica."""
    by_step = [False, True, False]

    def loss(params: Any, batch: Any) -> Tensor:
        bad = batch["bad"] and zf.rank() == 5
        leaf_of = params["blocks"][1][leaf]
        return loss_of(params, batch) + Spoil.apply(leaf_of, torch.inf if bad else 0.0)

    def body() -> Any:
        step = zf.precision(
            on_all(zf.train_step(loss, TX), stage), torch.float16, loss_scale=DynamicScale(power=4)
        )
        state = step.place(zf.TrainState.create(params(torch.float32), TX))
        states, told = [step.unplace(state).params], []
        for i, bad in enumerate(by_step):
            mine = {**step.local_batch(batch(i, rows=8)), "bad": bad}
            state, metrics = step(state, mine)
            states.append(step.unplace(state).params)
            told.append({name: metrics[name] for name in metrics if name != "loss"})
        return states, told

    found = zf.simulate(8)(body)()
    for states, told in found:
        assert [bool(metrics["overflow"]) for metrics in told] == by_step
        assert told[1]["overflow_leaf"] == f"blocks.1.{leaf}"
        assert_same(states[2], states[1])
        assert not torch.equal(states[3]["table"], states[2]["table"])
        assert_same((states, told), found[0])


def sent(mesh: Any, rows: int, stage: int) -> list[Any]:
    """Payload by axis of a third step, what was issued in it, and bytes of this rank's part."""
    issued: dict[int, list[tuple[str, str, str]]] = {r: [] for r in range(mesh.world_size)}
    real, lock = ConnectedGroup._issue, threading.Lock()

    def issue(self: Any, kind: str, label: str, *args: Any) -> Any:
        with lock:
            issued[zf.rank()].append((self.axis, kind, label))
        return real(self, kind, label, *args)

    def body() -> Any:
        step = on_all(zf.train_step(loss_of, TX), stage, mesh)
        state = step.place(zf.TrainState.create(params(), TX))
        for i in range(3):
            mine = step.local_batch(batch(i, rows=rows))
            issued[zf.rank()].clear()
            with zf.comm.ledger() as led:
                state, _ = step(state, mine)
        at = mesh.coordinates(zf.rank())["data"]
        bounds = [flat.bounds(at) for flat in state.params.layout.flats]
        by_axis = {axis: n for axis, n in led.by_axis.items() if n}
        return by_axis, led.by_label, sum(b - a for a, b in bounds) * 8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConnectedGroup, "_issue", issue)
        found = zf.simulate(mesh.world_size)(body)()
    return [(*mine, issued[rank]) for rank, mine in enumerate(found)]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_gathered_along_data_alone(stage: int) -> None:
    """Replicas add a sum of this rank's part of the gradients, and nothing along other axes."""
    bare = sent(zf.mesh(data=2, tensor=2), 4, stage)
    for rank, (by_axis, by_label, part, issued) in enumerate(sent(MESH, 8, stage)):
        without = bare[rank % 4][0]
        assert by_axis["tensor"] == without["tensor"]
        assert by_axis["data"] == without["data"] - 8  # the loss is summed over replicas, too
        assert by_axis["replica"] == part  # 2 (R-1)/R of it
        moved = [row for row in issued if row[1] in ("all_gather", "reduce_scatter")]
        assert {axis for axis, _, label in moved if not label.startswith("tensor")} == {"data"}
        assert "tensor forward" in {label for axis, _, label in issued if axis == "tensor"}
        rest = set(by_axis) - {"tensor", "data", "replica"}
        assert all(by_axis[axis] < 1000 for axis in rest), by_axis  # the loss, norms, sums of rows
        assert sum(by_label.values()) == sum(by_axis.values())
