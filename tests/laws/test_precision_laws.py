"""Laws of ``precision``: the plain mixed-precision loop, bitwise; round trip; bytes; overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    alone,
    assert_near,
    assert_same,
    numbers,
    regression,
    train,
    trained,
)
from tests.laws.covering import each, pairs, turns
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import forward, mean_square, stack
from zfunc import optim, tree

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STAGES = (0, 1, 2, 3)


def cast_loss(params: Any, batch: Any) -> Tensor:
    """Says itself in which dtype it computes, so that a plain loop can be compared bitwise."""
    x = batch["x"].to(params["first"]["w"].dtype)
    return mean_square(forward(params, x), batch["y"])


CAST = trained(stack, cast_loss)
FROZEN = trained(
    stack, cast_loss, trainable=lambda path: path != "head.b" and "blocks.1" not in path
)


def by_hand(
    case: Case, steps: int = 4, compute: torch.dtype = BF16, scale: float = 1.0
) -> tuple[list[float], Any]:
    """Mixed precision in plain PyTorch: 16-bit copies, fp32 gradients, AdamW on fp32 weights."""
    state = case.state(ADAMW, F32)
    losses = []
    for i in range(steps):
        low = tree.map(lambda p: p.detach().to(compute).requires_grad_(), state.params)
        batch = case.batch(i, F32)
        loss = cast_loss(low, batch)
        leaves = tree.leaves(low)
        found = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
        grads = {
            path: None if path in state.frozen else g.float() / scale
            for path, g in zip(tree.paths(low), found, strict=True)
            if g is not None
        }
        grads = tree.map_with_path(
            lambda path, p, grads=grads: grads[path],
            tree.select(state.params, lambda path, frozen=state.frozen: path not in frozen),
        )
        updates, opt_state = ADAMW.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        losses.append(float(loss.detach()))
    return losses, state


def wrapped(step: Any, stage: int | None, donated: bool = False, roles: Any = None) -> Any:
    step = step if stage is None else zf.shard(step, stage=stage, unit_bytes=600, roles=roles)
    return zf.donate(step) if donated else step


LOW: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {"compute": F16, "loss_scale": 1024.0}}


@pytest.mark.parametrize(
    ("name", "low", "stage", "donated"),
    pairs(("stack", "frozen"), LOW, (None, *STAGES), (False, True)),
)
def test_one_rank_is_the_plain_loop_bitwise(
    name: str, low: str, stage: int | None, donated: bool
) -> None:
    case, how = FROZEN if name == "frozen" else CAST, LOW[low]
    losses, expected = by_hand(
        case, compute=how.get("compute", BF16), scale=how.get("loss_scale", 1.0)
    )

    def body() -> Any:
        step = wrapped(zf.precision(case.step(ADAMW), **how), stage, donated)
        metrics, state = train(step, step.place(case.state(ADAMW, F32)), case, 4, F32)
        assert {x.dtype for x in tree.leaves(state.params)} == {how.get("compute", BF16)}
        return [float(m["loss"]) for m in metrics], step.unplace(state)

    found, state = zf.simulate(1)(body)()[0]
    assert found == losses
    assert_same(state, expected)


@pytest.mark.parametrize(("stage", "ranks"), each(STAGES, [2, 3, 4], times=2))
def test_ranks_agree_within_the_rounding_of_sixteen_bits(stage: int, ranks: int) -> None:
    """And all of them in every bit; donating changes none."""
    losses, _ = by_hand(CAST)

    def body(donated: bool) -> Any:
        step = wrapped(zf.precision(CAST.step(ADAMW)), stage, donated)
        metrics, state = train(step, step.place(CAST.state(ADAMW, F32)), CAST, 4, F32)
        return metrics, step.unplace(state)

    runs = [*zf.simulate(ranks)(body)(False), *zf.simulate(ranks)(body)(True)]
    for run in runs:
        assert_same(run, runs[0])
        assert [float(m["loss"]) for m in run[0]] == pytest.approx(losses, rel=2**-7)


@pytest.mark.parametrize(("name", "turn"), turns([*READY_MADE, *HAND_WRITTEN]))
def test_every_case_trains_near_its_full_precision_run(name: str, turn: int) -> None:
    case = {**READY_MADE, **HAND_WRITTEN}[name]

    def losses(metrics: Any) -> list[float]:
        return [float(m[k]) for m in metrics for k in ("loss", "d", "g") if k in m]

    reference = losses(alone(case, ADAMW, 3, F32)[0])

    def body(stage: int) -> Any:
        step = zf.precision(case.step(ADAMW), roles=case.roles)
        step = wrapped(step, stage, donated=True, roles=case.roles)
        full = case.state(ADAMW, F32)
        metrics, state = train(step, step.place(full), case, 3, F32)
        return losses(metrics), step.unplace(state)

    for stage in (turn % 3, 3):
        first, second = zf.simulate(2)(body)(stage)
        assert_same(first, second)
        for x, y in zip(first[0], reference, strict=True):
            assert abs(x - y) <= 0.06 * max(abs(y), 0.3), f"stage {stage}"


@pytest.mark.parametrize("name", ["stack", "frozen", "mixed dtypes", "keys of all kinds", "gan"])
def test_round_trip_is_bitwise(name: str) -> None:
    """Also of values that 16 bits cannot hold, and of what training has made."""
    case = {**READY_MADE, **HAND_WRITTEN}[name]

    def body(stage: int | None) -> None:
        step = zf.precision(case.step(ADAMW), loss_scale="dynamic", roles=case.roles)
        step = wrapped(step, stage, roles=case.roles)
        full = case.state(ADAMW, F32)
        placed = step.place(full)
        assert_same(step.unplace(placed), full)
        for leaf in tree.leaves(placed):
            if isinstance(leaf, Tensor):
                leaf.zero_()  # had it shared memory with the full state, that would show
        assert_same(full, case.state(ADAMW, F32))
        state, _ = step(step.place(full), zf.local_batch(case.batch(0, F32)))
        once = step.unplace(state)
        assert_same(step.unplace(step.place(once)), once)

    for stage in (None, *STAGES):
        zf.simulate(1 if stage is None else 3)(body)(stage)


def test_state_bytes_are_what_theory_says() -> None:
    """2 bytes for a copy, 4 + 8 for master and moments; whole or cut as the stage says."""
    wide = {"blocks": zf.Layers([{"w": numbers((64, 64), i, F32)} for i in range(4)])}
    count = 4 * 64 * 64

    def body(stage: int) -> tuple[int, int, int]:
        def loss(p: Any, x: Tensor) -> Tensor:
            return zf.scan(lambda q, x: torch.tanh(x @ q["w"]), p["blocks"], x).square().mean()

        step = zf.precision(zf.train_step(loss, ADAMW))
        step = zf.shard(step, stage=stage, unit_bytes=1 << 15)  # each layer a unit
        state = step.place(zf.TrainState.create(wide, ADAMW))
        with zf.comm.ledger() as led:
            state, _ = step(state, numbers((4, 64), zf.rank(), F32))
        paid = sum(
            sent + led.headers_by_label[label]
            for label, sent in led.by_label.items()
            if label.split()[0] in ("gather", "reduce", "join")
        )
        assert step.describe().sent_bytes == led.total_bytes
        return tree.size_bytes(state.params), tree.size_bytes(state.opt_state), paid

    for ranks in (1, 2, 4):
        for stage in STAGES:
            for params, opt_state, paid in zf.simulate(ranks)(body)(stage):
                assert params == 2 * count // (ranks if stage == 3 else 1)
                assert opt_state == pytest.approx(12 * count / (ranks if stage else 1), rel=1e-3)
                gathers = {0: 0, 1: 2, 2: 2, 3: 4}[stage]
                reduces = 8 if stage == 0 else 4
                theory = (gathers + reduces) * count * (ranks - 1) / ranks
                assert paid == pytest.approx(theory, rel=0.14 if stage == 3 else 0.02)


def test_gradients_are_summed_in_the_dtype_that_was_asked_for() -> None:
    seen: list[torch.dtype] = []

    def body(reduce: torch.dtype) -> list[str]:
        def step(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(cast_loss)(state.params, batch)
            seen.extend(x.dtype for x in tree.leaves(grads))
            assert {x.dtype for x in tree.leaves(state.params)} == {F32}
            assert loss.dtype == F32
            return state, {"loss": loss}

        wrapped = zf.shard(zf.precision(step, reduce=reduce), stage=2)
        state = wrapped.place(CAST.state(ADAMW, F32))
        with zf.comm.ledger() as led:
            wrapped(state, zf.local_batch(regression(0, F32)))
        return [led.by_label[label] for label in led.by_label if label.startswith("reduce")]

    wide, narrow = zf.simulate(2)(body)(F32)[0], zf.simulate(2)(body)(BF16)[0]
    assert sum(wide) == 2 * sum(narrow) > 0
    assert set(seen) == {F32}


# What computes in which dtype


class Net(nn.Module):
    """A persistent buffer, one that is not saved, statistics, and an fp32 branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("angles", torch.linspace(0.0, 1.0, 8), persistent=False)
        self.enter = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in "ab"])
        self.leave = nn.Linear(8, 1)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.update(scale=self.scale.dtype, angles=self.angles.dtype)
        x = self.norm(self.enter(x)) * self.scale
        turned = x * self.angles.cos()  # fp32: it would promote everything behind it
        self.seen.update(stats=self.norm.running_mean.dtype, turned=turned.dtype)
        for layer in self.layers:
            turned = layer(turned)
            self.seen["layer"] = turned.dtype
        return self.leave(turned)


