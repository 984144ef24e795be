"""`quantize` in training: identity, straight-through, stages and worlds, curvature, export."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Tree,
    alone,
    assert_near,
    assert_same,
    named,
    numbers,
    regression,
    train,
    trained,
)
from tests.laws.covering import pairs
from tests.laws.models import CASES, forward, stack, stack_loss
from zfunc import optim, quant
from zfunc.quant.fake import Grouping, fake_quantize
from zfunc.quant.qtensor import QTensor

CASE = trained(lambda dtype: stack(dtype, layers=5), stack_loss)
FAST: dict[str, Any] = {"start_bits": 6, "target_bits": 3, "period": 1, "groups": 2}
F64 = torch.float64


def quantized(ranks: int = 1, steps: int = 5, shard: Any = None, **how: Any) -> list[Any]:
    """Metrics, full state and schedule of every rank after training into low bits."""
    full = CASE.state(ADAMW, F64)

    def body() -> Any:
        step = zf.quantize(CASE.step(ADAMW), **how)
        step = step if shard is None else zf.shard(step, **shard)
        metrics, state = train(step, step.place(full), CASE, steps)
        return metrics, step.unplace(state), state.aux["quantize"]

    return zf.simulate(ranks)(body)()


@pytest.mark.parametrize("how", [{"target_bits": 16}, {"period": 99}, {"start_bits": 3,
                                  "target_bits": 2, "offset": 9}], ids=str)  # fmt: skip
def test_full_bits_are_the_bare_step_bitwise(how: dict[str, Any]) -> None:
    reference = alone(CASE, steps=5)
    for shard in (None, {"stage": 3, "unit_bytes": 64}):
        metrics, state, _ = quantized(shard=shard, **how)[0]
        assert_same((metrics, state), reference)


def test_the_loss_sees_rounded_weights_and_the_optimizer_does_not() -> None:
    """Against the definition: round, differentiate there, update the unrounded weights."""
    full, batch = CASE.state(ADAMW, F64), CASE.batch(0, F64)
    step = zf.quantize(CASE.step(ADAMW), start_bits=4, target_bits=4, groups=2)
    state, metrics = step(step.place(full), batch)
    grouping = Grouping(2)

    def rounded(path: str, x: Tensor) -> Tensor:
        chosen = x.ndim >= 2 and "embed" not in path
        return fake_quantize(x, grouping.format(x.shape, 4)) if chosen else x

    low = zf.tree.map_with_path(rounded, full.params)
    assert any(not torch.equal(x, named(full.params)[name]) for name, x in named(low).items())
    loss, grads = zf.value_and_grad(stack_loss)(low, batch)
    updates, _ = ADAMW.update(grads, full.opt_state, full.params)
    expected = optim.apply_updates(full.params, updates)
    assert_near(metrics["loss"], loss, 1e-12)
    assert_near(step.unplace(state).params, expected, 1e-12)


def mixed(rounding: str, symmetric: bool) -> dict[str, Any]:
    return {**FAST, "rounding": rounding, "symmetric": symmetric, "mix_rate": 0.3}


@cache
def mixed_alone(rounding: str, symmetric: bool) -> Any:
    return quantized(**mixed(rounding, symmetric))[0]


@pytest.mark.parametrize(
    ("stage", "ranks", "rounding", "symmetric"),
    pairs(range(4), (1, 2, 3), ("nearest", "stochastic"), (True, False)),
)
def test_every_world_and_stage_rounds_alike(
    stage: int, ranks: int, rounding: str, symmetric: bool
) -> None:
    metrics, state, schedule = mixed_alone(rounding, symmetric)
    assert schedule["bits"].unique().tolist() == [3]
    shard = {"stage": stage, "unit_bytes": 64, "persist_below": 4 * (stage == 3)}
    for theirs, its, carried in quantized(ranks, shard=shard, **mixed(rounding, symmetric)):
        assert_near(theirs, metrics, 1e-9)
        assert_near(its, state, 1e-9)
        assert_near(carried, schedule, 1e-9)


def test_stochastic_rounding_depends_on_the_key_alone() -> None:
    how = {**FAST, "rounding": "stochastic"}
    assert_same(quantized(**how)[0], quantized(**how)[0])
    step = zf.quantize(CASE.step(optim.sgd(0.0)), **how)
    start = CASE.state(optim.sgd(0.0), F64)
    losses = {
        float(step(step.place(start.replace(key=zf.random.key(i))), CASE.batch(0, F64))[1]["loss"])
        for i in range(4)
    }
    assert len(losses) == 4


def test_a_step_is_pure_and_wrapping_commutes() -> None:
    bare = CASE.step(ADAMW)
    step = zf.quantize(bare, **FAST)
    state, batch = step.place(CASE.state(ADAMW, F64)), CASE.batch(0, F64)
    assert_same(step(state, batch), step(state, batch))
    for wrap in (lambda f: zf.shard(f, stage=2), zf.donate, zf.remat, zf.drop_layers):
        assert wrap(zf.quantize(bare, **FAST)) == zf.quantize(wrap(bare), **FAST)
    assert_same(step.unplace(step.place(CASE.state(ADAMW, F64))), CASE.state(ADAMW, F64))
    with pytest.raises(zf.CompositionError, match="already"):
        zf.quantize(step)


PAIRS: dict[str, Any] = {
    "shard": lambda f: zf.shard(f, stage=3, unit_bytes=64),
    "donate": zf.donate,
    "remat": zf.remat,
    "accumulate": lambda f: zf.accumulate(f, 2),
    "drop_layers": lambda f: zf.drop_layers(f, theta=1.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_beside_others(name: str) -> None:
    """Each of these changes nothing of what `quantize` does, in either order."""
    metrics, state, _ = quantized(**FAST, rounding="stochastic")[0]
    wrap, full = PAIRS[name], CASE.state(ADAMW, F64)
    for make in (
        lambda f: wrap(zf.quantize(f, **FAST, rounding="stochastic")),
        lambda f: zf.quantize(wrap(f), **FAST, rounding="stochastic"),
    ):
        step = make(CASE.step(ADAMW))
        theirs, its = train(step, step.place(full), CASE, 5)
        assert_near(theirs, metrics, 1e-9)
        assert_near(step.unplace(its), state, 1e-9)


def test_beside_precision() -> None:
    """What is rounded is the 16-bit copy; a step that overflows does not count."""
    full = CASE.state(ADAMW, torch.float32)
    step = zf.precision(zf.quantize(CASE.step(ADAMW), **FAST), loss_scale="dynamic")
    state = step.place(full)
    metrics, state = train(step, state, CASE, 3, torch.float32)
    assert int(state.aux["quantize"]["steps"]) == 3
    assert all(bool(torch.isfinite(row["loss"])) for row in metrics)
    huge = {name: x * 1e30 for name, x in CASE.batch(0, torch.float32).items()}
    state, row = step(state, huge)
    assert bool(row["overflow"]) and int(state.aux["quantize"]["steps"]) == 3


def test_init_places_as_place_does() -> None:
    def make() -> Any:
        return zf.TrainState.create({"w": torch.randn(4, 8), "b": torch.zeros(8)}, ADAMW)

    step = zf.shard(zf.quantize(CASE.step(ADAMW), **FAST), stage=3)
    torch.manual_seed(3)
    expected = step.place(make())
    torch.manual_seed(3)
    assert_same(zf.full(step.init(make)), zf.full(expected))


def test_the_schedule_is_saved_and_restored(tmp_path: Any) -> None:
    step = zf.quantize(CASE.step(ADAMW), **FAST)
    state = step.place(CASE.state(ADAMW, F64))
    for i in range(2):
        state, _ = step(state, CASE.batch(i, F64))
    zf.save(tmp_path, state)
    back = zf.restore(tmp_path, like=step.place(CASE.state(ADAMW, F64)))
    assert_same(step(back, CASE.batch(2, F64)), step(state, CASE.batch(2, F64)))


# Curvature


def test_curvature_is_that_of_the_exact_hessian() -> None:
    params, batch = stack(F64, layers=3), regression(0, F64)
    found = quant.top_eigenvalues(stack_loss, params, batch)
    for k, layer in enumerate(params["blocks"]):
        names = sorted(layer)
        sizes = [layer[name].numel() for name in names]

        def loss(flat: Tensor, k: int = k, names: Any = names, sizes: Any = sizes) -> Tensor:
            parts = dict(zip(names, flat.split(sizes), strict=True))
            shaped = {n: x.view_as(params["blocks"][k][n]) for n, x in parts.items()}
            blocks = zf.Layers(shaped if i == k else x for i, x in enumerate(params["blocks"]))
            return stack_loss({**params, "blocks": blocks}, batch)

        flat = torch.cat([layer[name].reshape(-1) for name in names])
        values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
        exact = float(values[values.abs().argmax()])
        assert float(found[f"blocks.{k}"]) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_curvature_is_the_same_on_every_world(stage: int) -> None:
    how = {**FAST, "curvature": "power_iteration"}
    metrics, state, schedule = quantized(steps=6, **how)[0]
    slow = schedule["curvature"] == 1
    assert slow.any() and not slow.all()
    assert int(schedule["bits"][slow].min()) > int(schedule["bits"].min())  # sensitive ones wait
    for theirs, its, carried in quantized(3, 6, {"stage": stage, "unit_bytes": 64}, **how):
        assert_near(theirs, metrics, 1e-9)
        assert_near(its, state, 1e-9)
        assert_near(carried, schedule, 1e-6)


def test_curvature_on_threads_leaves_torch_as_it_was() -> None:
    """The choice of attention is the process's, and simulated ranks come and go in any order."""

    def body() -> None:
        for turn in range(12):
            most = 1 + (zf.rank() + turn) % 4
            quant.top_eigenvalues(lambda p: p["w"].exp().sum(), {"w": torch.ones(3)}, max_iter=most)
            zf.psum(torch.ones(()))  # the others' turn

    zf.simulate(4)(body)()
    assert torch.backends.cuda.flash_sdp_enabled()


