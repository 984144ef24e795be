"""Unmodified models of many architectures train on cut states as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.architectures import ALL, batch_of, loss_of, model_of
from tests.laws.covering import Covering, turns
from zfunc import optim

pytest.importorskip("transformers")

TX = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
STEPS = 3
# What is wrapped, alone and on ranks alike; the stage; the ranks; the tolerance of losses. The
# models compute their losses in float32, whatever their parameters are.
WAYS: list[tuple[Callable[[Any, Path], Any], int, int, float]] = [
    (lambda step, folder: step, 3, 2, 2e-6),
    (lambda step, folder: zf.precision(step), 3, 3, 0.02),
    (lambda step, folder: zf.offload(step, to="disk", path=folder), 3, 2, 2e-6),
    (lambda step, folder: zf.remat(step), 2, 3, 2e-6),
    (lambda step, folder: zf.accumulate(zf.donate(step), 3), 1, 2, 2e-6),
    (lambda step, folder: zf.offload(zf.precision(step), to="disk", path=folder), 1, 2, 0.02),
]


def ways(turn: int) -> list[int]:
    return list(range(len(WAYS))) if Covering.whole else [turn % len(WAYS)]


@pytest.mark.parametrize(("name", "turn"), turns(ALL))
def test_it_trains_as_in_one_process(name: str, turn: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, loss = model_of(name), loss_of(name)  # held: its parameters are placed often
    model = zf.functionalize(module)
    plain = zf.train_step(lambda params, batch: loss(model.apply(params, **batch)), TX)

    def train(step: Any, cut: bool) -> list[float]:
        state = step.place(zf.TrainState.create(model.params, TX))
        losses = []
        for i in range(STEPS):
            batch = batch_of(name, i)
            state, metrics = step(state, zf.local_batch(batch) if cut else batch)
            losses.append(float(metrics["loss"]))
        return losses

    for way in ways(turn):
        wrap, stage, ranks, tolerance = WAYS[way]
        expected = train(wrap(plain, tmp_path / f"alone{way}"), False)
        cut = zf.shard(wrap(plain, tmp_path / f"cut{way}"), stage=stage)
        for losses in zf.simulate(ranks)(train)(cut, True):
            assert losses == pytest.approx(expected, rel=tolerance)
