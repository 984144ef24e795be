"""What tests of ``compress_grads`` share: a step under it, and runs of one on simulated ranks."""

from __future__ import annotations

from typing import Any

import torch

import zfunc as zf
from tests.laws.cases import ADAMW, Case, train
from tests.laws.models import CASES
from zfunc import optim

__all__ = ["CLIPPED", "F64", "STACK", "STAGES", "runs_of", "wrapped"]

F64 = torch.float64
STAGES = (0, 1, 2, 3)
STACK = CASES["stack"]
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02))


def wrapped(case: Case, tx: Any, stage: int, freeze: int | str, **how: Any) -> Any:
    step = zf.shard(case.step(tx), stage=stage, unit_bytes=600, roles=case.roles)
    return zf.compress_grads(step, freeze_step=freeze, **how)


def runs_of(
    case: Case,
    ranks: int,
    stage: int,
    freeze: int | str,
    tx: Any = ADAMW,
    steps: int = 6,
    donated: bool = False,
) -> list[Any]:
    """Metrics and the full state of each rank."""
    full = case.state(tx, F64)

    def body() -> Any:
        step = wrapped(case, tx, stage, freeze)
        step = zf.donate(step) if donated else step
        metrics, state = train(step, step.place(full), case, steps)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()
