"""Decisions of a step: taken on the device, or read once behind the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.gpu.ranks import launch
from tests.gpu.training import Model, Trained, on_one_gpu, trained
from tests.laws import residual
from tests.laws.covering import each
from tests.laws.residual import errors, params, uneven
from zfunc import optim, tree
from zfunc.optim import DynamicScale

SGD = optim.sgd(1e-2, momentum=0.9)
F16 = {"compute": torch.float16, "loss_scale": DynamicScale(power=4, hysteresis=1)}
FALLING = {"start_bits": 8, "target_bits": 5, "period": 1}
Wrap = Callable[[Any], Any]


def loss(p: Any, batch: Any) -> Tensor:
    return errors(p, batch).mean() + batch["bad"].sum() * p["head"].float().sum()


def counted(p: Any, batch: Any) -> zf.Mean:
    return zf.Mean(errors(p, batch).sum(), len(batch["x"]))


def batch(i: int, bad: int | None = None) -> dict[str, Tensor]:
    spoiled = torch.zeros(24)
    spoiled[-1] = float("inf") if i == bad else 0.0  # a row of the last rank
    return residual.batch(i) | {"bad": spoiled}


MODEL = Model(params, loss, batch)
SPOILED = replace(MODEL, batch=lambda i: batch(i, bad=2))


def cut(stage: int, donated: bool = True, unit_bytes: int = 600) -> Wrap:
    def wrap(step: Any) -> Any:
        return zf.shard(zf.donate(step) if donated else step, stage=stage, unit_bytes=unit_bytes)

    return wrap


def around(outer: Wrap, stage: int, donated: bool = True) -> Wrap:
    return lambda step: outer(cut(stage, donated)(step))


SILENT: dict[str, tuple[Wrap, Model]] = {
    "bf16": (zf.precision, MODEL),
    "a fixed scale": (lambda f: zf.precision(f, compute=torch.float16, loss_scale=8.0), MODEL),
    "remat": (zf.remat, MODEL),
    "accumulate": (lambda f: zf.accumulate(f, 3), MODEL),
    "dropped": (lambda f: zf.drop_layers(f, theta=0.5, gamma=0.5), MODEL),
    "low bits": (lambda f: zf.quantize(f, **FALLING, mix_rate=0.5), MODEL),
    "uneven": (lambda f: f, replace(MODEL, loss=uneven)),
    "uneven, accumulated": (lambda f: zf.accumulate(f, 2), replace(MODEL, loss=uneven)),
    "counted, accumulated": (lambda f: zf.accumulate(f, 2), replace(MODEL, loss=counted)),
    "uneven in bf16": (
        lambda f: zf.precision(zf.accumulate(f, 2)),
        replace(MODEL, loss=uneven),
    ),
}


def near(a: Any, b: Any) -> None:
    """Two trees of metrics or states, on whatever devices they were made."""
    a, b = tree.flatten_names(a), tree.flatten_names(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(x, b[name], rtol=2e-6, atol=2e-6, equal_nan=True, msg=name)
        else:
            assert x == b[name], name


def alike(run: Trained, plain: Trained) -> None:
    for mine, theirs in zip(run.metrics, plain.metrics, strict=True):
        near(mine, theirs)
    near(run.state.params, plain.state.params)
    near(run.state.opt_state, plain.state.opt_state)
    assert all(report.faults() == [] for report in run.reports)


def waits(run: Trained) -> list[int]:
    return [len(report.host_waits()) for report in run.reports]


@pytest.mark.parametrize(("stage", "name"), each(range(4), SILENT, times=2))
def test_nobody_waits(stage: int, name: str) -> None:
    outer, model = SILENT[name]
    for donated in (True, False):
        wrap = around(outer, stage, donated)
        run = on_one_gpu(wrap, SGD, model, steps=4)
        assert waits(run) == [0, 0, 0, 0], run.reports[-1].summary()
        alike(run, trained(wrap, SGD, model, steps=4, on_gpu=False))


def test_nobody_waits_to_see_whether_buffers_changed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)
            )
            self.register_buffer("gain", torch.full((16,), 1.1))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            for block in self.blocks:
                x = x + block(x * self.gain)
            return x

    torch.manual_seed(0)
    model = zf.functionalize(Net())

    def run(on_gpu: bool) -> Any:
        def up(x: Tensor) -> Tensor:
            return x.cuda() if on_gpu else x.clone()

        def loss(p: Any, x: Tensor, held: Any) -> Any:
            out, new = model.apply(p, x, buffers=held, mutable=True)
            return out.float().square().mean(), new

        def body(state: Any, x: Tensor) -> Any:
            (value, new), grads = zf.value_and_grad(loss, has_aux=True)(
                state.params, x, state.buffers
            )
            updates, opt_state = SGD.update(grads, state.opt_state, state.params)
            moved = optim.apply_updates(state.params, updates)
            return state.replace(params=moved, opt_state=opt_state, buffers=new), {"loss": value}

        step = zf.precision(cut(3)(body))
        held = {name: up(x) for name, x in model.buffers.items()}
        state = step.place(zf.TrainState.create(tree.map(up, model.params), SGD, buffers=held))
        seen = []
        for i in range(3):
            x = up(zf.random.normal(zf.random.key(i), (8, 16)))
            if on_gpu:
                active().take()
            state, metrics = step(state, x)
            if on_gpu:
                assert active().take().host_waits() == []
            seen.append(metrics)
        return tree.map(lambda x: x.cpu() if isinstance(x, Tensor) else x, [seen, state.buffers])

    from tests.gpu.cuda import Cuda, active

    theirs = run(on_gpu=False)
    with Cuda():
        mine = run(on_gpu=True)
    near({"all": mine}, {"all": theirs})
    assert torch.equal(theirs[1]["gain"], model.buffers["gain"]) and theirs[1]["seen"] == 3


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_a_dynamic_scale_is_one_wait(stage: int, donated: bool) -> None:
    """The step that overflows is left out, as on a CPU; one wait more names the leaf."""
    wrap = around(lambda f: zf.precision(f, **F16), stage, donated)
    run = on_one_gpu(wrap, SGD, SPOILED, steps=4)
    assert waits(run)[:2] == [1, 1] and waits(run)[3] == 1
    assert run.metrics[2]["overflow_leaf"] == "head"
    assert [float(row["loss_scale"]) for row in run.metrics] == [16, 16, 16, 8]
    alike(run, trained(wrap, SGD, SPOILED, steps=4, on_gpu=False))


@pytest.mark.parametrize("stage", range(4))
def test_without_a_dynamic_scale_the_device_keeps_the_old_state(stage: int) -> None:
    """Nobody reads the flag, so the leaf is not named."""
    wrap = around(zf.precision, stage, donated=False)
    run = on_one_gpu(wrap, SGD, SPOILED, steps=4)
    assert waits(run) == [0, 0, 0, 0]
    plain = trained(wrap, SGD, SPOILED, steps=4, on_gpu=False)
    assert plain.metrics[2].pop("overflow_leaf") == "head"
    alike(run, replace(plain, state=plain.state.replace(opt_state=run.state.opt_state)))
    near(run.state.opt_state.trace, plain.state.opt_state.trace)


@pytest.mark.parametrize("stage", range(4))
def test_and_donated_gradients_count_as_zeros(stage: int) -> None:
    run = on_one_gpu(around(zf.precision, stage), SGD, SPOILED, steps=4)
    assert waits(run) == [0, 0, 0, 0]
    assert [bool(row["overflow"]) for row in run.metrics] == [False, False, True, False]
    assert all(bool(x.isfinite().all()) for x in tree.leaves(run.state.params))


def test_gradients_that_come_after_an_update_in_donated_memory_are_an_error() -> None:
    """Of a step with two optimizers; what the first one gave away is gone."""

    def step(state: Any, batch: Any) -> Any:
        for scale in (1.0, float("inf")):
            _, grads = zf.value_and_grad(lambda p, s=scale: (errors(p, batch) * s).mean())(
                state.params
            )
            updates, opt_state = SGD.update(grads, state.opt_state, state.params)
            new = optim.apply_updates(state.params, updates)
            state = state.replace(params=new, opt_state=opt_state)
        return state, {}

    from tests.gpu.cuda import Cuda

    with Cuda():
        one = zf.precision(cut(3)(step), **F16)
        up = tree.map(lambda x: x.cuda(), params())
        state = one.place(zf.TrainState.create(up, SGD))
        with pytest.raises(zf.NonFiniteError, match="donated and overwritten"):
            one(state, {name: x.cuda() for name, x in batch(0).items()})


METHODS: dict[str, Any] = {
    "onebit": {"freeze_step": 1},
    "int8": {},
    "int4": {},
    "powersgd": {},
    "zero_one": {"freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2},
}
ADAM = optim.adam(1e-3)


def compressed(method: str, stage: int, donated: bool, parts: int) -> Wrap:
    def wrap(step: Any) -> Any:
        step = cut(stage, donated, unit_bytes=3000)(step)
        step = zf.compress_grads(step, method, **METHODS[method])
        return zf.accumulate(step, parts) if parts > 1 else step

    return wrap


ROWS = [  # method, stage, donated, microbatches
    ("onebit", 0, True, 1),
    ("onebit", 3, False, 1),
    ("int8", 2, True, 2),
    ("int4", 1, False, 2),
    ("powersgd", 0, False, 1),
    ("powersgd", 3, True, 1),
    ("zero_one", 0, True, 1),
]


def two_ranks(on_gpu: bool) -> list[Any]:
    found: list[Any] = []
    spoiled = replace(MODEL, batch=lambda i: batch(i, bad=1))
    for method, stage, donated, parts in ROWS:
        tx = ADAM if METHODS[method] else SGD
        wrap = compressed(method, stage, donated, parts)
        found.append(trained(wrap, tx, spoiled, steps=3, on_gpu=on_gpu))
    for wrap in (around(lambda f: zf.precision(f, **F16), 3), around(zf.precision, 2)):
        found.append(trained(wrap, SGD, spoiled, steps=3, on_gpu=on_gpu))
    found.append(trained(cut(2), SGD, replace(MODEL, loss=uneven), steps=3, on_gpu=on_gpu))
    return found


@pytest.mark.filterwarnings("ignore")
def test_on_two_ranks_at_most_one_wait_where_gradients_are_compressed() -> None:
    """An overflow on one rank leaves the step out on both, and there are no waits besides."""
    mine, theirs = launch(two_ranks, True)[0], zf.simulate(2)(two_ranks)(False)[0]
    for row, run, plain in zip(ROWS, mine, theirs, strict=False):
        assert all(n <= 1 for n in waits(run)), (row, run.reports[-1].summary())
        assert all(report.faults() == [] for report in run.reports), row
        near(run.state.params, plain.state.params)
        assert int(run.state.step) == int(plain.state.step) == 3
    scaled, bare, mean = mine[len(ROWS) :]
    assert waits(scaled)[::2] == [1, 1] and scaled.metrics[1]["overflow_leaf"] == "head"
    assert waits(bare) == [0, 0, 0] and bool(bare.metrics[1]["overflow"])
    assert waits(mean) == [0, 0, 0]
    alike(scaled, theirs[len(ROWS)])
    alike(mean, theirs[-1])