@pytest.mark.parametrize(("stage", "compute"), each([None, *STAGES], [BF16, F16]))
def test_what_is_sixteen_bit_and_what_is_not(stage: int | None, compute: torch.dtype) -> None:
    torch.manual_seed(0)
    net = Net()
    seen = net.seen
    model = zf.functionalize(net)
    model._pool.skeleton.seen = seen

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, new = model.apply(params, batch["x"], buffers=buffers, mutable=True, train=True)
        seen["out"] = out.dtype
        return F.mse_loss(out.float(), batch["y"]), new  # torch 2.11 refuses to mix in backward

    def body() -> Any:
        step = wrapped(zf.precision(zf.train_step(loss, ADAMW), compute=compute), stage)
        full = zf.TrainState.create(model.params, ADAMW, buffers=model.buffers)
        state, metrics = step(step.place(full), zf.local_batch(regression(0, F32)))
        return metrics, step.unplace(state)

    for metrics, state in zf.simulate(1 if stage is None else 2)(body)():
        assert metrics["loss"].dtype == F32
        assert {x.dtype for x in tree.leaves(state.params)} == {F32}
        for name, buffer in state.buffers.items():
            assert buffer.dtype == model.buffers[name].dtype
            changed = not torch.equal(buffer, model.buffers[name])
            assert changed == name.startswith("norm."), name
    assert seen["out"] == compute


