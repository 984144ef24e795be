"""Ranks on different paths through a sharded model: right, or told which unit; none hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import regression
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import optim

F64 = torch.float64
TX = optim.sgd(0.1)
ORDERS = {"order": [0, 2, 1], "skip": [0, 2], "more": [0, 1, 2, 1], "exit": [0, 1, 2]}


def parting(params: Any, batch: Any, how: str) -> Tensor:
    """Rank 1 takes another path through the layers than the others, or leaves."""
    x = batch["x"]
    for k, i in enumerate(ORDERS[how] if zf.rank() == 1 else [0, 1, 2]):
        if how == "exit" and zf.rank() == 1 and k == 1:
            raise ZeroDivisionError("on purpose")
        x = zf.layer(block, params["blocks"][i], x)
    return mean_square(x @ params["head"]["w"], batch["y"])


def part_ways(how: str, stage: int, caught: bool = True) -> str:
    """What this rank is told in a step in which rank 1 parts, after one in which nobody does."""

    def loss(params: Any, batch: Any) -> Tensor:
        return parting(params, batch, how) if batch["parting"] else stack_loss(params, batch)

    step = zf.shard(zf.train_step(loss, TX), stage=stage, unit_bytes=1)
    state = step.place(zf.TrainState.create(stack(F64), TX))
    batch = {**zf.local_batch(regression(0, F64)), "parting": False}
    state, _ = step(state, batch)
    try:
        step(state, {**batch, "parting": True})
    except (zf.DesyncError, ZeroDivisionError) as error:
        if caught:
            return f"{type(error).__name__}: {error}"
        raise
    return "nothing"


def test_a_simulated_rank_that_runs_a_layer_once_more() -> None:
    """In a step after one in which all ranks ran it once nobody expects one more gather. Where
    parameters are whole there is none. (Other orders and fewer layers are right; so are more, where
    ranks differ from the first step on: ``tests/laws/test_mixtures.py``.)"""
    told = zf.simulate(2, timeout=20)(part_ways)("more", 3)
    for text in told:
        assert "DesyncError" in text and "blocks.1" in text and "loss" in text, text
    assert zf.simulate(2, timeout=20)(part_ways)("more", 1) == ["nothing"] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_a_simulated_rank_that_fails_in_a_layer(stage: int) -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        zf.simulate(3, timeout=20)(part_ways)("exit", stage, caught=False)
    told = zf.simulate(3, timeout=20)(part_ways)("exit", stage)
    assert told[1] == "ZeroDivisionError: on purpose"
    assert "rank 1 has returned" in told[0] + told[2]
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(("how", "stage"), [("order", 3), ("skip", 1)])
def test_real_ranks_on_other_paths(how: str, stage: int) -> None:
    start = time.monotonic()
    for told in zf.launch(part_ways, how, stage, nprocs=2, timeout=100):
        assert told == "nothing"
    assert time.monotonic() - start < 50, "some waited for each other"


def test_a_real_rank_that_fails_in_a_layer() -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        zf.launch(part_ways, "exit", 3, False, nprocs=2, timeout=100)
    assert time.monotonic() - start < 50
