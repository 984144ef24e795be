"""Numbers of a device are not asked for: counted by the operators that read them."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.residual import batch, errors, params, uneven
from tests.unit.operators import Operators
from zfunc import optim
from zfunc.buffers.readings import Reading, number, on_host, sent
from zfunc.engine import context
from zfunc.engine.entries import Entries
from zfunc.transforms.accumulation import times
from zfunc.transforms.mixed_precision.masters import Masters
from zfunc.trees import memory
from zfunc.trees.withheld import Withheld

# Whose results the host waits for.
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
SGD = optim.sgd(1e-2, momentum=0.9)


F16 = {"compute": torch.float16, "loss_scale": "dynamic"}
WRAPS: dict[str, Any] = {
    "plain": lambda f: f,
    "bf16": zf.precision,
    "fp16": lambda f: zf.precision(f, **F16),
    "remat": zf.remat,
    "accumulate": lambda f: zf.accumulate(f, 2),
    "dropped": lambda f: zf.drop_layers(f, gamma=0.5),
    "low bits": lambda f: zf.quantize(f, start_bits=8, target_bits=5, period=1),
    "stochastic": lambda f: zf.quantize(
        f, start_bits=8, target_bits=5, period=1, rounding="stochastic", symmetric=False
    ),
}


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("stage", range(4))
def test_a_steady_step_reads_no_number(stage: int, name: str) -> None:
    loss = uneven if stage % 2 else lambda p, b: errors(p, b).mean()

    def body() -> Counter[str]:
        step = WRAPS[name](zf.shard(zf.train_step(loss, SGD), stage=stage, unit_bytes=600))
        state = step.place(zf.TrainState.create(params(layers=2), SGD))
        for i in range(2):
            state, _ = step(state, zf.local_batch(batch(i)))
        with Operators(READS) as reads:
            step(state, zf.local_batch(batch(2)))
        return reads.counts

    for ranks in (1, 2):
        assert zf.simulate(ranks)(body)() == [Counter()] * ranks


def test_buffers_that_a_call_leaves_alone_stay_what_they_are() -> None:
    """Where 16-bit copies went in: bit by bit, and nobody looks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            for name in ("kept", "again", "written", "grown"):
                self.register_buffer(name, torch.full((3,), 1.1))

        def forward(self, x: Tensor) -> Tensor:
            self.again = self.again * 1
            self.written += 1
            self.grown = torch.cat([self.grown, self.grown])
            return x * self.w * self.kept

    model = zf.functionalize(Net())
    seen: dict[str, Any] = {}

    def loss(p: Any, x: Tensor, buffers: Any) -> Any:
        with Operators(READS) as reads:
            out, new = model.apply(p, x, buffers=buffers, mutable=True)
        seen["reads"] = reads.counts
        return out.float().sum(), new

    def body(state: Any, x: Tensor) -> Any:
        run = zf.value_and_grad(loss, has_aux=True)
        (_, new), _ = run(state.params, x, state.buffers)
        return state, {"new": new}

    step = zf.precision(body)
    state = step.place(zf.TrainState.create(model.params, SGD, buffers=model.buffers))
    new = step(state, torch.ones(3))[1]["new"]
    assert seen["reads"] == Counter() and {x.dtype for x in new.values()} == {torch.float32}
    for name in ("kept", "again"):
        assert torch.equal(new[name], model.buffers[name])
    assert torch.equal(new["written"], (model.buffers["written"].bfloat16() + 1).float())
    assert new["grown"].shape == (6,)


def test_numbers_of_the_host() -> None:
    assert (number(torch.tensor(3)), number(2.5), number(True)) == (3, 2.5, True)
    assert number(torch.tensor(3).as_subclass(nn.Parameter)) == 3
    like = torch.zeros(2, dtype=torch.float64)
    for value in (2, 2.0, torch.tensor(2), torch.tensor(2.0, requires_grad=True)):
        there = sent(value, like)
        assert there.dtype == torch.float64 and there.shape == () and not there.requires_grad
        assert torch.equal(there, torch.tensor(2.0, dtype=torch.float64))
    assert sent(7, like, torch.float32).dtype == torch.float32
    reading = Reading(torch.tensor([0.5, 1.0]))
    assert reading.known and reading.wait() == reading.wait() == [0.5, 1.0]
    assert Reading(torch.tensor(4)).wait() == 4 and on_host(like)


