"""``shard`` on two real gloo ranks: the single process's numbers, the simulated ranks' bytes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.dist.counters import kernel_bytes_sent
from tests.laws.cases import (
    ADAMW,
    Run,
    alone,
    assert_like_alone,
    assert_same,
    numbers,
    plain_run,
    regression,
    train,
)
from tests.laws.covering import Covering
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import block, mean_square, stack

F64 = torch.float64
CASES = {**HAND_WRITTEN, **READY_MADE}
NAMES = ["stack", "tiny leaves", "frozen", "unused", "uneven batch", "aux", "mixed dtypes"]
NAMES += ["gan", "the head", "mean teacher"]
STAGES = (0, 1, 2, 3)
REPLICATED = {"stack": (0, 3), "uneven batch": (1,), "the head": (2,)}  # and at which stages


def each_of(rows: list[tuple[str, int]]) -> list[Run]:
    """Metrics, and the full state, of cases at stages."""
    runs = []
    for name, stage in rows:
        case = CASES[name]
        step = zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600, roles=case.roles)
        step = zf.donate(step) if stage % 2 else step
        placed = step.place(case.state(ADAMW, F64))
        metrics, state = train(step, placed, case, 3)
        runs.append((metrics, step.unplace(state)))
    return runs


def test_real_ranks_end_where_one_process_does_and_simulated_ones_do() -> None:
    """Each case at every other stage; at all of them with ``--whole``."""
    rows = [
        (name, stage)
        for turn, name in enumerate(NAMES)
        for stage in (STAGES if Covering.whole else STAGES[turn % 2 :: 2])
    ]
    real = zf.launch(each_of, rows, nprocs=2, timeout=120)
    simulated = zf.simulate(2)(each_of)(rows)
    for at, (name, stage) in enumerate(rows):
        case, runs = CASES[name], [ranks[at] for ranks in real]
        assert_like_alone(runs, plain_run(case), case.tolerance)
        for run, twin in zip(runs, simulated, strict=True):
            assert_same(run, twin[at], f"{name}, stage {stage}")


def replicas() -> dict[tuple[str, int], Run]:
    """Metrics, and the full state, of two replicas of two ranks each."""
    runs = {}
    for name, stages in REPLICATED.items():
        case = CASES[name]
        for stage in stages:
            mesh = zf.mesh(replica=2, data=2)
            step = zf.shard(
                case.step(ADAMW), stage=stage, mesh=mesh, unit_bytes=600, roles=case.roles
            )
            metrics, state = train(step, step.place(case.state(ADAMW, F64)), case, 3)
            runs[name, stage] = metrics, step.unplace(state)
    return runs


def test_replicas_on_real_ranks_end_where_one_process_does_and_simulated_ones_do() -> None:
    real = zf.launch(replicas, nprocs=4, timeout=120)
    simulated = zf.simulate(4)(replicas)()
    for name, stage in real[0]:
        case = CASES[name]
        runs = [ranks[name, stage] for ranks in real]
        assert_like_alone(runs, alone(case, steps=3), case.tolerance)
        for run, twin in zip(runs, simulated, strict=True):
            assert_same(run, twin[name, stage], f"{name}, stage {stage}")


def dropout_loss(params: Any, batch: Any) -> Tensor:
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.3), params["blocks"], batch["x"])
    return mean_square(x @ params["head"]["w"], batch["y"])


def bytes_and_dropout() -> list[Any]:
    """What the ledger counts and ``describe`` says in one step; losses under dropout."""
    found: list[Any] = []
    for stage in STAGES:
        step = zf.shard(zf.train_step(dropout_loss, ADAMW), stage=stage, unit_bytes=600)
        state = step.place(zf.TrainState.create(stack(F64), ADAMW, key=4))
        for i in range(3):
            with zf.comm.ledger() as led:
                state, metrics = step(state, zf.local_batch(regression(i, F64)))
            found.append((dict(led.by_kind), led.calls, led.total_bytes, float(metrics["loss"])))
        assert step.describe().sent_bytes == led.total_bytes
        found.append(step.describe().state_bytes)
    return found


def test_real_ranks_send_what_simulated_ones_send_and_draw_the_same_numbers() -> None:
    assert zf.launch(bytes_and_dropout, nprocs=2) == zf.simulate(2)(bytes_and_dropout)()


def wide(dtype: torch.dtype) -> Any:
    """Some 2.2M parameters."""
    layers = [{"w": numbers((512, 512), i, dtype, 0.03)} for i in range(8)]
    return {"blocks": zf.Layers(layers), "head": numbers((512, 100), 9, dtype)}


def wide_loss(params: Any, x: Tensor) -> Tensor:
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["blocks"], x)
    return (x @ params["head"]).square().mean()


def wires() -> dict[int, tuple[int, int]]:
    """Bytes of three steps at each stage: by the ledger, and by the kernel."""
    counted = {}
    for stage in STAGES:
        step = zf.donate(zf.shard(zf.train_step(wide_loss, ADAMW), stage=stage, unit_bytes=1 << 20))
        state = step.place(zf.TrainState.create(wide(torch.float32), ADAMW))
        ranks = zf.ranks.axes.group(None, "data")
        ranks.barrier()
        before = kernel_bytes_sent()
        with zf.comm.ledger() as led:
            for i in range(3):
                state, _ = step(state, numbers((4, 512), 10 * i + zf.rank(), torch.float32))
        counted[stage] = led.total_bytes, kernel_bytes_sent() - before
        ranks.barrier()
    return counted


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP counters")
def test_the_kernel_counts_what_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")  # through which no socket is needed
    count = sum(x.numel() for x in zf.tree.leaves(wide(torch.float32)))
    for counted in zf.launch(wires, nprocs=2):
        for stage, (ours, kernels) in counted.items():
            assert kernels == pytest.approx(ours, rel=0.03), stage
            per_step = ours / 3 / 4
            if stage < 3:
                assert per_step == pytest.approx(2 * count / 2, rel=0.02)
            else:
                assert 2 * count / 2 < per_step <= 3 * count / 2 * 1.02
