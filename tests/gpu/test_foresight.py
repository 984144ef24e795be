"""What ``zf.foresee`` says of GPUs is what ranks send that compute on pretended ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import zfunc as zf
from tests.gpu import ranks
from tests.laws.covering import STAGES, Covering
from tests.laws.foreseen_steps import STEPS, batch

pytestmark = pytest.mark.usefixtures("thawed")

NAMES = ("plain", "all of them", "fp16", "int8", "split", "lamb")
COUNTED = ("by_kind", "by_label", "by_axis", "headers_by_label", "calls_by_label", "calls")
CASES = [
    (name, stage)
    for turn, name in enumerate(NAMES)
    for stage in (STAGES if Covering.whole else (turn % 4,))
]


def up(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) and x.is_floating_point() and x.dim() else x


def observed(name: str, stage: int) -> Any:
    """On one rank of two: the ledgers of two steps, by name, and the bytes of the state."""
    step = STEPS[name].step(stage, 2)
    state = step.place(zf.tree.map(up, STEPS[name].state()))
    rows, ledgers = step.local_batch(batch(2)).cuda(), []
    size = zf.tree.size_bytes(state)
    for _ in range(2):
        with zf.comm.ledger() as sent:
            state, _ = step(state, rows)
        ledgers.append({counted: getattr(sent, counted) for counted in COUNTED})
    return *ledgers, size


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_bytes_and_calls_are_those_of_ranks_with_gpus(name: str, stage: int) -> None:
    """Reductions in one round, headers in a ring."""
    seen = ranks.launch(observed, name, stage, alone=True)  # ranks that stay have learnt things
    for rank, (first, steady, size) in enumerate(seen):
        step = STEPS[name].step(stage, 2)
        own = batch(2) if name == "split" else batch(2)[:4]
        told = zf.foresee(step, STEPS[name].state(), own, ranks=2, rank=rank)
        for counted in COUNTED:
            assert getattr(told.first, counted) == first[counted], (rank, counted)
            assert getattr(told.sent, counted) == steady[counted], (rank, counted)
        assert told.state_bytes == size