# Export


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_exported_is_what_the_loss_saw(stage: int | None, symmetric: bool) -> None:
    case = trained(lambda dtype: stack(dtype, layers=3), stack_loss)
    batch = case.batch(9, torch.float32)

    def body() -> Any:
        step = zf.quantize(case.step(ADAMW), **FAST, symmetric=symmetric)
        step = step if stage is None else zf.shard(step, stage=stage)
        state = step.place(case.state(ADAMW, torch.float32))
        _, state = train(step, state, case, 5, torch.float32)
        seen = step(state, batch)[1]["loss"] if zf.world_size() == 1 else None
        return quant.exported(step, state), seen

    (low, seen), *_ = zf.simulate(1)(body)()
    leaves = zf.tree.flatten_names(low)
    assert any(isinstance(x, QTensor) and x.format.bits == 3 for x in leaves.values())
    torch.testing.assert_close(stack_loss(quant.dequantize_tree(low), batch), seen)
    if stage == 3:
        for other, _ in zf.simulate(3)(body)():
            for name, x in zf.tree.flatten_names(other).items():
                assert type(x) is type(leaves[name])


def test_nothing_to_export() -> None:
    step = CASE.step(ADAMW)
    with pytest.raises(zf.PlacementError, match="no bit schedule"):
        quant.exported(step, step.place(CASE.state(ADAMW, F64)))


