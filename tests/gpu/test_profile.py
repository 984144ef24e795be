"""``zf.profile`` on a pretended GPU: events, and no host wait that the step has not by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu.cuda import Cuda
from tests.gpu.training import GPT
from zfunc import optim
from zfunc.foresight.layer_names import named
from zfunc.foresight.op_times import EventTimes
from zfunc.foresight.profiling import watching
from zfunc.foresight.watch import Watch


def bf16(step: Any) -> Any:
    return zf.precision(zf.remat(step), compute=torch.bfloat16)


@pytest.mark.parametrize("wrap", [zf.donate, bf16, lambda f: zf.offload(f, to="cpu")])
def test_a_watched_step_waits_where_the_step_waits(wrap: Any) -> None:
    """And launches what it launches, without races."""
    tx = optim.adamw(1e-3)
    step = wrap(zf.shard(zf.train_step(GPT.loss, tx), stage=3))
    with Cuda() as cuda:
        state = zf.TrainState.create(zf.tree.map(lambda x: x.cuda(), GPT.params()), tx)
        state, rows = step.place(state), GPT.batch(0).cuda()
        times = EventTimes()
        watch = Watch(times, on_gpu=True)
        watched = named(step, watch.layers)
        for _ in range(2):
            state, _ = step(state, rows)
            state, _ = watched(state, rows)
        cuda.take()
        state, _ = step(state, rows)
        plain = cuda.take()
        times.begin()
        cuda.take()
        with watching(watch):
            state, _ = watched(state, rows)
        seen = cuda.take()
        times.end()
        noted = watch.rows()
    assert seen.sites("sync", "pageable") == plain.sites("sync", "pageable")
    assert not seen.faults()
    launched = Counter(row.what for row in plain.of("launch", "kernel", "copy"))
    assert Counter(row.what for row in seen.of("launch", "kernel", "copy")) == launched
    assert any(row.stream and row.layer.startswith("blocks") for row in noted)
    assert {"forward", "backward"} <= {row.phase for row in noted}


def test_a_profile_of_a_step_on_a_gpu() -> None:
    tx = optim.adamw(1e-3)
    step = zf.donate(zf.train_step(GPT.loss, tx))
    with Cuda():
        state = zf.TrainState.create(zf.tree.map(lambda x: x.cuda(), GPT.params()), tx)
        seen = zf.profile(step, state, GPT.batch(0).cuda())
        told = str(seen)
    expected = zf.foresee(step, zf.tree.map(lambda x: x.cpu(), state), GPT.batch(0), ranks=1)
    assert seen.flops.by_phase == expected.flops.by_phase
    assert seen.device == "Pretended GPU" and seen.peak.flops_per_second is None
    assert "unknown" in told
