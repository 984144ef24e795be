"""Optimizers on the pretended device: nobody waits for it, and few things are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu.cuda import Cuda
from tests.gpu.training import gpt_model, trained
from zfunc import optim

RATE = optim.warmup_cosine(1e-2, warmup=2, steps=9, start=1e-3)


def no_bias(path: str) -> bool:
    return not path.endswith("b")


TXS: dict[str, Any] = {
    "sgd": optim.sgd(RATE),
    "momentum": optim.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optim.adam(RATE),
    "adamw": optim.adamw(RATE, mask=no_bias),
    "lion": optim.lion(RATE, weight_decay=0.1, mask=no_bias),
    "lamb": optim.lamb(RATE, weight_decay=0.1, mask=no_bias),
    "skipping": optim.skip_nonfinite(optim.adamw(RATE)),
    "smoothed": optim.chain(optim.sgd(RATE), optim.ema(0.9)),
}
CASES = {
    **TXS,
    **{
        f"clipped {name}": optim.chain(optim.clip_by_global_norm(0.5), tx)
        for name, tx in TXS.items()
    },
}
WRAPS: dict[str, Any] = {
    "bare": lambda step: step,
    "stage 0": lambda step: zf.shard(zf.donate(step), stage=0),
    "stage 2": lambda step: zf.shard(zf.donate(step), stage=2),
    "stage 3": lambda step: zf.shard(zf.donate(step), stage=3, unit_bytes=1 << 12),
}
MODEL = gpt_model(depth=2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_nobody_waits(wrap: str, name: str):
    with Cuda():
        found = trained(WRAPS[wrap], CASES[name], MODEL)
    for report in found.reports[1:]:
        rows = [
            f"{row.what} at {row.where}" for row in report.rows if row.kind in ("sync", "pageable")
        ]
        assert rows == []
    plain = trained(WRAPS[wrap], CASES[name], MODEL, on_gpu=False)
    names = zf.tree.flatten_names(plain.state.params)
    for path, x in zf.tree.flatten_names(found.state.params).items():
        torch.testing.assert_close(x, names[path], rtol=2e-4, atol=2e-5, msg=path)