# Bad input


def test_states_that_fit_no_schedule() -> None:
    step = zf.quantize(CASE.step(ADAMW), **FAST)
    full = CASE.state(ADAMW, F64)
    with pytest.raises(zf.PlacementError, match="carries no bit schedule"):
        step(full, CASE.batch(0, F64))
    other = zf.quantize(CASE.step(ADAMW), **FAST, include="blocks.0.*")
    with pytest.raises(zf.PlacementError, match="another `include`"):
        step(other.place(full), CASE.batch(0, F64))
    with pytest.raises(zf.PlacementError, match="closest paths"):
        zf.quantize(CASE.step(ADAMW), include="blok*").place(full)
    with pytest.raises(zf.PlacementError, match="no entry 'params'"):
        step.place({"weights": full.params})
    keyless = zf.quantize(lambda s, b: (s, {}), rounding="stochastic")
    with pytest.raises(zf.PlacementError, match="'key'"):
        keyless(keyless.place({"params": {"w": numbers((3, 4), 1)}}), None)


@pytest.mark.parametrize(
    "other", [{"start_bits": 5}, {"period": 2}, {"period": 2, "start_bits": 8}]
)
@pytest.mark.parametrize("restored", [False, True])
def test_a_schedule_that_began_otherwise_is_refused(
    other: dict[str, Any], restored: bool, tmp_path: Any
) -> None:
    mine, batch = zf.quantize(CASE.step(ADAMW), **FAST), CASE.batch(0, F64)
    step = zf.quantize(CASE.step(ADAMW), **{**FAST, **other})
    full = CASE.state(ADAMW, F64)
    state, _ = mine(mine.place(full), batch)
    if restored:
        zf.save(tmp_path, state)
        state = zf.restore(tmp_path, like=step.place(full))
    settings = {"start_bits": FAST["start_bits"], "period": FAST["period"], **other}
    expected = ", ".join(f"{name}={value}" for name, value in settings.items())
    with pytest.raises(
        zf.PlacementError, match=f"start_bits=6, period=1; this step has {expected}"
    ):
        step(state, batch)
    again, _ = step(step.place(mine.unplace(state)), batch)
    assert (again.aux["quantize"]["bits"] >= settings["start_bits"] - 1).all()


