"""Schedules drawn by chance: whichever can run gives the same numbers, and no other one begins."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering
from tests.laws.models import block, mean_square
from tests.laws.pipelines import TX, Model, rows, stack
from tests.unit.test_pipeline_schedules import graph_of, is_circular, neighbours, schedules
from zfunc.errors import ScheduleError
from zfunc.schedules import Action, Schedule

LAYERS = 6


def loss(params: Any, batch: Any) -> Tensor:
    """With masks, which are the same whenever a microbatch has its turn."""
    x = F.dropout(block(params["first"], batch["x"]), 0.1)
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.2), params["blocks"], x)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def tied_loss(params: Any, batch: Any) -> Tensor:
    """What comes before all layers is used behind them, too, and once more in between."""
    x = first = block(params["first"], batch["x"])
    for i, p in enumerate(params["blocks"]):
        x = zf.layer(block, p, x) + first * (i == 3)
    return mean_square(x @ params["first"]["w"] @ params["head"]["w"], batch["y"])


MODELS = {"untied": Model(stack(LAYERS), loss, rows), "tied": Model(stack(LAYERS), tied_loss, rows)}


@cache
def alone(name: str, m: int) -> Any:
    return MODELS[name].trained(lambda f: zf.accumulate(f, m), steps=2)


@st.composite
def cuts(draw: st.DrawFn, chunks: int) -> list[int]:
    """Where chunks begin and end: each has one layer at least."""
    inner = st.lists(
        st.integers(1, LAYERS - 1), unique=True, min_size=chunks - 1, max_size=chunks - 1
    )
    return [0, *sorted(draw(inner)), LAYERS]


def in_order(made: Schedule) -> bool:
    """Whether sums of gradients and of losses go from microbatch to microbatch as they come."""
    last = made.chunks - 1
    for row in made.actions:
        for k in range(made.chunks):
            backward = [i for kind, i, chunk in row if kind in "BW" and chunk == k]
            forward = [i for kind, i, chunk in row if kind == "F" and chunk == k == last]
            if backward != sorted(backward) or forward != sorted(forward):
                return False
    return True


def trained(name: str, made: Schedule, partition: Sequence[int], stage: int | None) -> list[Any]:
    def wrap(f: Any) -> Any:
        mesh = zf.mesh(data=1, pipe=made.ranks)
        step = zf.pipeline(f, made.microbatches, schedule=made, partition=partition, mesh=mesh)
        return step if stage is None else zf.shard(step, stage=stage)

    return zf.simulate(made.ranks)(lambda: MODELS[name].trained(wrap, steps=2))()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=300 if Covering.whole else 25)
@given(data=st.data())
def test_whatever_can_run_gives_the_same_numbers(name: str, data: st.DataObject) -> None:
    made = data.draw(schedules())
    stage = data.draw(st.sampled_from([None, 1, 3]))
    wanted = alone(name, made.microbatches)
    for run in trained(name, made, data.draw(cuts(made.chunks)), stage):
        if name == "untied" and in_order(made):
            assert_same(run, wanted)
        else:
            assert_near(run, wanted, 1e-9)


def altered(made: Schedule, rows: Iterable[Iterable[Action]]) -> Schedule:
    return Schedule(made.rank_of, made.microbatches, tuple(map(tuple, rows)))


def broken(made: Schedule, how: str, chance: random.Random) -> Schedule | None:
    """One with an error of this kind, if it can have one."""
    rows = [list(row) for row in made.actions]
    mine = chance.choice([row for row in rows if row])
    n = chance.randrange(len(mine))
    if how == "dropped":
        del mine[n]
    elif how == "doubled":
        mine.insert(chance.randint(0, len(mine)), mine[n])
    elif how == "elsewhere":
        others = [row for row in rows if row is not mine]
        if not others:
            return None
        chance.choice(others).append(mine.pop(n))
    else:
        for _ in range(20):
            a, b = chance.randrange(len(mine)), chance.randrange(len(mine))
            mine[a], mine[b] = mine[b], mine[a]
            other = altered(made, rows)
            if is_circular(graph_of(other, neighbours(other))):
                return other
        return None
    return altered(made, rows)


@pytest.mark.parametrize("how", ["dropped", "doubled", "elsewhere", "swapped"])
@settings(max_examples=200 if Covering.whole else 15)
@given(made=schedules(), seed=st.integers(0, 2**32))
def test_what_cannot_run_is_refused_before_anything_has(
    how: str, made: Schedule, seed: int
) -> None:
    wrong = broken(made, how, random.Random(seed))
    if wrong is None:
        return
    began: list[int] = []

    def loss(params: Any, batch: Any) -> Any:
        began.append(zf.rank())
        return tied_loss(params, batch)

    def begin(schedule: Any) -> None:
        step = zf.train_step(loss, TX)
        step = zf.pipeline(step, wrong.microbatches, schedule=schedule, pipe=wrong.ranks)
        step(step.place(zf.TrainState.create(stack(LAYERS), TX)), rows(0))

    def body(schedule: Any) -> None:
        with zf.comm.ledger() as led, pytest.raises(ScheduleError):
            begin(schedule)
        assert not led.payload_bytes

    for schedule in (wrong, *([lambda *_: wrong] if wrong.ranks > 1 else [])):
        zf.simulate(wrong.ranks)(body)(schedule)
    assert not began
