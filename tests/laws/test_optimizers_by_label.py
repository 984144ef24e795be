"""``multi_transform`` behind a clip: gradients scaled later are cut like the whole tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (batch @ params["embed"] @ params["w"].T).square().mean()


@pytest.mark.parametrize("stage", range(4))
def test_a_clip_before_optimizers_by_label(stage: int) -> None:
    tx = optim.chain(
        optim.clip_by_global_norm(0.1),
        optim.multi_transform(
            {"a": optim.adam(1e-2), "b": optim.sgd(1e-2)}, lambda path: "ab"["w" in path]
        ),
    )
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    shapes = {"embed": (5, 4), "w": (3, 4)}
    params = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    step = zf.train_step(loss_fn, tx)

    def run(wrap: Any) -> Any:
        wrapped = wrap(step)
        state = wrapped.place(zf.TrainState.create(params, tx))
        for _ in range(3):
            state, _ = wrapped(state, zf.local_batch(batch))
        return wrapped.unplace(state).params

    want = run(lambda f: f)
    for got in zf.simulate(3)(run)(lambda f: zf.shard(f, stage=stage)):
        for name in shapes:
            assert torch.allclose(got[name], want[name], rtol=0, atol=1e-9)
