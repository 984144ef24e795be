"""``zfunc calibrate``: what a machine is measured to be, and what is told where it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc.commands import calibrate_command
from zfunc.commands.cli import main
from zfunc.errors import DeviceError
from zfunc.foresight import calibration
from zfunc.foresight.clusters import Cluster

pytestmark = pytest.mark.usefixtures("thawed")
CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is measured, and seldom; ranks are this process."""
    small = {
        "PATIENCE": 0.0,
        "PRODUCTS": ((1, 1, 1), (2, 2, 2)),
        "KEYS": (64, 128),
        "STREAMS": (1 << 10,),
        "MESSAGES": (1 << 12, 1 << 16),
    }
    for name, value in small.items():
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibrate_command, "launch", lambda run, kind, nprocs: [run(kind)])


def tiny_steps(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Steps of 14 operations a layer and 20 besides, that take so long."""

    def tiny(device: torch.device, layers: int) -> Any:
        count = 20 + 14 * layers
        return count, lambda: seconds(count)

    monkeypatch.setattr(calibration, "_tiny_step", tiny)
    monkeypatch.setattr(calibration, "_wall", lambda call: call())
    monkeypatch.setattr(calibration, "PATIENCE", 0.0)


def test_each_layer_of_a_tiny_step_has_as_many_operations() -> None:
    """So that the difference of two steps has nothing that a step has once."""
    one, two, three = (calibration._tiny_step(CPU, layers) for layers in (1, 2, 3))
    assert three[0] - two[0] == two[0] - one[0] > 10
    one[1]()
    one[1]()  # it goes on from the state before, which is donated


def test_an_operation_costs_what_twice_as_many_layers_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 us each, 1 ms besides; of ten pairs that others disturb the last one alone is quiet."""
    disturbed = iter([0.5] * 18 + [0.0, 0.0])
    tiny_steps(monkeypatch, lambda count: 1e-3 + 3e-6 * count + next(disturbed))
    assert calibration._launches(CPU) == (pytest.approx(3e-6), 0.0)


def test_a_machine_that_is_too_busy_to_measure_is_told(
    monkeypatch: pytest.MonkeyPatch, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not count as one whose operations cost nothing."""
    tiny_steps(monkeypatch, lambda count: 1.0)
    with pytest.raises(DeviceError, match="244 operations took 1 s, no longer than one of 132"):
        calibration._launches(CPU)
    out = tmp_path / "calibration.json"
    assert main(["calibrate", "--device", "cpu", "--out", str(out)]) == 1
    assert "keep the machine busy" in capsys.readouterr().err and not out.exists()


def cpu_seconds(call: Callable[[], Any]) -> float:
    """What others on the machine do not add to."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def test_a_cpu_is_measured_and_foreseen_on(
    monkeypatch: pytest.MonkeyPatch, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "_wall", cpu_seconds)
    out = tmp_path / "new" / "calibration.json"
    assert main(["calibrate", "--device", "cpu", "--ranks", "1", "--out", str(out)]) == 0
    assert "us of the host" in capsys.readouterr().out
    cluster = Cluster.load(out)
    assert (cluster.kind, cluster.gpus, cluster.guessed) == ("cpu", 1, ())
    assert 1e-7 < cluster.dispatch < 1e-2 and not cluster.measured_links
    assert cluster.peak("float32") > 1e8 and cluster.memory_bandwidth > 1e6
    step = zf.train_step(lambda p, x: (x @ p["w"]).square().mean(), zf.optim.sgd(0.1))
    state = zf.TrainState.create({"w": torch.zeros(100, 100)}, zf.optim.sgd(0.1))
    seen = zf.foresee(step, state, torch.zeros(80, 100), ranks=1, device="cpu")
    operations = sum(row.kind == "compute" for row in seen.rows)
    assert float(seen.time(cluster)) > operations * cluster.dispatch
    assert "measured 20" in str(seen.time(cluster))


def test_links_between_ranks_are_measured(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    monkeypatch.setattr(calibration, "_launches", lambda device: (1e-6, 0.0))
    first, second = zf.simulate(2)(lambda: calibration.measure(CPU))()
    for found in (first, second):
        assert found.measured_links and found.nvlink > 0 and 0 < found.latency < 1
        assert (found.gpus, found.nodes) == (2, 1)


@pytest.mark.parametrize(
    ("name", "ranks", "nodes"),
    [("NVIDIA H100 80GB HBM3", 1, 1), ("NVIDIA H100 80GB HBM3", 8, 1), ("a GPU to come", 1, 8)],
)
def test_a_gpu_that_is_known_stands_in_its_usual_node(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, nodes: int
) -> None:
    """Eight like the one that was measured are one node, and not eight over a network."""
    properties = SimpleNamespace(total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = calibration._known(torch.device("cuda"), ranks)
    assert replace(found, gpus=8).nodes == nodes