def test_a_factor_of_the_device_multiplies_as_a_number_does() -> None:
    """In float32 and float64 bitwise, in 16 bits with one rounding; a 0-d leaf keeps its dtype."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((257,), ()):
            g = zf.random.normal(zf.random.key(1), shape, torch.float64).to(dtype)
            for factor in (1.0, 1 / 3, 7.1):
                want = times(g, factor)
                got = times(g.clone(), torch.tensor(factor, dtype=torch.float64))
                assert got.dtype == dtype and torch.equal(got, want), (dtype, factor)


def test_memory_is_withheld_until_it_is_known_whether_the_step_counts() -> None:
    asked: list[int] = []
    x, y = torch.ones(3), torch.ones(2)
    given = memory.Donation.of([x, y])
    running = context.Context()
    running.donation = Withheld.until(given, lambda: bool(asked.append(1)) or len(asked) > 1)
    token = context.push(running)
    try:
        kept = memory.reuse(x)
        assert asked == [1] and kept.data_ptr() != x.data_ptr() and len(x) == 3
        mine = memory.reuse(y)
        assert asked == [1, 1] and len(mine) == 2
    finally:
        context.pop(token)
    assert x.numel() == 3 and y.numel() == 0


def held(bad: bool, old: Any, new: Any, ours: Any = ("params",)) -> Any:
    """What a device makes of ``new`` that knows whether there was an overflow."""
    masters = Masters(state=old, masters={}, lows={}, scale=torch.tensor(1.0))
    masters.unseen = torch.tensor(bad)
    entries = Entries(new)
    masters.hold(entries, ("step",), ours)
    return entries.rebuild()


@pytest.mark.parametrize("bad", [True, False])
def test_a_device_takes_the_old_state_after_an_overflow(bad: bool) -> None:
    """Memory that the old state, somebody else or another leaf has is not written."""
    with torch.no_grad():
        shared, foreign = torch.full((2,), 5.0), torch.full((2,), 6.0)
        a, b, c = (torch.full((2,), float(i)) for i in range(3))
        old = {"params": {"a": a, "b": b, "c": c, "n": 1}, "ema": {"a": a}, "step": torch.tensor(0)}
        new = {
            "params": {"a": shared, "b": shared, "c": b, "n": 2},
            "ema": {"a": foreign},
            "step": torch.tensor(1),
        }
        out = held(bad, old, new)
        want = old if bad else new
        for name in "abc":
            found = {"a": 5.0, "b": 5.0, "c": 1.0} if not bad else {"a": 0.0, "b": 1.0, "c": 2.0}
            assert out["params"][name].tolist() == [found[name]] * 2
        assert out["ema"]["a"].tolist() == want["ema"]["a"].tolist()
        assert foreign.tolist() == [6.0] * 2 and [x.tolist()[0] for x in (a, b, c)] == [0, 1, 2]
        assert out["params"]["n"] == 2 and int(out["step"]) == 1
        other = {**new, "params": {"a": shared}}
        assert held(bad, old, other)["params"]["a"] is shared  # another structure: as it is


class Event:
    """Of a device, which knows it for itself: neither copied nor pickled."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle an event")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_reading_on_a_state_is_copied_and_pickled_with_it(again: Any) -> None:
    row, event = torch.tensor(3), Event()
    reading = row.__dict__["_zfunc_reading"] = Reading(row)
    reading._event = event
    assert not reading.known
    found = again(row if again is not copy.copy else reading)
    found = found if again is copy.copy else found.__dict__["_zfunc_reading"]
    assert found.known and found.wait() == 3 and event.waited == 1
