"""Unmodified Hugging Face models in 16 bits, recomputed, in microbatches, on cut states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import assert_same
from tests.laws.covering import each
from tests.laws.test_huggingface import MODELS, TX, build, step_of, train


@pytest.mark.parametrize(("stage", "name"), each([0, 2, 3], MODELS))
def test_losses_stay_near_full_precision(name: str, stage: int) -> None:
    model = build(name, torch.float32)
    full = zf.TrainState.create(model.params, TX)
    losses, _ = train(step_of(model), full, 6)
    step = zf.accumulate(zf.remat(zf.precision(step_of(model))), 2)
    for got, state in zf.simulate(2)(train)(zf.donate(zf.shard(step, stage=stage)), full, 6, 2):
        assert got == pytest.approx(losses, rel=0.02)
        assert {x.dtype for x in zf.tree.leaves(state.params)} == {torch.float32}


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_dropout_changes_no_bit(name: str) -> None:
    model = build(name, torch.float32, dropout=0.2)
    full = zf.TrainState.create(model.params, TX, key=3)

    def run(stage: int, rematted: bool) -> Any:
        step: Any = zf.precision(step_of(model))
        step = zf.shard(zf.remat(step) if rematted else step, stage=stage)
        return zf.simulate(2)(train)(step, full, 2, 2)

    for stage in (0, 3):
        assert_same(run(stage, True), run(stage, False))
