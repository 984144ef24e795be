"""``compress_grads`` on two real gloo ranks: the simulated ranks' bits, the kernel's bytes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.dist.counters import kernel_bytes_sent
from tests.dist.test_shard_gloo import wide, wide_loss
from tests.laws.cases import ADAMW, assert_same, numbers, regression, train
from tests.laws.covering import Covering
from tests.laws.models import CASES
from zfunc import tree

STACK = CASES["stack"]


def in_ways(ways: list[tuple[str, int]]) -> list[Any]:
    """Metrics and the full state of methods at stages."""
    runs = []
    for method, stage in ways:
        step = zf.shard(STACK.step(ADAMW), stage=stage, unit_bytes=600)
        step = zf.donate(zf.compress_grads(step, method=method, freeze_step=2))
        placed = step.place(STACK.state(ADAMW, torch.float32))
        metrics, state = train(step, placed, STACK, 4, torch.float32)
        runs.append((metrics, step.unplace(state)))
    return runs


def all_phases() -> list[Any]:
    """The kinds of 0/1 Adam's steps, and the metrics and full states after each of them."""
    step = zf.shard(STACK.step(ADAMW), stage=0, unit_bytes=600)
    often = {"var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 2}
    step = zf.donate(zf.compress_grads(step, method="zero_one", freeze_step=6, **often))
    state, seen = step.place(STACK.state(ADAMW, torch.float32)), []
    for i in range(12):
        with zf.comm.ledger() as led:
            state, metrics = step(state, regression(10 * i + zf.rank(), torch.float32))
        seen.append((led.total_bytes, metrics, tree.map(torch.clone, step.unplace(state))))
    return seen


def all_of_it(ways: list[tuple[str, int]]) -> Any:
    return in_ways(ways), all_phases()


def test_real_ranks_end_where_simulated_ones_do() -> None:
    """Each method at every other stage; at all of them with ``--whole``."""
    ways = [
        (method, stage)
        for turn, method in enumerate(("onebit", "int8", "int4"))
        for stage in (range(4) if Covering.whole else range(turn % 2, 4, 2))
    ]
    real = zf.launch(all_of_it, ways, nprocs=2, timeout=120)
    for got, expected in zip(real, zf.simulate(2)(all_of_it)(ways), strict=True):
        assert_same(got, expected)
    a, b = (phases for _, phases in real)
    for mine, theirs in zip(a, b, strict=True):  # what 0/1 Adam shares is so in every step
        assert_same(mine[1:], theirs[1:])
    sent = [nbytes for nbytes, *_ in a]
    # Of the third step one bit a gradient, of the ninth flags, norms and losses.
    assert sent[8] < sent[2] < sent[0] / 4


def wires() -> list[tuple[float, float, float]]:
    """For each stage: bytes of four compressed steps by the ledger, by the kernel, and plain."""
    seen = []
    for stage in range(4):
        step = zf.shard(zf.train_step(wide_loss, ADAMW), stage=stage, unit_bytes=1 << 20)
        step = zf.compress_grads(step, freeze_step=2)
        state = step.place(zf.TrainState.create(wide(torch.float32), ADAMW))
        ranks = zf.ranks.axes.group(None, "data")
        counted = []
        for steps in (2, 4):
            ranks.barrier()
            before = kernel_bytes_sent()
            with zf.comm.ledger() as led:
                for i in range(steps):
                    batch = numbers((4, 512), 10 * i + zf.rank(), torch.float32)
                    state, _ = step(state, batch)
            ranks.barrier()
            counted.append((led.total_bytes, kernel_bytes_sent() - before))
        seen.append((*counted[1], 2 * counted[0][0]))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP counters")
def test_the_kernel_counts_what_the_ledger_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")  # through which no socket is needed
    for ranks in zf.launch(wires, nprocs=2):
        for stage, (ours, kernels, plain) in enumerate(ranks):
            assert kernels == pytest.approx(ours, rel=0.03), stage
            if stage == 0:
                assert plain > 30 * ours


def test_a_batch_of_each_rank_counts() -> None:
    """Ranks that see different data still end in the same bits."""

    def body() -> Any:
        step = zf.compress_grads(zf.shard(STACK.step(ADAMW), stage=0), freeze_step=1)
        state = step.place(STACK.state(ADAMW, torch.float32))
        for i in range(4):
            batch = regression(10 * i + zf.rank(), torch.float32)
            state, _ = step(state, batch)
        return step.unplace(state).params

    a, b = zf.launch(body, nprocs=2)
    assert_same(a, b)
