"""``split`` and ``shard`` on four pretended GPUs: gathers beside sums, without races or waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.test_capture import CLIPPED
from tests.gpu.training import Model, gpt_model, trained
from zfunc.language import gpt

MODEL = gpt_model()
RULES = gpt.rules(gpt.GPTConfig(vocab=48, width=16, depth=3, heads=2))
STAGES = (0, 1, 2, 3)
ON_POSITIONS = (10, 13)  # a module whose layers run on positions of the stream, at stages 0 and 3
RUNS = (*STAGES, *ON_POSITIONS)
DATA, TENSOR = 2, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.0)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, words: int = 48, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


torch.manual_seed(0)
NET = Net()
MODULE = zf.functionalize(NET, train=True)


def module_loss(params: Any, ids: Tensor) -> Tensor:
    logits = MODULE.apply(params, ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


MODELS = {False: MODEL, True: Model(lambda: MODULE.params, module_loss, MODEL.batch)}


@dataclass
class Seen:
    """A run, as one rank saw it.

    Attributes:
        losses: of its steps.
        faults: races and mixed devices of all steps, and of placing.
        waits: of the host, in the steps after the first.
        issued: for each step kind, label and communicator of every collective, in order.
    """

    losses: list[float]
    faults: list[str]
    waits: list[str]
    issued: list[list[tuple[str, str, str]]]


def split(stage: int) -> Callable[[Any], Any]:
    mesh = zf.mesh(data=DATA, tensor=TENSOR)
    how: dict[str, Any] = {"rules": RULES}
    if stage in ON_POSITIONS:
        how = {"model": MODULE, "sequence": True}

    def wrap(step: Any) -> Any:
        parted = zf.split(zf.donate(step), mesh=mesh, **how)
        return zf.shard(parted, stage=stage % 10, unit_bytes=1 << 12)

    return wrap


def _seen(stage: int) -> Seen:
    run = trained(split(stage), CLIPPED, MODELS[stage in ON_POSITIONS], key=3)
    reports = [run.placing, *run.reports]
    return Seen(
        [float(row["loss"]) for row in run.metrics],
        [str(row) for report in reports for row in report.faults()],
        [str(row) for report in run.reports[1:] for row in report.host_waits()],
        [[(r.what, r.label, r.group) for r in report.collectives()] for report in run.reports],
    )


def _every_stage() -> dict[int, Seen]:
    return {stage: _seen(stage) for stage in RUNS}


@functools.cache
def runs() -> list[dict[int, Seen]]:
    """By rank; in one launch."""
    return ranks.launch(_every_stage, nprocs=DATA * TENSOR)


@functools.cache
def on_the_host(on_positions: bool) -> list[float]:
    """The losses of one process without a GPU."""
    run = trained(lambda f: f, CLIPPED, MODELS[on_positions], on_gpu=False, key=3)
    return [float(row["loss"]) for row in run.metrics]


@pytest.mark.parametrize("stage", RUNS)
def test_it_trains_without_races(stage: int) -> None:
    for rank in runs():
        assert rank[stage].losses == pytest.approx(on_the_host(stage in ON_POSITIONS), rel=1e-5)
        assert not rank[stage].faults


@pytest.mark.parametrize("stage", RUNS)
def test_the_host_waits_for_nothing_after_the_first_step(stage: int) -> None:
    for rank in runs():
        assert not rank[stage].waits


def queues(seen: Seen) -> tuple[set[str], set[str], set[str]]:
    """Communicators of sums over ``tensor``, of gathers and of reductions over ``data``."""
    rows = [row for step in seen.issued for row in step]
    tensor = {group for _, label, group in rows if label.startswith("tensor")}
    gathers = {group for what, _, group in rows if what == "all_gather"} - tensor
    reductions = {group for what, label, group in rows if label.startswith("reduce")}
    return tensor, gathers, reductions


@pytest.mark.parametrize("stage", RUNS)
def test_sums_and_gathers_go_through_communicators_of_their_own(stage: int) -> None:
    for rank in runs():
        tensor, gathers, reductions = queues(rank[stage])
        assert tensor and reductions and bool(gathers) == (stage % 10 > 0)
        assert not tensor & gathers and not tensor & reductions


@pytest.mark.parametrize("stage", RUNS)
def test_all_ranks_issue_in_one_order(stage: int) -> None:
    """Over all communicators together: ranks that share one must not meet in other orders."""
    for i in range(3):
        orders = [[row[:2] for row in rank[stage].issued[i]] for rank in runs()]
        assert orders[0] and all(order == orders[0] for order in orders)
    assert runs()[0][stage].issued[1] == runs()[0][stage].issued[2]
