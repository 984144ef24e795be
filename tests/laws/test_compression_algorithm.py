"""1-bit Adam and its kin, step by step, against a literal simulation; and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_near, numbers, regression
from tests.laws.compressed import F64, STACK, STAGES, wrapped
from tests.laws.compression import TwoPhases, signs
from tests.laws.covering import each, pairs
from tests.laws.models import stack
from tests.laws.one_unit import flat, gradient, layout_of, one, one_loss
from zfunc import optim, tree
from zfunc.layout.dense import dense_of

# The algorithm, literally


def simulated(ranks: int, stage: int, tx: str, steps: int, freeze: int) -> list[Tensor]:
    """Flat parameters after each step: 1-bit Adam, momentum SGD or SGD by the book.

    One unit, so that one buffer holds the model; second moments are frozen after their bias
    is corrected. Not by the book: Adam's momentum travels in units of their roots,
    and its direction keeps to what Adam's can be.
    """
    params = stack(F64)
    layout = layout_of(ranks)
    cuts = dense_of(layout, 0).cuts
    scaling = "rms" if tx == "momentum" and stage == 0 else "mean"
    phases = TwoPhases(cuts, lambda c: signs(c, 2048, scaling), whole=stage == 0)
    p = flat(layout, params)
    m, v, v_hat, seen = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p), []
    for t in range(1, steps + 1):
        own = [gradient(layout, p, t - 1, ranks, rank) for rank in range(ranks)]
        begun = t > freeze
        momentum = tx != "sgd" and stage == 0
        if begun and not momentum:
            g = phases.mean(own)
            own = [g] * ranks
        decay, gain = (0.9, 0.1) if tx == "adam" else (0.9, 1.0) if tx == "momentum" else (0, 1)
        local = [decay * m + gain * g for g in own]
        unit = v_hat.sqrt() if begun and tx == "adam" else torch.ones_like(p)
        shares = [torch.where(unit > 0, x / unit, 0.0) for x in local]
        m = phases.mean(shares) * unit if begun and momentum else torch.stack(local).mean(0)
        if tx == "adam":
            if not begun:
                v = 0.999 * v + 0.001 * torch.stack(own).mean(0) ** 2
                v_hat = v / (1 - 0.999**t)
            u = m / (1 - 0.9**t) / (v_hat.sqrt() + 1e-8)
            most = 0.1 / (0.001 * (1 - 0.81 / 0.999)) ** 0.5 if begun else torch.inf
            p = p - 0.02 * torch.where(v_hat > 0, u.clamp(-most, most), 0.0)
        else:
            p = p - 0.02 * m
        seen.append(p)
    return seen


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), pairs(["adam", "momentum", "sgd"], STAGES, (2, 3, 4))
)
def test_it_is_the_published_algorithm(name: str, stage: int, ranks: int) -> None:
    tx = {"adam": optim.adam(0.02), "momentum": optim.sgd(0.02, 0.9), "sgd": optim.sgd(0.02)}[name]
    layout = layout_of(ranks)

    def body() -> list[Tensor]:
        step = zf.compress_grads(zf.shard(zf.train_step(one_loss, tx), stage=stage), freeze_step=3)
        state, seen = step.place(zf.TrainState.create(one(), tx)), []
        for i in range(9):
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            seen.append(flat(layout, zf.full(state.params)))
        return seen

    expected = simulated(ranks, stage, name, 9, 3)
    for seen in zf.simulate(ranks)(body)():
        for got, want in zip(seen, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
def test_second_moments_stay_what_they_were_after_correction(stage: int) -> None:
    def body() -> list[Any]:
        step = wrapped(STACK, ADAMW, stage, 3)
        state, seen = step.place(STACK.state(ADAMW, F64)), []
        for i in range(7):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
            corrected = tree.map(lambda v, i=i: v / (1 - 0.999 ** (i + 1)), state.opt_state.nu)
            seen.append(zf.full(corrected))
        return seen

    seen = zf.simulate(2)(body)()[0]
    for later in seen[3:]:
        assert_near(later, seen[2], 1e-12)
    assert not torch.equal(seen[1]["head"]["w"], seen[2]["head"]["w"])


@pytest.mark.parametrize("stage", STAGES)
def test_trust_ratios_are_running_means_once_frozen(stage: int) -> None:
    """Each leaf's is the mean over all steps so far, the latest weighing most."""
    tx, freeze = optim.lamb(0.02), 3

    def body() -> list[Any]:
        step, seen = wrapped(STACK, tx, stage, freeze), []
        state = step.place(STACK.state(tx, F64))
        for i in range(6):
            old = zf.full(state.params)
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
            seen.append((old, zf.full(state)))
        return seen

    seen = zf.simulate(2)(body)()[0]
    means = []
    for t, (old, after) in enumerate(seen, start=1):
        m, v = tree.leaves(after.opt_state.mu), tree.leaves(after.opt_state.nu)
        ratios, steps = [], []
        for p, m_, v_ in zip(tree.leaves(old), m, v, strict=True):
            u = torch.where(v_ > 0, m_ / (1 - 0.9**t) / ((v_ / (1 - 0.999**t)).sqrt() + 1e-6), 0.0)
            both = p.norm() * u.norm() > 0
            ratios.append(p.norm() / u.norm() if both else torch.ones((), dtype=F64))
            steps.append(u)
        means.append(torch.stack(ratios))
        weights = torch.tensor([0.9 ** (t - 1 - k) for k in range(t)], dtype=F64)
        mean = (torch.stack(means) * weights[:, None]).sum(0) / weights.sum()
        used = torch.stack(ratios) if t <= freeze else mean
        torch.testing.assert_close(after.opt_state.ratio[0].double(), mean, rtol=1e-6, atol=0)
        for p, q, r, u in zip(
            tree.leaves(old), tree.leaves(after.params), used, steps, strict=True
        ):
            torch.testing.assert_close(q, p - 0.02 * r * u, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_lamb_sends_momentum_in_units_of_second_moments(ranks: int) -> None:
    """Literally: two phases of ``m / sqrt(v)``, roots of a root mean square of 1."""
    tx, freeze = optim.lamb(0.02, weight_decay=0.0), 3
    layout = layout_of(ranks)
    cuts = dense_of(layout, 0).cuts

    def body() -> Any:
        step = zf.compress_grads(zf.shard(zf.train_step(one_loss, tx), stage=0), freeze_step=freeze)
        state, seen = step.place(zf.TrainState.create(one(), tx)), []
        for i in range(7):
            before = [flat(layout, zf.full(x)) for x in (state.params, *state.opt_state[1:3])]
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            seen.append((before, flat(layout, zf.full(state.opt_state.mu))))
        return seen

    phases = TwoPhases(cuts)
    for i, ((p, m, v), after) in enumerate(zf.simulate(ranks)(body)()[0]):
        own = [0.9 * m + 0.1 * gradient(layout, p, i, ranks, r) for r in range(ranks)]
        want = torch.stack(own).mean(0)
        if i >= freeze:
            size = v.sqrt() / (v.sqrt().norm() / len(v) ** 0.5)
            want = phases.mean([torch.where(size > 0, x / size, 0.0) for x in own]) * size
        torch.testing.assert_close(after, want, rtol=1e-9, atol=1e-12)


def test_a_parameter_that_never_had_a_gradient_stays() -> None:
    """Its second moment is zero, and one bit would push it about without end."""
    rows = torch.tensor([0, 2, 3])  # of the table's five

    def loss(params: Any, batch: Any) -> Tensor:
        return ((params["table"][rows] - batch["x"][:3, :4]) ** 2).sum() * params["gain"]

    params = {"table": numbers((5, 4), 1), "gain": torch.ones((), dtype=F64)}
    tx = optim.adam(0.01)
    for stage in STAGES:

        def body(stage: int = stage) -> Any:
            step = zf.shard(zf.train_step(loss, tx), stage=stage)
            step = zf.compress_grads(step, freeze_step=2)
            state = step.place(zf.TrainState.create(params, tx))
            for i in range(8):
                state, _ = step(state, regression(10 * i + zf.rank(), F64))
            return zf.full(state.params)["table"]

        table = zf.simulate(2)(body)()[0]
        assert torch.equal(table[[1, 4]], params["table"][[1, 4]])
        assert not bool((table[rows] == params["table"][rows]).any())


# What is sent


@pytest.mark.parametrize(("stage", "ranks"), each(STAGES, [1, 2, 3, 4]))
def test_what_is_sent_is_what_it_says(stage: int, ranks: int) -> None:
    def body() -> Any:
        step = wrapped(STACK, ADAMW, stage, 2)
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(4):
            with zf.comm.ledger() as led:
                state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
            assert step.describe().sent_bytes == led.total_bytes
        step.place(step.unplace(state))  # now describe knows a state that compresses from here
        foreseen = step.describe(zf.local_batch(STACK.batch(0, F64)))
        payload = sum(n for label, n in led.by_label.items() if label.startswith("compress"))
        assert foreseen.sent_bytes == led.total_bytes
        return payload, str(foreseen), led.by_label

    for sent, text, labels in zf.simulate(ranks)(body)():
        assert f"compressed gradients {sent}" in text or ranks == 1
        assert not any(label.startswith("reduce") for label in labels) or ranks == 1


def wide(dtype: torch.dtype) -> Any:
    layers = [{"w": numbers((64, 64), i, dtype, 0.1)} for i in range(4)]
    return {"blocks": zf.Layers(layers), "head": numbers((64, 32), 9, dtype)}


def wide_loss(params: Any, x: Tensor) -> Tensor:
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["blocks"], x)
    return (x @ params["head"]).square().mean()


@pytest.mark.parametrize("stage", [0, 2])
def test_it_is_thirty_times_less(stage: int) -> None:
    """Of float32, per phase: n/8 (N-1)/N bytes, and a scale for each 2,048."""
    count = 4 * 64 * 64 + 64 * 32

    def body() -> list[int]:
        step = zf.compress_grads(
            zf.shard(zf.train_step(wide_loss, ADAMW), stage=stage), freeze_step=1
        )
        state, sent = step.place(zf.TrainState.create(wide(torch.float32), ADAMW)), []
        for i in range(2):
            with zf.comm.ledger() as led:
                state, _ = step(state, numbers((4, 64), 10 * i + zf.rank(), torch.float32))
            labels = led.by_label.items()
            sent.append(sum(n for k, n in labels if k.split()[0] in ("reduce", "compress")))
        return sent

    for dense, compressed in zf.simulate(2)(body)():
        phases = 2 if stage == 0 else 1
        scales = 4 * -(-count // 2 // 2048) * 1.4  # parts of units end in shorter groups
        assert phases * count / 16 <= compressed <= phases * (count / 16 + scales)
        assert dense >= 29 * compressed
