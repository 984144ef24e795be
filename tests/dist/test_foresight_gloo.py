"""What ``zf.foresee`` says is what real gloo ranks send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from benchmarks.models import GPT, SIZES
from benchmarks.peers import zfunc_step
from tests.laws.covering import Covering
from tests.laws.foreseen_steps import COUNTED, STEPS, batch

pytestmark = pytest.mark.usefixtures("thawed")

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NAMES = {"all of them": 3, "split": 0}


def sent_by_rank() -> list[Any]:
    """For each step the ledgers of its first two calls, and the bytes of its state."""
    found = []
    for name, stage in NAMES.items():
        step, ledgers = STEPS[name].step(stage, 2), []
        state, rows = step.place(STEPS[name].state()), step.local_batch(batch(2))
        size = zf.tree.size_bytes(state)
        for _ in range(2):
            with zf.comm.ledger() as sent:
                state, _ = step(state, rows)
            ledgers.append({counted: getattr(sent, counted) for counted in COUNTED})
        found.append((*ledgers, size, rows))
    return found


def test_bytes_and_calls_are_those_of_real_ranks() -> None:
    """By label, in the first and in a steady step."""
    for rank, found in enumerate(zf.launch(sent_by_rank, nprocs=2, timeout=120)):
        for (name, stage), (first, steady, size, rows) in zip(NAMES.items(), found, strict=True):
            step, state = STEPS[name].step(stage, 2), STEPS[name].state()
            told = zf.foresee(step, state, rows, ranks=2, rank=rank, device="cpu")
            assert told.state_bytes == size
            for counted in COUNTED:
                assert getattr(told.first, counted) == first[counted], (name, rank, counted)
                assert getattr(told.sent, counted) == steady[counted], (name, rank, counted)


# Two ranks sum a small gradient in one round since then, and begin no second one with a header.
FEWER = {0: 16}


@pytest.mark.parametrize("stage", [0, 1, 3] if Covering.whole else [3])
def test_bytes_are_those_that_a_benchmark_recorded(stage: int) -> None:
    """33.7 million parameters on two processes, on another machine."""
    record = json.loads((RESULTS / "train_step-small-20261121-182005.json").read_text())
    size, ranks = SIZES[record["settings"]["size"]], record["settings"]["ranks"]
    with torch.device("meta"):
        module = GPT(size)
    ids = torch.empty(size.batch, size.tokens, dtype=torch.int64, device="meta")
    told = zf.foresee(*zfunc_step(module, stage), ids, ranks=ranks, device="cpu")
    recorded = record["contestants"][f"zfunc{stage}"]["ledger_bytes"]
    assert told.sent.total_bytes == recorded - FEWER.get(stage, 0)
