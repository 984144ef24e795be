"""Models under ``pipeline``, against ``accumulate``: every two of all that may differ.

``--whole``: all 3,888 combinations. Each goes through every kind of batch that its model takes:
without a padding mask, with one, and of another length.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering
from tests.laws.pipeline_covering import pairwise_rows
from tests.laws.pipelines import MODULES, TX, Model, Wrap, gpt, inputs, module, texts
from zfunc.schedules import SCHEDULES, schedule

pytest.importorskip("transformers")

NAMES = ("gpt", *MODULES)


class Case(NamedTuple):
    """What may differ."""

    name: str
    schedule: str
    pipe: int
    data: int
    stage: int
    microbatches: int

    @property
    def chunks(self) -> int:
        return self.pipe * (2 if self.schedule in ("interleaved", "zbv") else 1)

    @property
    def layers(self) -> int:
        return max(4, self.chunks)

    def __str__(self) -> str:
        where = f"{self.pipe}x{self.data}-stage{self.stage}-{self.microbatches}"
        return f"{self.name}-{self.schedule}-{where}"


# Microbatches are fewer than stages, as many, and more.
AXES = (NAMES, tuple(SCHEDULES), (2, 3, 4), (1, 2), (0, 1, 2, 3), (3, 4, 8))


def cost(row: Any) -> float:
    """Layers that run, on all ranks, beside some that take as long as what a run begins with."""
    case = Case(*row)
    return 8 + case.layers * case.data * case.microbatches


CASES = [Case(*row) for row in (product(*AXES) if Covering.whole else pairwise_rows(AXES, cost))]


def adds_in_order(case: Case) -> bool:
    """Whether every rank adds gradients of weights in the order of microbatches, for each chunk."""
    made = schedule(case.schedule, ranks=case.pipe, microbatches=case.microbatches)
    for row in made.actions:
        for chunk in {a.chunk for a in row}:
            order = [a.microbatch for a in row if a.kind in "BW" and a.chunk == chunk]
            if order != sorted(order):
                return False
    return True


@cache
def model_of(name: str, layers: int) -> Model:
    return gpt(False, layers) if name == "gpt" else module(name, layers)


def batches(name: str, rows: int) -> list[Any]:
    """Batches of a model: no text of the GPT is padded, and no image is larger than others."""
    if name == "gpt":
        return [texts(0, 13, rows), texts(1, 13, rows)]
    if name == "vit":
        return [inputs(name, i, rows) for i in range(2)]
    return [inputs(name, i, rows, masks) for i, masks in ((0, False), (3, True), (1, True))]


def run(case: Case, layers: int, wrap: Wrap) -> Any:
    """Metrics of a step for each batch, and the full state behind them."""
    model = model_of(case.name, layers)
    step = wrap(zf.train_step(model.loss, TX))
    state, metrics = step.place(zf.TrainState.create(model.params, TX, key=7)), []
    # One row for each rank along data in each microbatch.
    for batch in batches(case.name, case.microbatches * case.data):
        state, out = step(state, step.local_batch(batch))
        metrics.append(out)
    return metrics, step.unplace(state)


@cache
def alone(case: Case, layers: int) -> Any:
    """What one process has, to which stages and their schedule are nothing."""
    return run(case, layers, lambda step: zf.accumulate(step, case.microbatches))


def staged(case: Case) -> Any:
    """What each rank has."""

    def wrap(step: Any) -> Any:
        mesh = zf.mesh(data=case.data, pipe=case.pipe)
        step = zf.pipeline(step, case.microbatches, schedule=case.schedule, mesh=mesh)
        return zf.shard(step, stage=case.stage, mesh=mesh)

    return zf.simulate(case.pipe * case.data)(lambda: run(case, case.layers, wrap))()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_end_where_one_process_does(case: Case) -> None:
    wanted = alone(case._replace(schedule="", pipe=1, stage=0), case.layers)
    found, tied = staged(case), model_of(case.name, case.layers).tied
    for mine in found:
        assert_same(mine, found[0])
        if case.data == 1 and not tied and adds_in_order(case):
            assert_same(mine, wanted)
        else:
            assert_near(mine, wanted, 1e-9)


def test_the_covering_leaves_no_pair_out() -> None:
    for a, b in combinations(range(len(AXES)), 2):
        assert {(row[a], row[b]) for row in CASES} == {*product(AXES[a], AXES[b])}


def test_texts_come_with_and_without_masks_and_in_two_lengths() -> None:
    plain, masked, other = batches("llama", 3)
    assert "attention_mask" not in plain and not masked["attention_mask"].all()
    lengths = [x["input_ids"].shape[1] for x in (plain, masked, other)]
    assert lengths[0] == lengths[1] != lengths[2]
