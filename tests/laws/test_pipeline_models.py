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
from tests.laws.pipelines import MODULES, TX, Model, Wrap, gpt, inputs, module, texts
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

    @property
    def layers(self) -> int:
        return max(4, self.chunks)

    def __str__(self) -> str:
        more = "-masks" * self.masks + "-lengths" * self.lengths
        where = f"{self.pipe}x{self.data}-stage{self.stage}-{self.microbatches}{more}"
        return f"{self.name}-{self.schedule}-{where}"


# Microbatches are fewer than stages, as many, and more.
AXES = (NAMES, tuple(SCHEDULES), (2, 3, 4), (1, 2), (0, 1, 2, 3), (2, 3, 5), *[(False, True)] * 2)


def cost(row: Any) -> float:
    """Layers that run, on all ranks, beside some that take as long as what a run begins with."""
    case = Case(*row)
    return 8 + case.layers * case.data * case.microbatches


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


def run(case: Case, layers: int, wrap: Wrap) -> Any:
    """Metrics of two steps, and the full state behind them."""
    model = model_of(case.name, layers)
    step = wrap(zf.train_step(model.loss, TX))
    state, metrics = step.place(zf.TrainState.create(model.params, TX, key=7)), []
    for i in range(2):
        state, out = step(state, step.local_batch(batch(case, i)))
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
    for a, b in product(range(len(AXES)), repeat=2):
        if a < b:
            assert {(row[a], row[b]) for row in CASES} == {(row[a], row[b]) for row in ROWS}


def test_every_model_has_a_batch_of_another_length() -> None:
    case = next(c for c in CASES if c.lengths and c.name == "llama")
    first, second = (batch(case, i)["input_ids"] for i in range(2))
    assert first.shape[1] != second.shape[1] and not torch.equal(first[:, :9], second)
