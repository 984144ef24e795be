"""Host waits per step: none, where no decision needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cases import OPTIMIZERS
from tests.gpu.cuda import Cuda
from tests.gpu.record import Report, Row
from tests.gpu.training import Trained, trained
from tests.laws.covering import each
from zfunc import optim
from zfunc.buffers.pages import ACCOUNT

ADAMW = optim.adamw(1e-3)
CLIP = optim.chain(optim.clip_by_global_norm(0.5), OPTIMIZERS["schedule"]())


def sharded(stage: int) -> Callable[[Any], Any]:
    return lambda f: zf.shard(zf.donate(f), stage=stage, unit_bytes=1 << 12)


def fp16(f: Any) -> Any:
    return zf.precision(f, compute=torch.float16, loss_scale="dynamic")


WRAPS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "plain": (lambda f: f, ADAMW),
    "clip": (lambda f: f, CLIP),
    "bf16": (zf.precision, CLIP),
    "remat": (zf.remat, ADAMW),
    "accumulate": (lambda f: zf.accumulate(f, 2), ADAMW),
    "drop_layers": (lambda f: zf.drop_layers(f, theta=0.5, gamma=1.0), ADAMW),
    "bf16, remat, accumulate": (lambda f: zf.accumulate(zf.remat(zf.precision(f)), 2), CLIP),
}
METHODS = {"onebit": {"freeze_step": 1}, "int8": {"freeze_step": 1}, "powersgd": {"freeze_step": 1}}


def told(waits: list[Row]) -> list[str]:
    return [f"{row.what} at {row.where}" for row in waits]


def steady(run: Trained) -> list[Report]:
    """The second and the third step: the first may prepare."""
    assert not [row for report in run.reports for row in report.faults()]
    return run.reports[1:3]


def waits(wrap: Callable[[Any], Any], tx: Any, **how: Any) -> list[list[str]]:
    return [told(report.host_waits()) for report in steady(trained(wrap, tx, key=3, **how))]


@pytest.mark.parametrize(("stage", "name"), each([0, 1, 2, 3], WRAPS, times=2))
def test_no_wait_under(stage: int, name: str) -> None:
    wrap, tx = WRAPS[name]
    with Cuda():
        assert waits(lambda f: wrap(sharded(stage)(f)), tx) == [[], []]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_wait_in(optimizer: str) -> None:
    with Cuda():
        for stage in (0, 3):
            assert waits(sharded(stage), OPTIMIZERS[optimizer]()) == [[], []]


def test_without_donation_there_is_none_either() -> None:
    with Cuda():
        assert waits(lambda f: zf.shard(f, stage=3), CLIP) == [[], []]
        assert waits(lambda f: f, CLIP) == [[], []]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_dynamic_scale_is_read_once_at_most(stage: int) -> None:
    with Cuda():
        found = waits(lambda f: fp16(sharded(stage)(f)), CLIP)
    assert all(len(step) <= 1 for step in found), found


def test_offload_waits_for_each_units_own_event() -> None:
    """And for nothing else, in particular not for a whole stream."""
    with Cuda():
        ACCOUNT.begin()
        run = trained(lambda f: zf.offload(sharded(3)(f)), ADAMW)
        units = set(ACCOUNT.waits)  # by name
        assert len(units) > 3
        for report in steady(run):
            found = report.host_waits()
            assert len(found) <= len(units)
            assert all(row.what.startswith("event.synchronize") for row in found), told(found)


@pytest.mark.parametrize(("name", "stage"), each(["clip", "fp16"], [0, 1, 2, 3]))
def test_offload_waits_once_where_a_norm_or_a_flag_comes_first(name: str, stage: int) -> None:
    wrap = fp16 if name == "fp16" else (lambda f: f)
    with Cuda():
        for report in steady(trained(lambda f: wrap(zf.offload(sharded(stage)(f))), CLIP)):
            assert len(report.host_waits()) <= 1, told(report.host_waits())


def _on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in range(4):
        for name, (wrap, tx) in WRAPS.items():
            found[f"{name} at {stage}"] = waits(lambda f, w=wrap, s=stage: w(sharded(s)(f)), tx)
    return {name: steps for name, steps in found.items() if steps != [[], []]}


def test_no_wait_on_two_ranks() -> None:
    for waiting in ranks.launch(_on_two_ranks):
        assert waiting == {}


def _compressed(stage: int) -> dict[str, Any]:
    import warnings

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for method, how in METHODS.items():
            found[method] = waits(
                lambda f, m=method, h=how: zf.compress_grads(sharded(stage)(f), m, **h), ADAMW
            )
    return {name: steps for name, steps in found.items() if any(len(step) > 1 for step in steps)}


@pytest.mark.parametrize("stage", [0, 2])
def test_compression_reads_once_at_most(stage: int) -> None:
    for waiting in ranks.launch(_compressed, stage):
        assert waiting == {}
