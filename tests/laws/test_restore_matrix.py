"""Any placement into any other: stages 0 to 3 on 1 to 4 ranks, in memory or on disk.

The state that is restored is bitwise the one that was saved; five steps further, training ends
in the same bits as the run that was not interrupted on as many ranks, whatever the stage and
the tier, and within 1e-9 in float64 on any other number.

All 1,024 pairs are tried with ``--whole``. Otherwise one for each of the 32 placements, so that
each restores into another, another restores into it, and every pair of worlds, of stages and of
tiers occurs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, Case, assert_near, assert_same, train, trained
from tests.laws.covering import STAGES, WORLDS, Covering
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import optim

F64 = torch.float64
SAVED, MORE = 3, 5
TX = optim.chain(
    optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(0.02, 20), weight_decay=0.1)
)
CASE: Case = trained(stack, stack_loss)
SEED = 1  # of pairs that leave nothing out


class Place(NamedTuple):
    """Where a state is."""

    world: int
    stage: int
    tier: str

    def __str__(self) -> str:
        return f"{self.world}ranks-stage{self.stage}-{self.tier}"


PLACES = [Place(*place) for place in product(WORLDS, STAGES, ("memory", "disk"))]


@contextmanager
def step_at(place: Place, folder: Path) -> Iterator[Any]:
    """Layouts differ with the place: units of other sizes, small leaves kept whole."""
    how = {"unit_bytes": 400 + 300 * place.world, "persist_below": 8 * (place.world % 2)}
    step = CASE.step(TX)
    if place.tier == "disk":
        step = zf.offload(step, to="disk", path=folder / "tier")
    with zf.donate(zf.shard(step, stage=place.stage, **how)) as step:
        yield step


def batches_from(first: int) -> Case:
    return Case(CASE.state, CASE.step, lambda i, dtype: CASE.batch(first + i, dtype))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Place, Any]:
    """Each place's uninterrupted run: its checkpoint, its state then, and five steps later."""
    made = {}
    for place in PLACES:
        root = tmp_path_factory.mktemp(str(place))

        def body(place: Place = place, root: Path = root) -> Any:
            with step_at(place, root) as step:
                _, state = train(step, step.place(CASE.state(TX, F64)), CASE, SAVED)
                zf.save(root / "saved", state)
                then = zf.full(state)
                metrics, state = train(step, state, batches_from(SAVED), MORE)
                return root / "saved", then, metrics, step.unplace(state)

        made[place] = zf.simulate(place.world)(body)()[0]
    return made


def pairs() -> dict[Place, list[Place]]:
    """The targets of each source."""
    if Covering.whole:
        return dict.fromkeys(PLACES, PLACES)
    shuffled = random.Random(SEED).sample(PLACES, len(PLACES))
    return {source: [target] for source, target in zip(PLACES, shuffled, strict=True)}


def test_the_covering_leaves_nothing_out() -> None:
    some = [(a, b) for a, row in pairs().items() for b in row]
    for axis in range(3):
        every = {place[axis] for place in PLACES}
        assert {(a[axis], b[axis]) for a, b in some} == set(product(every, every))
    assert {b for _, b in some} == set(PLACES)


@pytest.mark.parametrize("source", PLACES, ids=str)
def test_restored_elsewhere(source: Place, runs: dict[Place, Any], tmp_path: Path) -> None:
    root, then, metrics, end = runs[source]
    for target in pairs()[source]:

        def body(target: Place = target) -> Any:
            with step_at(target, tmp_path / str(target)) as step:
                blank = zf.TrainState.create(zf.tree.map(torch.zeros_like, stack(F64)), TX, key=1)
                state = zf.restore(root, like=step.place(blank))
                now = zf.full(state)
                rest, state = train(step, state, batches_from(SAVED), MORE)
                return now, rest, step.unplace(state)

        for now, rest, last in zf.simulate(target.world)(body)():
            where = f"{source} -> {target}"
            assert_same(now, then, where)
            if target.world == source.world:
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
