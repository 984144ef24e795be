"""Models under ``pipeline``, against ``accumulate``: every two of all that may differ.

``--whole``: all 13,392 combinations.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering
from tests.laws.pipeline_covering import pairwise_rows
from tests.laws.pipelines import MODULES, TX, Model, gpt, inputs, module, texts
from zfunc.schedules import SCHEDULES, schedule

pytest.importorskip("transformers")

NAMES = ("gpt", *MODULES)


class Case(NamedTuple):
    """What may differ. ``lengths``: whether the second batch has another length."""

    name: str
    schedule: str
    pipe: int
    data: int
    stage: int
    microbatches: int
    masks: bool
    lengths: bool

    @property
    def chunks(self) -> int:
        return self.pipe * (2 if self.schedule in ("interleaved", "zbv") else 1)

    def __str__(self) -> str:
        more = "-masks" * self.masks + "-lengths" * self.lengths
        where = f"{self.pipe}x{self.data}-stage{self.stage}-{self.microbatches}{more}"
        return f"{self.name}-{self.schedule}-{where}"


# Microbatches are fewer than stages, as many, and more.
AXES = (NAMES, tuple(SCHEDULES), (2, 3, 4), (1, 2), (0, 1, 2, 3), (2, 3, 5), *[(False, True)] * 2)


def cost(row: Any) -> float:
    """Layers that run, on all ranks, beside some that take as long as what a run begins with."""
    case = Case(*row)
    return 8 + max(4, case.chunks) * case.data * case.microbatches


def is_new(row: Any) -> bool:
    """Whether there are masks and lengths where it says so: no text of the GPT is padded, and no
    image is longer than others."""
    case = Case(*row)
    masks, lengths = case.name not in ("gpt", "vit"), case.name != "vit"
    return (masks or not case.masks) and (lengths or not case.lengths)


ROWS = [row for row in product(*AXES) if is_new(row)]
CASES = [
    Case(*row) for row in (ROWS if Covering.whole else pairwise_rows(AXES, cost, allowed=is_new))
]


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


def batch(case: Case, i: int) -> Any:
    """One row for each rank along data in each microbatch."""
    n, at = case.microbatches * case.data, i if case.lengths else 3 * i
    if case.name == "gpt":
        return texts(at, 13, n)
    return inputs(case.name, at, n, case.masks)


@cache
def alone(case: Case) -> Any:
    """What one process has."""
    return run(case, staged=False)


def run(case: Case, staged: bool) -> Any:
    """Metrics of two steps, and the full state behind them."""
    model = model_of(case.name, max(4, case.chunks))
    step = zf.train_step(model.loss, TX)
    if staged:
        mesh = zf.mesh(data=case.data, pipe=case.pipe)
        step = zf.pipeline(step, case.microbatches, schedule=case.schedule, mesh=mesh)
        step = zf.shard(step, stage=case.stage, mesh=mesh)
    else:
        step = zf.accumulate(step, case.microbatches)
    state, metrics = step.place(zf.TrainState.create(model.params, TX, key=7)), []
    for i in range(2):
        given = batch(case, i)
        state, out = step(state, step.local_batch(given) if staged else given)
        metrics.append(out)
    return metrics, step.unplace(state)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_end_where_one_process_does(case: Case) -> None:
    # Whatever the stages do; more layers than four are twice as many as stages.
    deep = case.pipe if case.chunks > 4 else 2
    wanted = alone(case._replace(schedule="zbv" if case.chunks > 4 else "1f1b", pipe=deep, stage=0))
    found = zf.simulate(case.pipe * case.data)(lambda: run(case, staged=True))()
    tied = model_of(case.name, max(4, case.chunks)).tied
    for mine in found:
        assert_same(mine, found[0])
        if case.data == 1 and not tied and adds_in_order(case):
            assert_same(mine, wanted)
        else:
            assert_near(mine, wanted, 1e-9)


def test_the_covering_leaves_no_pair_out() -> None:
    for a, b in product(range(len(AXES)), repeat=2):
        if a < b:
            assert {(row[a], row[b]) for row in CASES} == {(row[a], row[b]) for row in ROWS}


def test_every_model_has_a_batch_of_another_length() -> None:
    case = next(c for c in CASES if c.lengths and c.name == "llama")
    first, second = (batch(case, i)["input_ids"] for i in range(2))
    assert first.shape[1] != second.shape[1] and not torch.equal(first[:, :9], second)
