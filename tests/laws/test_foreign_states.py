"""A step takes the states of its own composition, and of no other that represents them otherwise.

Law: for any two compositions A and B, ``B(A.place(s))`` is ``B(B.place(s))``, bitwise, or raises
``PlacementError`` on all ranks, naming both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.models import stack, stack_loss
from zfunc import optim, quant, tree
from zfunc.engine import carried
from zfunc.engine.step import as_step

BATCH = {"x": numbers((8, 6), 1), "y": numbers((8, 1), 2)}
ADAM, SGD = optim.adam(0.02), optim.sgd(0.02)


def shard(stage: int, **how: Any) -> Callable[[Any], Any]:
    return lambda f: zf.shard(f, stage=stage, unit_bytes=600, **how)


def on_disk(inner: Callable[[Any], Any], folder: Path, **how: Any) -> Callable[[Any], Any]:
    return lambda f: zf.offload(inner(f), to="disk", path=folder, **how)


def compress(stage: int, method: str, **how: Any) -> Callable[[Any], Any]:
    return lambda f: zf.compress_grads(shard(stage)(f), method=method, freeze_step=1, **how)


def low(inner: Callable[[Any], Any], **how: Any) -> Callable[[Any], Any]:
    return lambda f: zf.precision(inner(f), **how)


def bare(f: Any) -> Any:
    return f


def compositions(folder: Path) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """By name: what the state looks like, where that is the same for several, and the wraps."""
    return {
        "bare": ("plain", bare),
        "donate": ("plain", zf.donate),
        "remat": ("plain", zf.remat),
        **{f"stage {i}": (f"cut {max(i, 2) if i else 0}", shard(i)) for i in range(4)},
        "large units": ("cut 3", lambda f: zf.shard(f, stage=3)),
        "dropping": ("cut 3", lambda f: shard(3)(zf.drop_layers(f, theta=1.0))),
        "precision": ("bf16", low(bare)),
        "fp16": ("fp16", low(bare, compute=torch.float16)),
        "dynamic": ("dynamic", low(bare, loss_scale="dynamic")),
        **{f"precision {i}": (f"bf16 {max(i, 2) if i else 0}", low(shard(i))) for i in range(4)},
        "fp16 3": ("fp16 3", low(shard(3), compute=torch.float16)),
        "quantize": ("bits", lambda f: zf.quantize(f, target_bits=16)),
        "quantize 2": ("bits 2", lambda f: shard(2)(zf.quantize(f, target_bits=16))),
        "disk": ("disk", on_disk(bare, folder / "a")),
        "disk 1": ("disk 1", on_disk(shard(1), folder / "b")),
        "disk 3": ("disk 3", on_disk(shard(3), folder / "c")),
        "moments 3": ("moments 3", on_disk(shard(3), folder / "d", what="opt_state")),
        "onebit 0": ("onebit 0", compress(0, "onebit")),
        "onebit 3": ("errors 3", compress(3, "onebit")),
        "int8 3": ("errors 3", compress(3, "int8")),
        "int8 0": ("errors 0", compress(0, "int8")),
        "powersgd 3": ("bases 3", compress(3, "powersgd")),
        "gather 2": ("updates 2", compress(2, "int8", gather="int8")),
        "zero_one": ("drift", compress(0, "zero_one", local_step_scaler=100)),
    }


@dataclass
class Outcome:
    """What came of giving one composition's state to another's step, on one rank."""

    params: Any = None
    error: str | None = None


def given(maker: Any, step: Any, tx: Any, ranks: int = 2) -> list[Outcome]:
    full = zf.TrainState.create(stack(torch.float64), tx, key=7)

    def run() -> Outcome:
        try:
            state = maker.place(full)
            try:
                for _ in range(2):
                    state, _ = step(state, zf.local_batch(BATCH))
            except zf.PlacementError as error:
                return Outcome(error=str(error))
            return Outcome(params=step.unplace(state).params)
        finally:
            maker.close()
            step.close()

    found: list[Outcome] = zf.simulate(ranks)(run)()
    return found


def refusals(maker: Any, steps: dict[str, Any], tx: Any) -> list[dict[str, str]]:
    """Which steps refuse a state, and how, on each rank."""
    full = zf.TrainState.create(stack(torch.float64), tx, key=7)

    def run() -> dict[str, str]:
        found = {}
        with maker:
            state = maker.place(full)
            for name, step in steps.items():
                try:
                    step(state, zf.local_batch(BATCH))
                except zf.PlacementError as error:
                    found[name] = str(error)
        return found

    found: list[dict[str, str]] = zf.simulate(2)(run)()
    return found


def test_each_pair_is_the_same_or_refused(tmp_path: Path) -> None:
    made = compositions(tmp_path)
    steps = {name: wrap(zf.train_step(stack_loss, ADAM)) for name, (_, wrap) in made.items()}
    own = {name: given(step, step, ADAM) for name, step in steps.items()}
    assert all(outcome.error is None for row in own.values() for outcome in row)
    for a in steps:
        others = {b: steps[b] for b in steps if made[a][0] != made[b][0]}
        for row in refusals(steps[a], others, ADAM):
            assert list(row) == list(others), (a, set(others) - set(row))
            for b, error in row.items():
                assert repr(steps[b]) in error, (a, b, error)
                assert all(t.name in error for t in steps[a].transforms if _shows(t)), error
        for b in steps.keys() - others.keys() - {a}:
            for mine, theirs in zip(given(steps[a], steps[b], ADAM), own[b], strict=True):
                assert mine.error is None, (a, b, mine.error)
                same = tree.map(torch.equal, mine.params, theirs.params)
                assert all(tree.leaves(same)), (a, b)


def _shows(transform: Any) -> bool:
    return transform.name in ("shard", "precision", "quantize", "offload", "compress_grads")


def test_states_without_moments_too(tmp_path: Path) -> None:
    """Nothing but the parameters can tell then."""
    made = {
        name: wrap
        for name, (_, wrap) in compositions(tmp_path).items()
        if name in ("bare", "stage 0", "precision", "precision 0", "quantize", "disk", "onebit 3")
    }
    steps = {name: wrap(zf.train_step(stack_loss, SGD)) for name, wrap in made.items()}
    for a in steps:
        others = {b: steps[b] for b in steps if a != b}
        assert [list(row) for row in refusals(steps[a], others, SGD)] == [list(others)] * 2, a
        assert all(outcome.error is None for outcome in given(steps[a], steps[a], SGD)), a


@pytest.mark.parametrize("stage", range(4))
def test_ranks_along_another_axis_are_others(stage: int) -> None:
    """As many of them, and each has a part of a state or all of it: only who they are differs."""
    grid = zf.Mesh((("rows", 2), ("columns", 2)))
    step = zf.train_step(stack_loss, ADAM)
    rows, columns = (zf.shard(step, stage, grid, axis) for axis in ("rows", "columns"))
    for outcome in given(rows, columns, ADAM, ranks=4):
        assert outcome.error is not None and "along axis 'rows'" in outcome.error
    assert all(outcome.error is None for outcome in given(rows, rows, ADAM, ranks=4))


def test_copies_of_a_state_keep_its_signs(tmp_path: Path) -> None:
    """Whatever one does with a state between two steps."""
    step = zf.train_step(stack_loss, ADAM)
    low = zf.precision(step)
    state = low.place(zf.TrainState.create(stack(torch.float32), ADAM, key=7))
    batch = tree.map(torch.Tensor.float, BATCH)
    zf.save(tmp_path, state)
    copies = {
        "stepped": low(state, batch)[0],
        "replaced": state.replace(step=state.step + 1, params=tree.map(torch.neg, state.params)),
        "mapped": tree.map(torch.clone, state),
        "copied": copy.deepcopy(state),
        "restored": zf.restore(tmp_path, like=state),
        "a dict": {name: getattr(state, name) for name in ("params", "opt_state", "step", "key")},
    }
    own, _ = step(zf.TrainState.create(stack(torch.float32), ADAM, key=7), batch)
    for name, other in copies.items():
        with pytest.raises(zf.PlacementError, match="step wrapped in precision; this step is"):
            step(other, batch)
        if name != "a dict":
            assert torch.is_tensor(low(other, batch)[1]["loss"])
    step(own, batch)


def test_a_schedule_of_other_weights_is_refused() -> None:
    """As many of them, so that only their names tell."""
    tx = optim.sgd(0.1)
    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}

    def loss(p: Any, x: Any) -> Any:
        return (x @ p["a"] @ p["b"]).square().mean()

    one, other = (
        zf.quantize(zf.train_step(loss, tx), start_bits=8, target_bits=4, include=name)
        for name in ("a", "b")
    )
    state = one.place(zf.TrainState.create(params, tx))
    with pytest.raises(zf.PlacementError, match="1 other weights"):
        other(state, torch.randn(2, 4))


def test_low_bits_of_another_function_are_refused() -> None:
    def linear(params: Any, x: Any) -> Any:
        return F.linear(x, params["w"])

    params, x = {"w": torch.randn(32, 32)}, torch.randn(2, 32)
    eight, four = zf.quantize(linear, bits=8), zf.quantize(linear, bits=4)
    for wrap in (lambda f: f, lambda f: zf.shard(f, stage=3)):
        eight_, four_ = wrap(eight), wrap(four)

        def cross(eight: Any = eight_, four: Any = four_) -> str:
            with pytest.raises(zf.PlacementError, match="stored in 8 bits") as error:
                four(eight.place(params), x)
            assert four(four.place(params), x).shape == (2, 32)
            return str(error.value)

        assert all("quantize(bits=4)" in text for text in zf.simulate(2)(cross)())
    assert isinstance(four.place(params)["w"], quant.QTensor)


@dataclass(frozen=True)
class Counting(zf.Transform):
    """A transform of a user's own, with state of its own."""

    def place(self, state: Any) -> Any:
        return carried.put(state, "counting", torch.zeros(()))

    def unplace(self, state: Any) -> Any:
        return carried.take(state, "counting")[1]