def test_other_settings_of_a_schedule_may_change() -> None:
    """Each step does what a step does that was always so, on the bits that it finds."""

    def bits_after(n: int, state: Any, **how: Any) -> tuple[list[int], Any]:
        step, seen = zf.quantize(CASE.step(ADAMW), **{**FAST, **how}), []
        for i in range(n):
            state, _ = step(state, CASE.batch(i, F64))
            (now,) = set(state.aux["quantize"]["bits"].tolist())
            seen.append(now)
        return seen, state

    state = zf.quantize(CASE.step(ADAMW), **FAST).place(CASE.state(ADAMW, F64))
    seen, state = bits_after(2, state)
    assert seen == [5, 4]
    assert bits_after(3, state)[0] == [4, 3, 3]
    assert bits_after(3, state, target_bits=4)[0] == [4, 4, 4]
    assert bits_after(3, state, target_bits=6)[0] == [4, 4, 4]  # bits never rise
    assert bits_after(8, state, offset=3)[0] == [4, 4, 4, 4, 3, 3, 3, 3]


def test_mixing_ends_where_it_is_switched_off() -> None:
    mixed, plain = (zf.quantize(CASE.step(ADAMW), **FAST, mix_rate=rate) for rate in (0.3, None))
    state = mixed.place(CASE.state(ADAMW, F64))
    for i in range(2):
        state, _ = mixed(state, CASE.batch(i, F64))
    schedule = state.aux["quantize"]
    assert (schedule["ratio"] > 0).all()
    unmixed = {**schedule, "ratio": torch.zeros_like(schedule["ratio"])}
    same = state.replace(aux={**state.aux, "quantize": unmixed})
    found, expected = plain(state, CASE.batch(2, F64)), plain(same, CASE.batch(2, F64))
    assert_same(found, expected)
    assert not torch.equal(found[1]["loss"], mixed(state, CASE.batch(2, F64))[1]["loss"])


def test_other_states_name_their_parameters() -> None:
    case = CASES["stack"]

    def step(state: Tree, batch: Tree) -> Any:
        loss, grads = zf.value_and_grad(stack_loss)(state["net"], batch)
        new = zf.tree.map(lambda p, g: p - 0.1 * g, state["net"], grads)
        return {**state, "net": new}, loss

    low = zf.quantize(step, start_bits=4, target_bits=4, roles={"net": "params"})
    params = stack(F64)
    placed = low.place({"net": params})
    new, loss = low(placed, case.batch(0, F64))
    assert "transforms" in new and not torch.equal(loss, stack_loss(params, case.batch(0, F64)))
    assert low.unplace(new).keys() == {"net"}


def test_evaluation_in_the_step_sees_what_training_sees() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, _ = zf.value_and_grad(stack_loss)(state.params, batch)
        return state, {"loss": loss, "inside": zf.evaluate(stack_loss)(state.params, batch)}

    wrapped, batch = zf.shard(zf.quantize(step, start_bits=3, target_bits=3)), regression(0, F64)
    full = CASE.state(ADAMW, F64)
    _, out = wrapped(wrapped.place(full), batch)
    torch.testing.assert_close(out["inside"], out["loss"], rtol=1e-12, atol=0)
    plain = forward(full.params, batch["x"])
    assert abs(out["loss"] - (plain - batch["y"]).square().mean()) > 1e-6
