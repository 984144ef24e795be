"""Law 2: a sharded step does what the plain one does, on any stage, world, layout and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.laws.cases import ADAMW, assert_like_alone, cut_up, plain_run, sharded_runs
from tests.laws.covering import Covering, each, places, turns
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from zfunc import optim

CASES = {**READY_MADE, **HAND_WRITTEN}


def no_bias(path: str) -> bool:
    return not path.endswith("b")


OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.sgd(0.01),
    "momentum": optim.sgd(0.01, momentum=0.9, nesterov=True),
    "adamw": optim.adamw(optim.warmup_cosine(0.05, 5, 20), weight_decay=0.1),
    "lamb": optim.lamb(0.02, weight_decay=0.1, mask=no_bias),
    "lion": optim.lion(0.005, weight_decay=0.1),
    "clipped": optim.chain(
        optim.clip_by_global_norm(0.5), optim.adamw(0.02, weight_decay=0.1, mask=no_bias)
    ),
    "masked": optim.chain(optim.masked(optim.adam(0.02), no_bias), optim.scale_by_schedule(0.1)),
    "multi": optim.multi_transform(
        {"decays": optim.adamw(0.02), "free": optim.sgd(0.01, momentum=0.9)},
        lambda path: "decays" if no_bias(path) else "free",
    ),
    "averaged": optim.chain(optim.skip_nonfinite(optim.adam(0.02)), optim.ema(0.5)),
}


@pytest.mark.parametrize(("name", "turn"), turns(CASES))
def test_every_case_on_every_stage_and_world(name: str, turn: int) -> None:
    case = CASES[name]
    for stage, ranks in places(turn):
        assert_like_alone(sharded_runs(case, stage, ranks), plain_run(case), case.tolerance)


LAYOUTS: dict[str, dict[str, int]] = {
    "every leaf a unit": {"unit_bytes": 1},
    "layers merged and split": {"unit_bytes": 600},
    "one unit": {"unit_bytes": 1 << 30},
    "small leaves whole": {"persist_below": 10},
    "all leaves whole": {"persist_below": 1 << 20},
    "no prefetch": {"prefetch": 0, "unit_bytes": 600},
    "much prefetch": {"prefetch": 3, "unit_bytes": 600, "persist_below": 7},
}
LAID_OUT = ["stack", "tiny leaves", "frozen", "a layer twice", "unused", "gan"]


WHERE = ((3, 3), (1, 2), (3, 2), (2, 3))  # stages and ranks


@pytest.mark.parametrize(("name", "layout", "where"), each(LAID_OUT, LAYOUTS, WHERE, times=3))
def test_every_layout(name: str, layout: str, where: tuple[int, int]) -> None:
    case, (stage, ranks) = CASES[name], where
    runs = cut_up(case, ranks, steps=3, stage=stage, donated=ranks == 2, **LAYOUTS[layout])
    assert_like_alone(runs, plain_run(case), case.tolerance)


@pytest.mark.parametrize(("optimizer", "turn"), turns(OPTIMIZERS))
def test_every_optimizer_over_twenty_steps(optimizer: str, turn: int) -> None:
    """On two of four places: each optimizer at each stage is in ``test_optim_laws``."""
    tx, stacked = OPTIMIZERS[optimizer], places(turn)
    stacked = stacked if Covering.whole else stacked[turn % 2 :: 2]
    for name, where in (("stack", stacked), ("frozen", [(turn % 4, 3)])):
        for stage, ranks in where:
            donated = ranks > 2
            runs = cut_up(READY_MADE[name], ranks, tx, 20, stage=stage, donated=donated)
            assert_like_alone(runs, plain_run(READY_MADE[name], tx, 20), 1e-9)


@pytest.mark.parametrize(
    ("name", "turn"), turns(["stack", "uneven batch", "model thrice", "tiny leaves"])
)
def test_losses_in_float32_over_twenty_steps(name: str, turn: int) -> None:
    case = READY_MADE[name]
    expected = [m["loss"].item() for m in plain_run(case, ADAMW, 20, torch.float32)[0]]
    for stage, ranks in places(turn):
        for metrics, _ in cut_up(case, ranks, ADAMW, 20, torch.float32, stage=stage):
            assert [m["loss"].item() for m in metrics] == pytest.approx(expected, rel=2e-6)