def test_what_a_users_transform_carries_is_its_sign() -> None:
    step = zf.train_step(stack_loss, ADAM)
    counting = as_step(step).wrap(Counting())
    state = counting.place(zf.TrainState.create(stack(torch.float64), ADAM, key=7))
    with pytest.raises(zf.PlacementError, match="wrapped in counting; this step is"):
        step(state, BATCH)
    kept = zf.TrainState.create(stack(torch.float64), ADAM, key=7, aux={"mine": torch.ones(())})
    assert float(step(kept, BATCH)[0].aux["mine"]) == 1.0


def test_errors_left_in_a_full_state_are_no_sign() -> None:
    """``unplace`` leaves what compression has not sent yet; any step may go on without it."""
    full = zf.TrainState.create(stack(torch.float64), ADAM, key=7)
    onebit = compress(2, "int8")(zf.train_step(stack_loss, ADAM))
    plain = shard(2)(zf.train_step(stack_loss, ADAM))

    def run() -> bool:
        state = onebit.place(full)
        for _ in range(3):
            state, _ = onebit(state, zf.local_batch(BATCH))
        out = onebit.unplace(state)
        assert "compress_grads" in out.aux
        state, _ = plain(plain.place(out), zf.local_batch(BATCH))
        return int(state.step) == 4

    assert zf.simulate(2)(run)() == [True, True]


