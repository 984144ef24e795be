"""Gradients take the memory that they need: of dropped graphs none, of microbatches one set."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import zfunc as zf
from tests.unit.live_bytes import Peak
from tests.unit.peaks import measured, needs_peaks
from zfunc import optim

Tree = Any
WIDTH, DEPTH = 64, 6
UNIT = WIDTH * WIDTH * 4


def params() -> Tree:
    layers = [{"w": torch.full((WIDTH, WIDTH), 0.01 * (i + 1))} for i in range(DEPTH)]
    return {"first": torch.eye(WIDTH), "blocks": zf.Layers(layers)}


def loss(params: Tree, x: Tensor) -> Tensor:
    x = x @ params["first"]
    return zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["blocks"], x).square().mean()


def peaks_of_a_step() -> dict[int, list[tuple[int, int]]]:
    """Per stage, for 1, 2 and 3 microbatches: the peak of a second step, and the bytes of one set
    of gradients."""
    return {stage: [peak_of_a_step(n, stage) for n in (1, 2, 3)] for stage in (2, 3)}


def peak_of_a_step(n: int, stage: int) -> tuple[int, int]:
    tx = optim.sgd(0.1)
    step = zf.accumulate(zf.shard(zf.train_step(loss, tx), stage=stage, unit_bytes=UNIT), n)
    state = step.place(zf.TrainState.create(params(), tx))
    batch = torch.ones(6, WIDTH)
    state, _ = step(state, batch)
    gc.collect()
    with Peak() as peak:
        step(state, batch)
    ranks = 1 if stage == 3 else zf.world_size()  # at stage 3 params are this rank's own
    return peak.bytes, zf.tree.size_bytes(state.params) // ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_microbatches_need_one_more_set_of_gradients(ranks: int) -> None:
    # Two real ranks: among simulated ones the last to come adds up for all, and what this one
    # holds depends on who that is.
    seen = zf.launch(peaks_of_a_step, nprocs=2) if ranks == 2 else zf.simulate(1)(peaks_of_a_step)()
    for stages in seen:
        for (one, gradients), *more in stages.values():
            assert all(peak <= one + gradients for peak, _ in more)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_nobody_holds_are_gone(stage: int) -> None:
    """Not at the end of the step."""

    def gone(state: Any, x: Tensor) -> Any:
        _, grads = zf.value_and_grad(loss)(state.params, x)
        zf.tree.global_norm(grads)
        held = [StorageWeakRef(x.untyped_storage()) for x in zf.tree.leaves(grads)]
        del grads
        return state, all(ref.expired() for ref in held)

    def run() -> bool:
        step = zf.shard(gone, stage=stage, unit_bytes=UNIT)
        state = step.place(zf.TrainState.create(params(), optim.sgd(0.1)))
        return bool(step(state, torch.ones(2, WIDTH))[1])

    assert zf.simulate(1)(run)() == [True]


def test_sums_of_microbatches_leave_the_users_memory_alone() -> None:
    """A gradient may be a tensor of the user's, or two leaves' at once."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: Tensor, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return p.sum() * 0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return ctx.saved_tensors[0], None

    kept = torch.arange(64.0)

    def both(params: Tree, batch: Tensor) -> Tensor:
        return Given.apply(params["a"], kept) + (params["b"] + params["c"]).sum() * batch.mean()

    def run() -> tuple[Tensor, Tree]:
        @zf.accumulate(n=3)
        @zf.shard(stage=3, unit_bytes=256)
        def step(state: Tree, batch: Tensor) -> Any:
            _, grads = zf.value_and_grad(both)(state["params"], batch)
            return state, zf.full(grads)

        state = step.place({"params": {name: torch.zeros(64) for name in "abc"}})
        return kept.clone(), step(state, torch.ones(6, 1))[1]

    ((now, grads),) = zf.simulate(1)(run)()
    assert torch.equal(now, torch.arange(64.0))
    assert torch.equal(grads["a"], 3 * torch.arange(64.0))
    assert torch.allclose(grads["b"], torch.ones(64)) and torch.allclose(grads["c"], torch.ones(64))


DROPPED = """
import gc
from statistics import median
class Stop(Exception): pass
stopped = 0
def loss(params, x):
    for p in params["blocks"]:
        x = zf.layer(lambda p, x: torch.softmax(x @ p["w"], 0), p, x)
    raise Stop
@zf.shard(stage=3)
def step(state, x):
    global stopped
    try:
        zf.value_and_grad(loss)(state["params"], x)
    except Stop:
        stopped += 1
    return state
def run():
    params = {"blocks": zf.Layers([{"w": torch.eye(512)} for _ in range(2)])}
    with step as placing:
        state, x = placing.place({"params": params}), torch.ones(2048, 512)
        for _ in range(2):
            placing(state, x)
        gc.collect()
        begin = held()
        for _ in range(40):
            placing(state, x)
        gc.collect()
        print(begin, held())
zf.simulate(2)(run)()
assert stopped == 2 * 42, stopped  # each has made a graph and dropped it
"""


@needs_peaks
def test_dropped_graphs_leave_nothing_behind() -> None:
    """Each of the 40 held outputs of 8 MiB."""
    begin, end = measured(DROPPED)[:2]
    assert end - begin < 16 * 2**20
