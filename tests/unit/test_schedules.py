"""Schedules: exact values, at and beyond their boundaries too."""

from __future__ import annotations

import math

import pytest
import torch

from zfunc import optim

WARMUP = optim.warmup_cosine(2.0, warmup=4, steps=12, end=0.5, start=1.0)
CYCLE = optim.one_cycle(3.0, steps=20, warmup=0.25, start=0.1, end=0.01)
VALUES = [
    (optim.constant(0.3), {0: 0.3, 10**9: 0.3}),
    (optim.linear(1.0, 3.0, 8), {0: 1.0, 1: 1.25, 4: 2.0, 8: 3.0, 9: 3.0, 10**9: 3.0}),
    (optim.linear(0.0, 0.1, 10), {0: 0.0, 5: 0.05, 10: 0.1}),
    (optim.cosine(2.0, 6), {0: 2.0, 2: 1.5, 3: 1.0, 4: 0.5, 6: 0.0, 7: 0.0}),
    (optim.cosine(2.0, 6, end=1.0), {0: 2.0, 3: 1.5, 6: 1.0, 60: 1.0}),
    (WARMUP, {0: 1.0, 1: 1.25, 3: 1.75, 4: 2.0, 8: 1.25, 12: 0.5, 13: 0.5}),
    (optim.warmup_cosine(2.0, warmup=0, steps=4), {0: 2.0, 2: 1.0, 4: 0.0}),
    (CYCLE, {0: 0.3, 5: 3.0, 20: 0.03, 99: 0.03, 10: 0.03 + (3 - 0.03) * 0.75}),
]


@pytest.mark.parametrize(("schedule", "values"), VALUES)
def test_values(schedule, values):
    for count, value in values.items():
        found = schedule(count)
        assert found.shape == ()
        assert found.item() == pytest.approx(value, rel=1e-14, abs=1e-16), count
        assert torch.equal(schedule(torch.tensor(count)), found)


@pytest.mark.parametrize("schedule", [WARMUP, CYCLE, optim.cosine(2.0, 6, end=1.0)])
def test_ends_are_exact(schedule):
    assert schedule(100).item() == schedule(10**12).item()
    assert WARMUP(12).item() == 0.5
    assert WARMUP(4).item() == 2.0
    assert CYCLE(5).item() == 3.0


def test_against_torch():
    weight = torch.nn.Parameter(torch.zeros(()))
    theirs = torch.optim.SGD([weight], lr=0.7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=9, eta_min=0.1)
    ours = optim.cosine(0.7, 9, end=0.1)
    for count in range(10):
        assert ours(count).item() == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        theirs.step()
        scheduler.step()


def test_the_first_update_sees_count_zero():
    tx = optim.sgd(optim.linear(1.0, 0.0, 4))
    state = tx.init(torch.zeros(1))
    seen = []
    for _ in range(5):
        updates, state = tx.update(torch.ones(1), state)
        seen.append(-updates.item())
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert state.count.item() == 5


def test_a_schedule_takes_a_count_that_is_compiled_or_batched():
    counts = torch.arange(14)
    batched = torch.func.vmap(WARMUP)(counts)
    assert batched.tolist() == [WARMUP(int(count)).item() for count in counts]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.linear(0.0, 1.0, 0),
        lambda: optim.cosine(1.0, -1),
        lambda: optim.warmup_cosine(1.0, warmup=5, steps=5),
        lambda: optim.one_cycle(1.0, 3, warmup=0.1),
        lambda: optim.one_cycle(1.0, 3, warmup=1.0),
    ],
)
def test_no_room_for_a_schedule(make):
    with pytest.raises(ValueError, match="at least one step"):
        make()


def test_scale_by_schedule():
    tx = optim.chain(optim.scale_by_schedule(optim.linear(1.0, 0.0, 2)), optim.sgd(1.0))
    params = {"w": torch.zeros(2), "frozen": None}
    state = tx.init(params)
    grads = {"w": torch.ones(2), "frozen": None}
    for factor in (1.0, 0.5, 0.0):
        updates, state = tx.update(grads, state, params)
        assert updates["w"].tolist() == [-factor, -factor]
        assert updates["frozen"] is None


def test_halfway_up_the_cycle_is_halfway():
    cycle = optim.one_cycle(2.0, steps=8, warmup=0.5, start=0.5, end=0.5)
    assert cycle(2).item() == pytest.approx(1.5)
    assert cycle(1).item() == pytest.approx(1 + (1 - math.cos(math.pi / 4)) / 2)
