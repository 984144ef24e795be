"""Steps 2 and 3 ask the same of the device: launches, arguments, storages. They can be a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cuda import Cuda, active
from tests.gpu.training import Model, trained
from tests.laws.cases import regression
from tests.laws.models import block, stack
from zfunc import optim

SCHEDULED = optim.adamw(optim.warmup_cosine(1e-3, warmup=2, steps=10))
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), SCHEDULED)

UPLOADS = "zfunc/buffers/uploads.py"


def noisy(params: Any, x: Tensor) -> Tensor:
    return F.dropout(block(params, x), 0.1)


def noisy_loss(params: Any, batch: Any) -> Tensor:
    x = zf.scan(noisy, params["blocks"], block(params["first"], batch["x"]))
    return (x @ params["head"]["w"] - batch["y"]).square().mean()


NOISY = Model(
    lambda: stack(torch.float32, layers=4), noisy_loss, lambda i: regression(i, torch.float32)
)


def difference(wrap: Callable[[Any], Any], tx: Any = SCHEDULED) -> str:
    """The first thing that the second and the third step do differently."""
    cuda = active()
    cuda.keeps_arguments = True
    try:
        run = trained(wrap, tx, NOISY, key=3)
    finally:
        cuda.keeps_arguments = False
    second, third = run.reports[1:3]
    assert second.launches() > 40
    # Hyperparameters that the host knows travel up, in page-locked memory that torch keeps for it;
    # `captured` has them on the device, and test_captured.py asserts that nothing goes up there.
    sites = {row.site.partition(":")[0] for row in third.host_temporaries()}
    return second.difference(third) or "".join(sites - {UPLOADS}) or third.count("pageable") * "!"


def sharded(stage: int) -> Callable[[Any], Any]:
    return lambda f: zf.shard(zf.donate(f), stage=stage, unit_bytes=600)


WRAPS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "plain": (lambda f: f, SCHEDULED),
    "bf16, clipped": (zf.precision, CLIPPED),
    "accumulate": (lambda f: zf.accumulate(f, 2), SCHEDULED),
    "remat": (zf.remat, CLIPPED),
}


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_steps_are_one(stage: int, name: str) -> None:
    wrap, tx = WRAPS[name]
    with Cuda():
        assert difference(lambda f: wrap(sharded(stage)(f)), tx) == ""


def _on_two_ranks() -> dict[str, str]:
    found = {}
    for stage in range(4):
        for name, (wrap, tx) in WRAPS.items():
            told = difference(lambda f, w=wrap, s=stage: w(sharded(s)(f)), tx)
            if told:
                found[f"{name} at {stage}"] = told
    return found


def test_two_steps_are_one_on_two_ranks() -> None:
    for found in ranks.launch(_on_two_ranks):
        assert found == {}
