"""``offload`` to disk on two real gloo ranks: the bits of the same run in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, train
from tests.laws.models import CASES

F64 = torch.float64
STACK = CASES["stack"]


def every_stage(path: Path | None) -> list[Any]:
    """Metrics and the full state at each stage, on disk where there is a path."""
    runs = []
    for stage in range(4):
        step = STACK.step(ADAMW)
        step = step if path is None else zf.offload(step, to="disk", path=path)
        with zf.shard(step, stage=stage, unit_bytes=600) as step:
            metrics, state = train(step, step.place(STACK.state(ADAMW, F64)), STACK, 3)
            runs.append((metrics, step.unplace(state)))
    return runs


def test_two_real_ranks(tmp_path: Path) -> None:
    on_disk = zf.launch(every_stage, tmp_path, nprocs=2, timeout=120)
    in_memory = zf.launch(every_stage, None, nprocs=2, timeout=120)
    assert_same(on_disk, in_memory)
    assert all((tmp_path / f"rank-0000{k}").is_dir() for k in (0, 1))
