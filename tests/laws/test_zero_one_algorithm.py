"""0/1 Adam, step by step, against the formulae of its paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import regression
from tests.laws.compression import TwoPhases
from tests.laws.one_unit import flat, gradient, layout_of, one, one_loss
from tests.laws.zero_one import F64, FREEZE, HOW, STEPS, policy
from zfunc import optim
from zfunc.layout.dense import dense_of

LR, DECAY = 0.02, 0.1


def simulated(ranks: int, rate: Any) -> list[tuple[Tensor, list[Tensor]]]:
    """After each step: parameters that all share, and those that each rank is at."""
    layout = layout_of(ranks)
    cuts = dense_of(layout, 0).cuts
    b1, b2 = 0.9, 0.999
    x = flat(layout, one())
    m, v, learnt, seen = torch.zeros_like(x), torch.zeros_like(x), 0, []
    gradients, movements = TwoPhases(cuts), TwoPhases(cuts)
    at, mine = [x] * ranks, [m] * ranks
    u, lrs = [torch.zeros_like(x)] * ranks, 0.0
    for t, kind in policy():
        own = [gradient(layout, at[r], t - 1, ranks, r) for r in range(ranks)]
        lr = rate(t - 1)
        if kind in ("dense", "compressed"):
            g = torch.stack(own).mean(0) if kind == "dense" else gradients.mean(own)
            m = b1 * m + (1 - b1) * g
            if kind == "dense":
                v, learnt = b2 * v + (1 - b2) * g**2, learnt + 1
            d = (v / (1 - b2**learnt)).sqrt() + 1e-8
            x = x - lr * (m / (1 - b1**t) / d + DECAY * x)
            at, mine = [x] * ranks, [m] * ranks
        else:
            mine = [b1 * m_ + (1 - b1) * g for m_, g in zip(mine, own, strict=True)]
            u = [u_ + lr * m_ / (1 - b1**t) for u_, m_ in zip(u, mine, strict=True)]
            x, lrs = x - lr * DECAY * x, lrs + lr
            at = [x - u_ / d for u_ in u]
            if kind == "average":
                mean = movements.mean(u)
                x, m = x - mean / d, mean / lrs * (1 - b1**t)
                at, mine = [x] * ranks, [m] * ranks
                u, lrs = [torch.zeros_like(x)] * ranks, 0.0
        seen.append((x, at))
    return seen


def rate(count: Any) -> Any:
    """A rate that falls, so that sums of rates are not multiples of one."""
    return LR * 0.97 ** torch.as_tensor(count, dtype=F64)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_the_published_algorithm(ranks: int) -> None:
    tx = optim.adamw(rate, weight_decay=DECAY)
    layout = layout_of(ranks)

    def body() -> Any:
        step = zf.compress_grads(
            zf.shard(zf.train_step(one_loss, tx), stage=0), "zero_one", freeze_step=FREEZE, **HOW
        )
        state, seen = step.place(zf.TrainState.create(one(), tx)), []
        for i in range(STEPS):
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            drift = state.aux["compress_grads"]["zero_one"]["drift"]["params"].flats[0]
            seen.append((flat(layout, zf.full(state.params)), drift.clone()))
        return seen

    kinds = {kind for _, kind in policy()}
    assert kinds == {"dense", "compressed", "local", "average"}
    expected = simulated(ranks, lambda t: float(rate(t)))
    for rank, seen in enumerate(zf.simulate(ranks)(body)()):
        for (x, drift), (shared, at) in zip(seen, expected, strict=True):
            torch.testing.assert_close(x, shared, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(x - drift, at[rank], rtol=1e-9, atol=1e-9)
