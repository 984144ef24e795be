"""What stages hold at once: as many microbatches as the schedule says, by counted bytes.

Every byte that operations of a rank have made counts: what is saved for backward, gradients that
are kept between the two parts of it, messages. Layers of a GPT on many short texts: their
parameters are next to nothing.
"""

from __future__ import annotations

import dataclasses
import gc
from functools import cache
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.unit.live_bytes import Peak
from zfunc import optim
from zfunc.engine.passes import Pass
from zfunc.language import gpt
from zfunc.layout.pool import WORTHWHILE, pool
from zfunc.schedules import schedule

RANKS, MICROBATCHES = 4, 8
ROWS, LENGTH = 64, 8  # of one microbatch
CONFIG = gpt.GPTConfig(vocab=16, width=16, depth=8, heads=2, tied=False)
NAMES = ("1f1b", "interleaved", "zb", "zbv")
FEW, MANY = 2, 4  # microbatches, between which a share is measured


class Forward(Peak):
    """The most bytes alive while a loss runs: what backward works in is not counted."""

    running = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not Forward.running:
            self.bytes = before
        return result


def loss(params: Any, ids: Tensor) -> Tensor:
    Forward.running = True
    try:
        logits = gpt.apply(params, ids[:, :-1], CONFIG)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    finally:
        Forward.running = False


def peak_of_a_step(name: str, m: int) -> tuple[int, int]:
    """The most bytes alive in a second step: at any time, and while a loss runs."""
    tx = optim.sgd(0.1)
    params = zf.tree.map(lambda x: x.double(), gpt.init(CONFIG, zf.random.key(0)))
    ids = zf.random.randint(zf.random.key(1), 0, CONFIG.vocab, (m * ROWS, LENGTH + 1))
    step = zf.pipeline(zf.train_step(loss, tx), m, schedule=name, pipe=RANKS)
    state = step.place(zf.TrainState.create(params, tx))
    del params
    state, _ = step(state, ids)
    gc.collect()
    with Peak() as peak, Forward() as forward:
        step(state, ids)
    return peak.bytes, forward.bytes


RUNS = [("gpipe", FEW), ("gpipe", MANY), *((name, MICROBATCHES) for name in NAMES)]


def all_peaks() -> list[tuple[int, int]]:
    return [peak_of_a_step(*run) for run in RUNS]


@cache
def peaks(name: str, m: int) -> list[tuple[int, int]]:
    """By rank. They are processes: simulated ones hold what others have not yet taken."""
    return [found[RUNS.index((name, m))] for found in launched()]


@cache
def launched() -> list[list[tuple[int, int]]]:
    return zf.launch(all_peaks, nprocs=RANKS)


def held(name: str) -> list[float]:
    """What each rank holds while a loss runs, in shares: in what one more microbatch takes between
    its forward and its backward, as the schedule shows that does all of the one first."""
    few, many = (peaks("gpipe", m) for m in (FEW, MANY))
    found = []
    for rank, (_, most) in enumerate(peaks(name, MICROBATCHES)):
        share = (many[rank][1] - few[rank][1]) / (MANY - FEW)
        beside = few[rank][1] - FEW * share
        found.append((most - beside) / share)
    return found


STREAM = ROWS * LENGTH * CONFIG.width * 8
MESSAGES = 4 * STREAM  # that have come before they are needed, two from each side


def test_a_share_is_what_layers_save() -> None:
    """Inputs of norms, products and activations: some 16 times the stream, in each layer."""
    layers = CONFIG.depth // RANKS
    for (few, _), (many, _) in zip(peaks("gpipe", FEW), peaks("gpipe", MANY), strict=True):
        assert 12 < (many - few) / (MANY - FEW) / layers / STREAM < 24


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_as_many_shares_as_the_schedule_says(name: str) -> None:
    """Between I and W activations go and gradients come, no more than one share of both. What a
    chunk has sent is its own until its backward, so a share in two chunks is a stream larger."""
    made = schedule(name, RANKS, MICROBATCHES)
    share = (peaks("gpipe", MANY)[0][1] - peaks("gpipe", FEW)[0][1]) / (MANY - FEW)
    larger = 1 + (made.chunks // RANKS - 1) * STREAM / share
    for rank, (shares, planned) in enumerate(zip(held(name), made.in_flight(), strict=True)):
        assert shares <= planned * larger + MESSAGES / share, (name, rank)


def test_the_fullest_rank_of_zbv_is_as_full_as_that_of_1f1b() -> None:
    """At any time: what backward works in counts, too."""
    full = {name: max(most for most, _ in peaks(name, MICROBATCHES)) for name in NAMES}
    assert full["zbv"] <= 1.1 * full["1f1b"]


def passes() -> int:
    """How many there are."""
    return sum(type(x) is Pass for x in gc.get_objects())


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_step_leaves_nothing_to_the_collector_of_cycles(name: str) -> None:
    """It comes by now and then; until then gradients would pile up, step by step."""
    ids = zf.random.randint(zf.random.key(1), 0, CONFIG.vocab, (4, LENGTH + 1))

    def train() -> None:
        tx = optim.sgd(0.1)
        step = zf.pipeline(zf.train_step(loss, tx), 4, schedule=name, pipe=2)
        state = step.place(zf.TrainState.create(gpt.init(CONFIG, zf.random.key(0)), tx))
        for _ in range(2):
            state, _ = step(state, ids)

    zf.simulate(2)(train)()  # a first one sets up what stays
    gc.collect()
    before = passes()
    gc.disable()
    try:
        zf.simulate(2)(train)()
        assert passes() == before
    finally:
        gc.enable()


def test_a_table_has_one_sum_of_its_gradients() -> None:
    """Zeros to which autograd adds those of the first microbatch are the sum of all."""
    config = dataclasses.replace(CONFIG, vocab=WORTHWHILE // (CONFIG.width * 4))
    ids = zf.random.randint(zf.random.key(1), 0, config.vocab, (4, LENGTH + 1))

    def table_loss(params: Any, ids: Tensor) -> Tensor:
        logits = gpt.apply(params, ids[:, :-1], config)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def train() -> int:
        tx = optim.sgd(0.1)
        step = zf.pipeline(zf.train_step(table_loss, tx), 4, pipe=2)
        state = step.place(zf.TrainState.create(gpt.init(config, zf.random.key(0)), tx))
        step(state, ids)
        return len(pool()._buffers.get(WORTHWHILE, ()))

    assert zf.simulate(2)(train)() == [1, 1]  # the table, and the head
