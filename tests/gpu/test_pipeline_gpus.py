"""``pipeline`` on pretended GPUs: messages beside computation, without races or waits."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.test_capture import CLIPPED
from tests.gpu.training import Model, trained
from tests.laws.covering import Covering
from zfunc.language import gpt

CONFIG = gpt.GPTConfig(vocab=48, width=16, depth=4, heads=2, tied=True)
MICROBATCHES = 4
EVERY = [("1f1b", 0), ("1f1b", 1), ("zb", 1), ("zb", 3), ("zbv", 3)]
# Ranks along pipe and data: schedules and ZeRO stages, which mean little on one data rank.
RUNS = {(2, 1): [("1f1b", 0), ("zb", 1), ("zbv", 3)], (2, 2): EVERY[1:]}
if Covering.whole:
    RUNS = dict.fromkeys(RUNS, EVERY)
IN_WORLDS = [(world, how) for world, hows in RUNS.items() for how in hows]


def loss(params: Any, batch: Tensor) -> Tensor:
    logits = gpt.apply(params, batch[:, :-1], CONFIG)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


MODEL = Model(
    lambda: gpt.init(CONFIG, zf.random.key(0)),
    loss,
    lambda i: zf.random.randint(zf.random.key(100 + i), 0, 48, (2 * MICROBATCHES, 9)),
)


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


def staged(schedule: str, stage: int, pipe: int, data: int) -> Callable[[Any], Any]:
    mesh = zf.mesh(pipe=pipe, data=data)

    def wrap(step: Any) -> Any:
        step = zf.pipeline(zf.donate(step), MICROBATCHES, schedule=schedule, mesh=mesh)
        return zf.shard(step, stage=stage, unit_bytes=1 << 12)

    return wrap


def _seen(schedule: str, stage: int, pipe: int, data: int) -> Seen:
    run = trained(staged(schedule, stage, pipe, data), CLIPPED, MODEL, key=3)
    return Seen(
        [float(row["loss"]) for row in run.metrics],
        [str(row) for report in [run.placing, *run.reports] for row in report.faults()],
        [str(row) for report in run.reports[1:] for row in report.host_waits()],
        [[(r.what, r.label, r.group) for r in report.collectives()] for report in run.reports],
    )


def _each_run(hows: list[Any], pipe: int, data: int) -> dict[Any, Seen]:
    return {how: _seen(*how, pipe, data) for how in hows}


@functools.cache
def runs(pipe: int, data: int) -> list[dict[Any, Seen]]:
    """By rank; in one launch."""
    return ranks.launch(_each_run, RUNS[pipe, data], pipe, data, nprocs=pipe * data)


@functools.cache
def on_the_host() -> list[float]:
    """The losses of one process without a GPU."""
    run = trained(lambda f: zf.accumulate(f, MICROBATCHES), CLIPPED, MODEL, on_gpu=False, key=3)
    return [float(row["loss"]) for row in run.metrics]


@pytest.mark.parametrize(("world", "how"), IN_WORLDS)
def test_it_trains_without_races(world: Any, how: Any) -> None:
    for rank in runs(*world):
        assert rank[how].losses == pytest.approx(on_the_host(), rel=1e-5)
        assert not rank[how].faults


@pytest.mark.parametrize(("world", "how"), IN_WORLDS)
def test_the_host_waits_for_nothing_after_the_first_step(world: Any, how: Any) -> None:
    for rank in runs(*world):
        assert not rank[how].waits


@pytest.mark.parametrize(("world", "how"), IN_WORLDS)
def test_a_direction_has_a_communicator_and_one_order_on_both_sides(world: Any, how: Any) -> None:
    """NCCL matches what is sent with what is received by nothing but the order."""
    for i in range(3):
        sent, come = defaultdict(list), defaultdict(list)  # by pipeline and communicator
        others = set()
        for rank, seen in enumerate(runs(*world)):
            for what, label, group in seen[how].issued[i]:
                at = rank % world[1], group
                if what in ("send", "recv"):
                    (sent if what == "send" else come)[at].append(label)
                else:
                    others.add(at)
        assert sent == come and len(sent) == 2 * world[1]
        assert all(len(labels) >= MICROBATCHES for labels in sent.values())
        assert not others & sent.keys()
    assert runs(*world)[0][how].issued[1] == runs(*world)[0][how].issued[2]


@pytest.mark.parametrize("how", RUNS[2, 2])
def test_ranks_of_a_stage_issue_in_one_order(how: Any) -> None:
    """Over all communicators together: ranks that share one must not meet in other orders."""
    issued = [[row[:2] for row in seen[how].issued[2]] for seen in runs(2, 2)]
    first, second = issued[:2], issued[2:]
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0]
