"""``zf.foresee``: what lives at the peak and by what it holds, and that nothing of it is there."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.foreseen_steps import STEPS, batch
from tests.unit.foreseen import alone
from tests.unit.live_bytes import Peak
from zfunc import optim
from zfunc.foresight.assumptions import ForesightError
from zfunc.foresight.dry_run import DryRun
from zfunc.foresight.pageless import pageless
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

pytestmark = pytest.mark.usefixtures("thawed")


def test_large_tensors_hold_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def step(state: Any, x: Tensor) -> Any:
        return {"params": {"w": state["params"]["w"] * 2.0 + 1.0}}, x.sum()

    seen = alone(step, {"params": {"w": torch.empty(1 << 36, device="meta")}})
    assert seen.state_bytes == 4 << 36
    assert seen.peak_bytes >= 3 * (4 << 36)  # old, doubled, new
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_the_peak_is_that_of_living_storages() -> None:
    n = 1 << 16

    def step(state: Any, x: Tensor) -> Any:
        a = x + 1.0
        b = a * 2.0
        del a
        c = b.view(-1)[: n // 2]  # shares b's memory
        d = torch.cat([c, c])
        return state, d.sum()

    seen = alone(step, {"params": {"w": torch.zeros(3)}}, torch.zeros(n))
    # the state, x, a and b; then the state, x, b, d and its sum
    assert seen.peak_bytes == 12 + 3 * 4 * n + 4
    assert max(live for _, live in seen.timeline) == seen.peak_bytes
    assert all(0 <= row <= len(seen.rows) for row, _ in seen.timeline)


@pytest.mark.parametrize("wrap", ["plain", "remat", "bf16", "accumulate", "all of them", "lamb"])
def test_the_peak_is_the_counted_one_of_a_real_step(wrap: str) -> None:
    """Up to constants of a few bytes that the real one made in an earlier step."""
    case = STEPS[wrap]
    step, rows = case.step(3, 1), batch(1)
    state, _ = step(step.place(case.state()), rows)
    gc.collect()
    with Peak() as real:
        for x in (*zf.tree.leaves(state), rows):
            x.view(-1)  # it counts what it has seen
        step(state, rows)
    told = zf.foresee(case.step(3, 1), case.state(), rows, ranks=1, device="cpu")
    assert abs(told.peak_bytes - real.bytes) <= 4096


def test_parts_that_share_memory_are_no_memory_of_their_own() -> None:
    """Recurrent cells take their gates so."""
    n = 1 << 16

    def step(state: Any, x: Tensor) -> Any:
        a, b = torch.unsafe_chunk(x + 1.0, 2)
        return state, a[0] + b[0]

    seen = alone(step, {"params": {"w": torch.zeros(3)}}, torch.zeros(n))
    assert seen.peak_bytes == 12 + 2 * 4 * n + 4


def test_a_pageless_tensor_is_an_ordinary_one() -> None:
    x = pageless((3, 1 << 23), (1 << 23, 1), torch.float32)
    assert type(x) is Tensor and x.is_contiguous() and x.data_ptr() and x.device.type == "cpu"
    x[1, 5] = 2.0
    assert x.sum() == 2.0


def test_a_tensor_that_is_looked_at_otherwise_in_place_has_its_new_shape() -> None:
    def step(state: Any, x: Tensor) -> Any:
        y = (x + 1.0).unsqueeze_(0)
        assert y.shape == (1, 80, 100)
        y.squeeze_(0).t_()
        assert y.shape == (100, 80) and y.stride() == (1, 100)
        return state, (state["params"]["w"] @ y).sum()

    assert alone(step).flops.total == 2 * 100 * 100 * 80


def test_a_result_that_changes_the_shape_of_its_memory_is_refused() -> None:
    def step(state: Any, x: Tensor) -> Any:
        return state, torch.mm(x, state["params"]["w"], out=torch.empty(0)).sum()

    with pytest.raises(ForesightError, match=r"mm makes a tensor of shape \[0\].*\[80, 100\]"):
        alone(step)


def test_memory_that_would_grow_in_place_is_refused() -> None:
    """It would not be counted."""
    with pytest.raises(ForesightError, match=r"resize_ makes a tensor of shape \[0\].*test_fores"):
        alone(lambda state, x: (state, torch.empty(0).resize_(1000, 1000).zero_()))
    smaller = alone(lambda state, x: (state, x.resize_(8, 100).sum()))
    assert smaller.peak_bytes == 4 * (100 * 100 + 80 * 100 + 1)


def test_nothing_of_a_run_stays_while_the_model_does() -> None:
    """A notebook, or ``zf.plan``, asks of one model many times."""
    net = zf.functionalize(nn.Linear(3, 3))
    ids, tx = torch.ones(2, 3), optim.sgd(0.1)
    step = zf.shard(zf.train_step(lambda p, x: net.apply(p, x).sum(), tx), stage=1)

    def runs() -> int:
        gc.collect()
        return sum(type(x) is DryRun for x in gc.get_objects())

    before = runs()
    for _ in range(2):
        zf.foresee(step, zf.TrainState.create(net.params, tx), ids, ranks=2, device="cpu")
    assert runs() <= before


def test_memory_by_kind_sums_up_to_all_of_it_and_is_the_states_between_steps() -> None:
    tx = optim.adamw(1e-3)
    shape = GPTConfig(vocab=256, width=64, depth=2, heads=2)
    step = zf.shard(zf.train_step(lambda params, ids: gpt.loss(params, ids, shape), tx), stage=3)
    state = zf.TrainState.create(gpt.shapes(shape), tx)
    ids = torch.empty(8, 65, dtype=torch.int64, device="meta")
    seen = zf.foresee(zf.donate(step), state, ids, ranks=2, device="cpu")
    assert sum(seen.at_peak.values()) == seen.peak_bytes
    assert {"parameters", "moments", "gradients", "activations"} <= {*seen.live}
    ends = {kind: line[-1][1] for kind, line in seen.live.items()}
    assert sum(ends.values()) == seen.timeline[-1][1]
    params = sum(x.nbytes for x in zf.tree.leaves(state.params))
    assert 2 * (params // 2) <= ends["moments"] <= 1.1 * params  # two trees, of which half is here
    assert ends["activations"] < 100  # the metrics


def test_pictures_of_memory_and_of_lanes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tx = optim.sgd(0.1)
    step = zf.train_step(lambda params, x: (x @ params["w"]).square().mean(), tx)
    state = zf.TrainState.create({"w": torch.empty(512, 512, device="meta")}, tx)
    seen = zf.foresee(zf.shard(step, stage=3), state, torch.empty(80, 512), ranks=4)
    drawn = seen.plot(tmp_path / "memory.svg").read_text()
    assert "parameters" in drawn
    took = seen.time(zf.Cluster.preset("h100", gpus=4))
    assert took.plot(tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
    for shown in (seen, took):
        assert "<pre>" in shown._repr_html_() and "data:image/png;base64," in shown._repr_html_()
