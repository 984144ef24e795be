"""What tests of 0/1 Adam share: a short policy with every kind of step, and what it does when."""

from __future__ import annotations

from typing import Any

import torch

import zfunc as zf
from tests.laws.models import CASES as READY_MADE

F64 = torch.float64
STACK = READY_MADE["stack"]
HOW = {"var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
FREEZE, STEPS = 7, 20


def wrapped(case: Any, tx: Any, freeze: int | str = FREEZE, **how: Any) -> Any:
    step = zf.shard(case.step(tx), stage=0, unit_bytes=600, roles=case.roles)
    return zf.compress_grads(step, "zero_one", freeze_step=freeze, **{**HOW, **how})


def policy() -> list[tuple[int, str]]:
    """What each step does, with the counters of the published code."""
    out, interval, counter, between, steps = [], 1, 0, 1, 0
    for t in range(1, STEPS + 1):
        if t <= FREEZE:
            out.append((t, "dense" if t % interval == 0 else "compressed"))
            counter += t % interval == 0
            if counter == HOW["var_update_scaler"]:
                counter, interval = 0, 2 * interval
            continue
        out.append((t, "average" if t % between == 0 else "local"))
        steps += 1
        if steps == HOW["local_step_scaler"]:
            steps, between = 0, min(HOW["local_step_clipper"], 2 * between)
    return out
