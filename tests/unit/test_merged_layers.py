"""Which layers make a unit together, and that their order in backward decides its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim
from zfunc.layout.cutting import make_layout

ROW = 64 * 4  # bytes of one layer below


def names(
    count: int, first: int | None, unit_bytes: int = 64 * ROW, merge: bool = True
) -> list[str]:
    params = {"w": zf.Layers([{"a": torch.zeros(64)} for _ in range(count)])}
    layout = make_layout(params, world=2, unit_bytes=unit_bytes, first=first, merge=merge)
    return [unit.name for unit in layout.units]


def test_units_grow_from_the_last_layers_on() -> None:
    assert names(16, None) == ["w.0-7", "w.8-15"]
    assert names(16, 2 * ROW) == ["w.0-1", "w.2-9", "w.10-13", "w.14-15"]
    assert names(3, 2 * ROW) == ["w.0", "w.1-2"]


@pytest.mark.parametrize("first", [None, 0, 1, 1 << 30])
def test_every_layer_is_in_one_unit(first: int | None) -> None:
    params = {"a": zf.Layers([{"x": torch.zeros(n)} for n in (1, 900, 3, 0, 64, 64)]),
              "b": zf.Layers([{"x": torch.zeros(64)}] * 5)}  # fmt: skip
    layout = make_layout(params, unit_bytes=64 * ROW, first=first)
    slots = [i for unit in layout.units for i in unit.slots]
    assert sorted(slots) == list(range(11)) == slots


def test_layers_that_are_not_merged_stay_alone() -> None:
    assert names(3, 4 * ROW, merge=False) == names(3, None, merge=False) == ["w.0", "w.1", "w.2"]


def test_stage_0_sends_the_gradients_of_the_last_layers_first() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for layer in params["layers"]:
            x = torch.tanh(x @ layer["w"])
        return x.square().mean()

    def run() -> list[str]:
        tx = optim.sgd(0.1)
        step = zf.shard(zf.train_step(loss_fn, tx), stage=0)
        layers = zf.Layers([{"w": torch.eye(400)} for _ in range(4)])  # 640 kB each
        state = step.place(zf.TrainState.create({"layers": layers}, tx))
        with zf.comm.ledger() as sent:
            step(state, zf.local_batch(torch.ones(4, 400)))
        return [label for label in sent.by_label if label.startswith("reduce")]

    assert zf.simulate(2)(run)()[0] == ["reduce layers.3", "reduce layers.0-2"]
