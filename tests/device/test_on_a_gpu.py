"""On the first GPU, where there is one: kernels beside their twins, steps beside those of a CPU.

``make gpu`` runs these, and then the benchmark. Everywhere else they are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from benchmarks.gpu_checks import repeated
from benchmarks.gpu_rank import GPU_SIZES, waits
from benchmarks.models import batches, build, loss_of
from zfunc import kernels, optim
from zfunc.kernels import dispatch

DEVICE = torch.device("cuda", 0)
SIZE = GPU_SIZES["tiny"]
WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"stage {n}": lambda step, n=n: zf.shard(step, stage=n) for n in range(4)},  # type: ignore[misc]
    "stage 3, offload": lambda step: zf.shard(zf.offload(step), stage=3),
    "stage 0, accumulate": lambda step: zf.shard(zf.accumulate(step, 2), stage=0),
}


@pytest.mark.parametrize("name", dispatch.KERNELS)
def test_a_kernel_is_its_twin_and_the_same_twice(name: str):
    for seed in range(4):
        (verdict,) = kernels.verify([name], DEVICE, seed=seed)
        assert verdict.ran and verdict.right, str(verdict)
    assert repeated(name, DEVICE)


def stepped(
    device: torch.device, way: Callable[[Any], Any]
) -> tuple[list[float], Callable[..., Tensor]]:
    """Losses of five steps with clipping, and what takes another."""
    model = zf.functionalize(build(SIZE).to(device))
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    plain = zf.train_step(lambda p, ids: loss_of(model.apply(p, ids), ids), tx)
    step = zf.donate(way(plain))
    state = step.place(zf.TrainState.create(model.params, tx))

    def advance(ids: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, ids)
        return metrics["loss"].detach()

    data = [ids.to(device) for ids in islice(batches(SIZE, 0), 5)]
    return [float(advance(ids)) for ids in data], advance


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_a_cpu(name: str):
    expected, _ = stepped(torch.device("cpu"), WAYS[name])
    found, _ = stepped(DEVICE, WAYS[name])
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in WAYS if "offload" not in name])
def test_a_steady_step_does_not_wait_for_the_device(name: str):
    _, advance = stepped(DEVICE, WAYS[name])
    ids = next(batches(SIZE, 0)).to(DEVICE)
    assert not waits(advance, ids)