def test_arguments_that_mean_nothing() -> None:
    step = CAST.step(ADAMW)
    for how in ({"compute": torch.int8}, {"reduce": "fp32"}, {"loss_scale": -1.0}):
        with pytest.raises(ValueError, match=r"precision\("):
            zf.precision(step, **how)
    with pytest.raises(ValueError, match="dynamic"):
        zf.precision(step, loss_scale="dynamical")
    with pytest.raises(zf.CompositionError, match="already"):
        zf.precision(zf.precision(step))
    one = zf.precision(step)
    with pytest.raises(zf.PlacementError, match=r"step\.place"):
        one(CAST.state(ADAMW, F32), regression(0, F32))
    with pytest.raises(zf.PlacementError, match=r"p\.float\(\)"):
        one.place(CAST.state(ADAMW, BF16))
    with pytest.raises(zf.PlacementError, match="role 'opt_state'"):
        one.place({"params": stack(F32)})


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_init_is_place(stage: int | None) -> None:
    def make() -> Any:
        torch.manual_seed(3)
        params = {
            "w": torch.randn(6, 6),
            "blocks": zf.Layers([{"w": torch.randn(6, 6)} for _ in range(2)]),
        }
        return zf.TrainState.create(params, ADAMW, key=1)

    def body() -> None:
        step = wrapped(zf.precision(CAST.step(ADAMW), loss_scale="dynamic"), stage)
        placed, direct = step.init(make), step.place(full)
        for x, y in zip(tree.leaves(placed), tree.leaves(direct), strict=True):
            assert torch.equal(x, y) and x.dtype == y.dtype
            assert_same(step.unplace(placed), full)

    full = make()  # ranks that are threads share torch's generator
    zf.simulate(1 if stage is None else 2)(body)()


def test_evaluate_inside_and_outside_a_step_computes_in_sixteen_bits() -> None:
    def score(params: Any, x: Tensor) -> Tensor:
        return forward(params, x)

    def body(stage: int | None) -> None:
        inside: list[torch.dtype] = []

        def step(state: Any, batch: Any) -> Any:
            inside.append(zf.evaluate(score)(state.params, batch["x"].to(BF16)).dtype)
            return CAST.step(ADAMW).__wrapped__(state, batch)

        one = wrapped(zf.precision(step), stage)
        state = one.place(CAST.state(ADAMW, F32))
        x = zf.local_batch(regression(0, F32))["x"]
        assert zf.evaluate(score)(state.params, x).shape == (len(x), 1)
        one(state, zf.local_batch(regression(0, F32)))
        assert inside == [BF16]

    for stage in (None, *STAGES):
        zf.simulate(1 if stage is None else 2)(body)(stage)


def test_losses_follow_full_precision() -> None:
    """Twenty steps of a real fit: as good as in fp32, within what bf16 resolves."""
    reference = [float(m["loss"]) for m in alone(CAST, ADAMW, 20, F32)[0]]
    step = zf.precision(CAST.step(ADAMW))
    metrics, state = train(step, step.place(CAST.state(ADAMW, F32)), CAST, 20, F32)
    found = [float(m["loss"]) for m in metrics]
    assert found == pytest.approx(reference, rel=0.05)
    assert_near(
        tree.map(lambda p: p * 1.0, step.unplace(state).params),
        alone(CAST, ADAMW, 20, F32)[1].params,
        0.05,
    )
