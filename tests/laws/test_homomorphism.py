"""Law 2: a sharded step does what the plain one does, on any stage, world, layout and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.laws.cases import ADAMW, alone, assert_like_alone, cut_up
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from zfunc import optim

CASES = {**{f"hand-written: {name}": case for name, case in HAND_WRITTEN.items()}, **READY_MADE}
STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)


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


@pytest.mark.parametrize("name", CASES)
def test_every_case_on_every_stage_and_world(name: str) -> None:
    case = CASES[name]
    reference = alone(case, steps=3)
    for stage in STAGES:
        for ranks in WORLDS:
            donated = bool((stage + ranks) % 2)
            runs = cut_up(case, ranks, steps=3, stage=stage, donated=donated)
            assert_like_alone(runs, reference, case.tolerance)


LAYOUTS: dict[str, dict[str, int]] = {
    "every leaf a unit": {"unit_bytes": 1},
    "layers merged and split": {"unit_bytes": 600},
    "one unit": {"unit_bytes": 1 << 30},
    "small leaves whole": {"persist_below": 10},
    "all leaves whole": {"persist_below": 1 << 20},
    "no prefetch": {"prefetch": 0, "unit_bytes": 600},
    "much prefetch": {"prefetch": 3, "unit_bytes": 600, "persist_below": 7},
}
LAID_OUT = ["stack", "tiny leaves", "frozen", "a layer twice", "unused", "hand-written: gan"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAID_OUT)
def test_every_layout(name: str, layout: str) -> None:
    case = CASES[name]
    reference = alone(case, steps=3)
    for stage, ranks in ((1, 2), (2, 3), (3, 1), (3, 2), (3, 3)):
        runs = cut_up(case, ranks, steps=3, stage=stage, donated=ranks == 2, **LAYOUTS[layout])
        assert_like_alone(runs, reference, case.tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_over_twenty_steps(optimizer: str) -> None:
    tx = OPTIMIZERS[optimizer]
    for name, worlds in (("stack", WORLDS), ("frozen", (3,))):
        reference = alone(READY_MADE[name], tx, steps=20)
        for stage in STAGES:
            for ranks in worlds:
                donated = bool((stage + ranks) % 2)
                runs = cut_up(READY_MADE[name], ranks, tx, 20, stage=stage, donated=donated)
                assert_like_alone(runs, reference, 1e-9)


@pytest.mark.parametrize("name", ["stack", "uneven batch", "model thrice", "tiny leaves"])
def test_losses_in_float32_over_twenty_steps(name: str) -> None:
    case = READY_MADE[name]
    expected = [m["loss"].item() for m in alone(case, ADAMW, 20, torch.float32)[0]]
    for stage in STAGES:
        for ranks in WORLDS:
            for metrics, _ in cut_up(case, ranks, ADAMW, 20, torch.float32, stage=stage):
                assert [m["loss"].item() for m in metrics] == pytest.approx(expected, rel=2e-6)
