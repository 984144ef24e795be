"""Laws of ``compress_grads(gather=...)``: parameters of ZeRO 1 and 2 as compressed updates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, assert_near, assert_same
from tests.laws.compression import integers, signs
from tests.laws.models import CASES
from zfunc import tree
from zfunc.layout.dense import dense_of

F64 = torch.float64
STACK = CASES["stack"]
SENT: dict[str, Any] = {
    "bf16": lambda c: c.bfloat16().double(),
    "int8": lambda c: integers(c, 256, 127),
    "int4": lambda c: integers(c, 128, 7),
    "onebit": lambda c: signs(c, 2048, "mean"),
}


def made(stage: int, gather: str | None, donated: bool = False, case: Any = STACK) -> Any:
    step = zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600)
    step = zf.compress_grads(step, method="int8", freeze_step=2, gather=gather)
    return zf.donate(step) if donated else step


def flats_of(params: Any) -> list[Tensor]:
    """The dense buffers of placed, plain params."""
    leaves = tree.leaves(params)
    layout = params.layout
    return [
        torch.cat([leaves[slot.index].reshape(-1) for slot in dense_of(layout, i).slots])
        for i in range(len(layout.flats))
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("gather", SENT)
def test_parameters_move_by_what_was_sent(gather: str, ranks: int) -> None:
    """Literally: by the packed sum of the plain update and what earlier ones lacked."""

    def body() -> Any:
        step, plain = made(2, gather), made(2, None)
        state = step.place(STACK.state(ADAMW, F64))
        layout = state.params.layout
        owed = [torch.zeros_like(x) for x in flats_of(state.params)]
        for i in range(6):
            batch, old = zf.local_batch(STACK.batch(i, F64)), flats_of(state.params)
            errors = state.aux["compress_grads"]
            given = state.replace(aux={"compress_grads": {**errors, "updates": {}}})
            exact = flats_of(plain(given, batch)[0].params)
            with zf.comm.ledger() as led:
                state, _ = step(state, batch)
            for k, (was, want) in enumerate(zip(old, exact, strict=True)):
                if i >= 2:
                    moves = want - was + owed[k]
                    cuts = dense_of(layout, k).cuts
                    sent = torch.cat([SENT[gather](moves[a:b]) for a, b in pairwise(cuts)])
                    owed[k], want = moves - sent, was + sent
                got = flats_of(state.params)[k]
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        step.place(step.unplace(state))
        assert step.describe(batch).sent_bytes == led.total_bytes
        return step.unplace(state)

    runs = zf.simulate(ranks)(body)()
    for run in runs:
        assert_same(run, runs[0])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["stack", "tiny leaves", "frozen", "mixed dtypes"])
def test_donated_and_placed_again_it_is_the_same_run(name: str, stage: int) -> None:
    case = CASES[name]

    def body(donated: bool, again: bool) -> Any:
        step = made(stage, "int8", donated, case)
        state = step.place(case.state(ADAMW, F64))
        for i in range(6):
            if again and i == 4:
                state = step.place(step.unplace(state))
            state, _ = step(state, zf.local_batch(case.batch(i, F64)))
        return step.unplace(state)

    straight = zf.simulate(2)(body)(False, False)
    assert_same(straight[0], straight[1])
    assert_same(zf.simulate(2)(body)(True, False), straight)
    assert_same(zf.simulate(2)(body)(False, True), straight)


def test_what_updates_lack_goes_on_elsewhere_and_is_not_touched_by_a_bad_step() -> None:
    def begin() -> Any:
        step = made(2, "onebit")
        state = step.place(STACK.state(ADAMW, F64))
        for i in range(4):
            state, _ = step(state, zf.local_batch(STACK.batch(i, F64)))
        bad = zf.local_batch(STACK.batch(4, F64))
        bad["x"][0, 0] = torch.nan
        after, _ = step(state, bad)
        assert int(after.aux["compress_grads"]["skipped"]) == 1
        assert_same(after.params, state.params)
        for name in ("worker", "updates"):
            assert_same(after.aux["compress_grads"][name], state.aux["compress_grads"][name])
        return step.unplace(state)

    full = zf.simulate(3)(begin)()[0]

    def go_on() -> Any:
        step = made(1, "onebit")
        return step.unplace(step.place(full))

    for after in zf.simulate(2)(go_on)():
        carried, was = after.aux["compress_grads"], full.aux["compress_grads"]
        assert_near(carried["updates"], was["updates"], 0.0)
        assert any(bool(x.any()) for x in tree.leaves(was["updates"]))


def test_what_cannot_be_gathered_so_is_refused() -> None:
    step = STACK.step(ADAMW)
    for stage in (0, 3):
        with pytest.raises(zf.CompositionError, match=f"at ZeRO stage {stage}"):
            zf.compress_grads(zf.shard(step, stage=stage), gather="int8")
    with pytest.raises(zf.CompositionError, match="beside precision"):
        zf.precision(zf.compress_grads(zf.shard(step, stage=2), gather="bf16"))
    with pytest.raises(ValueError, match="gather='int16': None, or 'bf16', 'int8'"):
        zf.compress_grads(step, gather="int16")