def test_a_plain_function_does_not_lose_the_masters() -> None:
    """It is no step, so nobody looks at its state; but the optimizer sees whose it is."""
    rows = numbers((4, 3), 3).bfloat16()

    def plain(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(lambda p: (batch @ p["w"].to(batch.dtype)).square().mean())(
            state["params"]
        )
        updates, opt_state = ADAM.update(grads, state["opt_state"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt_state": opt_state}, {}

    params = {"w": numbers((3, 2), 4)}
    full = {"params": params, "opt_state": ADAM.init(params)}
    step = zf.precision(plain)
    state = step.place(full)
    with pytest.raises(zf.PlacementError, match=r"placed by precision\(step\)"):
        plain(state, rows)
    state, _ = step(state, rows)
    plain(step.unplace(state), rows.float())


@pytest.mark.parametrize("wrap", [bare, zf.remat, shard(3)], ids=["bare", "remat", "shard"])
def test_a_step_of_a_step_is_that_step(wrap: Callable[[Any], Any]) -> None:
    step = zf.train_step(stack_loss, ADAM)
    again = zf.Step(zf.Step(wrap(step)))
    assert again == wrap(step) and again.tx is ADAM and again.fn is step.fn
    outer = zf.precision(again)
    state = outer.place(zf.TrainState.create(stack(torch.float64), ADAM, key=7))
    assert torch.is_tensor(outer(state, BATCH)[1]["loss"])
    assert zf.Step(step, transforms=wrap(step).transforms) == wrap(step)
    assert zf.Step(step, tx=SGD).tx is SGD


def test_a_transform_inside_of_a_step_of_a_step_acts_once() -> None:
    step = zf.Step(shard(1)(zf.train_step(stack_loss, ADAM)))
    with pytest.raises(zf.CompositionError, match="wrapped in shard already"):
        shard(3)(step)
