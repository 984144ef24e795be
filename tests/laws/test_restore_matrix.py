"""Any placement into any other: stages 0 to 3 on 1 to 4 ranks, and then five steps more.

The state that is restored is bitwise the one that was saved; training on ends in the same
bits as the run that was not interrupted on as many ranks, whatever the stage, and within
1e-9 in float64 on any other number.

All 256 pairs run with ``ZFUNC_FULL_MATRIX=1``. Otherwise every pair of worlds and every
pair of stages occurs, and each pair of placements on 2 and 3 ranks.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, Case, assert_near, assert_same, train, trained
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import optim

F64 = torch.float64
SAVED, MORE = 3, 5
STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
PLACES = [(world, stage) for world in WORLDS for stage in STAGES]
FULL = os.environ.get("ZFUNC_FULL_MATRIX") == "1"


TX = optim.chain(
    optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(0.02, 20), weight_decay=0.1)
)
CASE: Case = trained(stack, stack_loss)


def step_at(stage: int, world: int) -> Any:
    """Layouts differ with the place: units of other sizes, small leaves kept whole."""
    how = {"unit_bytes": 400 + 300 * world, "persist_below": 8 * (world % 2)}
    return zf.donate(zf.shard(CASE.step(TX), stage=stage, **how))


def batches_from(first: int) -> Case:
    return Case(CASE.state, CASE.step, lambda i, dtype: CASE.batch(first + i, dtype))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    """Each place's uninterrupted run: its checkpoint, its state then, and five steps later."""
    made = {}
    for world, stage in PLACES:
        root = tmp_path_factory.mktemp(f"{world}-{stage}")

        def body(world: int = world, stage: int = stage, root: Path = root) -> Any:
            step = step_at(stage, world)
            _, state = train(step, step.place(CASE.state(TX, F64)), CASE, SAVED)
            zf.save(root, state)
            then = zf.full(state)
            metrics, state = train(step, state, batches_from(SAVED), MORE)
            return root, then, metrics, step.unplace(state)

        made[world, stage] = zf.simulate(world)(body)()[0]
    return made


def pairs() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    everything = list(product(PLACES, PLACES))
    if FULL:
        return everything
    near = {(a, b) for a, b in everything if {a[0], b[0]} <= {2, 3}}
    return [(a, b) for a, b in everything if (a, b) in near or (sum(a) + 3 * sum(b)) % 7 == 0]


def test_the_covering_leaves_no_pair_of_worlds_or_stages_out() -> None:
    some = pairs()
    assert {(a[0], b[0]) for a, b in some} == set(product(WORLDS, WORLDS))
    assert {(a[1], b[1]) for a, b in some} == set(product(STAGES, STAGES))


@pytest.mark.parametrize("source", PLACES, ids=lambda p: f"{p[0]}ranks-stage{p[1]}")
def test_restored_elsewhere(source: tuple[int, int], runs: dict[tuple[int, int], Any]) -> None:
    root, then, metrics, end = runs[source]
    for target in [b for a, b in pairs() if a == source]:
        world, stage = target

        def body(world: int = world, stage: int = stage) -> Any:
            step = step_at(stage, world)
            blank = zf.TrainState.create(zf.tree.map(torch.zeros_like, stack(F64)), TX, key=1)
            state = zf.restore(root, like=step.place(blank))
            now = zf.full(state)
            rest, state = train(step, state, batches_from(SAVED), MORE)
            return now, rest, step.unplace(state)

        for now, rest, last in zf.simulate(world)(body)():
            where = f"{source} -> {target}"
            assert_same(now, then, where)
            if target[0] == source[0]:
                assert_same((rest, last), (metrics, end), where)
            else:
                assert_near((rest, last), (metrics, end), 1e-9, where)


def dropped(params: Any, batch: Any) -> Tensor:
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.3), params["blocks"], batch["x"])
    return mean_square(x @ params["head"]["w"], batch["y"])


@pytest.mark.parametrize("stage", STAGES)
def test_random_numbers_go_on_where_they_were(stage: int, tmp_path: Path) -> None:
    """Dropout, drawn from the key that is saved: bitwise the uninterrupted run's."""
    case = trained(stack, dropped)

    def body() -> None:
        step = zf.shard(case.step(ADAMW), stage=stage)
        _, state = train(step, step.place(case.state(ADAMW, F64)), case, SAVED)
        zf.save(tmp_path, state)
        later = Case(case.state, case.step, lambda i, dtype: case.batch(SAVED + i, dtype))
        metrics, end = train(step, state, later, MORE)
        like = step.place(case.state(ADAMW, F64).replace(key=zf.random.key(99)))
        again, last = train(step, zf.restore(tmp_path, like), later, MORE)
        assert_same((again, step.unplace(last)), (metrics, step.unplace(end)))

    zf.simulate(2)(body)()
