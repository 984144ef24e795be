"""Simulated ranks that are busy beyond the timeout are waited for; those that hang are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from zfunc.errors import DesyncError
from zfunc.ranks.axes import group
from zfunc.ranks.point_to_point import receive, send
from zfunc.ranks.simulation import simulate
from zfunc.ranks.transfers import TensorSpec
from zfunc.ranks.world import current
from zfunc.transforms import splitting

PAIR = TensorSpec((2,), torch.float32)
LARGE = TensorSpec((6_000_000,), torch.float32)


def waiting_for_each_other(seconds: float) -> list[float]:
    """Rank 1 waits for rank 0, which is busy; rank 2 waits for rank 1, which is not."""
    ranks = group(None, "data")
    found = []
    if ranks.rank == 0:
        with current().busy():
            time.sleep(seconds)
        send(ranks, torch.full((2,), 3.0), 1).wait()
    else:
        x = receive(ranks, PAIR, ranks.rank - 1).wait()[0]
        if ranks.rank == 1:
            send(ranks, x + 1, 2).wait()
        found = x.tolist()
    ranks.barrier()
    if ranks.rank == 0:
        with current().busy():
            time.sleep(seconds)
    total = ranks.all_reduce(torch.ones(1)).wait()
    if ranks.rank == 1:
        with current().busy():  # what rank 0 sends waits in its memory until it is asked for
            time.sleep(seconds)
        receive(ranks, LARGE, 0).wait()
    if ranks.rank == 0:
        send(ranks, torch.ones(LARGE.shape), 1).wait()
    return [*found, *total.tolist()]


RESULTS = [[3.0], [3.0, 3.0, 3.0], [4.0, 4.0, 3.0]]


def test_simulated_ranks_wait_for_a_busy_one() -> None:
    assert simulate(3, timeout=0.3)(waiting_for_each_other)(1.2) == RESULTS


def hanging(seconds: float) -> tuple[str, float]:
    ranks = group(None, "data")
    ranks.barrier()
    if ranks.rank == 1:
        with current().busy():
            pass
        time.sleep(seconds)
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(DesyncError) as caught:
        ranks.all_reduce(torch.ones(2), label="ones").wait()
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_hangs_after_it_was_busy_is_missed() -> None:
    text, waited = simulate(2, timeout=0.5)(hanging)(8.0)[0]
    assert "'ones'" in text and "rank 1 did not take part" in text
    assert waited < 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def slowly(plan: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def planned(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return plan(*args, **kwargs)

    return planned


def placed_on_ranks() -> list[int]:
    """Each rank has a split of its own, and plans for itself; then all meet along ``data``."""
    module = nn.Sequential(Block(), Block())
    for p in module.parameters():  # threads share torch's generator
        nn.init.constant_(p, 0.1)
    model = zf.functionalize(module)
    mesh = zf.mesh(data=2, tensor=2)
    predict = zf.split(model.apply, model, mesh=mesh, example=(3, 4))
    params = predict.place(model.params)
    group(mesh, "data").barrier()
    return list(zf.tree.leaves(params)[0].shape)


def test_planning_for_longer_than_the_timeout_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They plan one after the other, so the first waits for the others."""
    monkeypatch.setattr(splitting, "plan_of", slowly(splitting.plan_of, 0.8))
    assert simulate(4, timeout=0.5)(placed_on_ranks)() == [[4]] * 4
