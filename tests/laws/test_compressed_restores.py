"""Saved in the compression phase, restored under another stage, method, unit size and world.

Errors go along where they mean the same there (gradients' to gradients'), and are dropped where
they do not; everything else is bitwise what was saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, train
from tests.laws.models import CASES
from zfunc import tree

F64 = torch.float64
STACK = CASES["stack"]
MOMENTUM = ("onebit", 0)  # what is compressed there, and nowhere else
WAYS = [MOMENTUM, ("onebit", 2), ("onebit", 3), ("int8", 0), ("int4", 3), ("powersgd", 1)]
# Momentum from and to all others, and each of the others from one.
PAIRS = [
    (here, there)
    for i, here in enumerate(WAYS)
    for there in WAYS
    if MOMENTUM in (here, there) or there == WAYS[i - 1]
]


def placed(method: str, stage: int, unit_bytes: int = 600) -> tuple[Any, Any]:
    step = zf.shard(STACK.step(ADAMW), stage=stage, unit_bytes=unit_bytes)
    step = zf.compress_grads(step, method=method, freeze_step=2)
    return step, step.place(STACK.state(ADAMW, F64))


def saved(method: str, stage: int, path: Path) -> Any:
    """The full state after five steps on two ranks, the last three of them compressed."""

    def body() -> Any:
        step, state = placed(method, stage)
        _, state = train(step, state, STACK, 5)
        zf.save(path, state, step=5)
        return step.unplace(state)

    return zf.simulate(2)(body)()[0]


def size_of(errors: Any) -> float:
    return sum(float(x.abs().sum()) for x in tree.leaves(errors))


@pytest.mark.parametrize(("here", "there"), PAIRS, ids=str)
def test_any_stage_and_method_restores_any_other(here: Any, there: Any, tmp_path: Path) -> None:
    full = saved(*there, tmp_path)

    def go_on() -> Any:
        step, state = placed(*here, unit_bytes=1 << 20)
        state = zf.restore(tmp_path, state)
        back = step.unplace(state)
        again, _ = step(state, zf.local_batch(STACK.batch(5, F64)))
        return back, step.unplace(again), step.unplace(step.place(back))

    for ranks in (2, 3):
        for back, after, again in zf.simulate(ranks)(go_on)():
            assert_same((back.params, back.opt_state), (full.params, full.opt_state))
            assert all(bool(x.isfinite().all()) for x in tree.leaves(after.params))
            assert int(after.aux["compress_grads"]["skipped"]) == 0
            alike = (here == MOMENTUM) == (there == MOMENTUM)
            errors = again.aux["compress_grads"]["worker"]  # as this step takes them up
            assert (size_of(errors) > 0) == alike
            if alike and ranks == 2:
                assert_same(errors, full.aux["compress_grads"]["worker"])


def test_errors_of_other_sizes_are_not_used(tmp_path: Path) -> None:
    """The first step after it is that of a state that carries none."""
    full = saved("onebit", 0, tmp_path)

    def go_on(empty: bool) -> Any:
        step, state = placed("onebit", 2)
        if empty:
            bare = {k: v for k, v in full.aux.items() if k != "compress_grads"}
            state = step.place(full.replace(aux=bare))
        else:
            state = zf.restore(tmp_path, state)
        state, _ = step(state, zf.local_batch(STACK.batch(5, F64)))
        return step.unplace(state).params

    assert_same(zf.simulate(2)(go_on)(False), zf.simulate(2)(go_on)(True))


def test_low_rank_bases_of_another_rank_begin_anew(tmp_path: Path) -> None:
    def body(rank: int, saving: bool) -> Any:
        step = zf.shard(STACK.step(ADAMW), stage=0)
        step = zf.compress_grads(step, method="powersgd", rank=rank)
        state = step.place(STACK.state(ADAMW, F64))
        start = state.aux["compress_grads"]["bases"]
        if saving:
            _, state = train(step, state, STACK, 3)
            zf.save(tmp_path, state, step=3)
        else:
            state = zf.restore(tmp_path, state)
            assert_same(state.aux["compress_grads"]["bases"], start)
        return step.unplace(state)

    full = zf.simulate(2)(body)(1, True)[0]
    assert tree.leaves(full.aux["compress_grads"]["bases"])
    back = zf.simulate(2)(body)(2, False)[0]
    assert_same((back.params, back.opt_state), (full.params, full.opt_state))


def test_what_0_1_adam_carries_is_no_mere_error(tmp_path: Path) -> None:
    saved("onebit", 0, tmp_path)
    with pytest.raises(zf.CheckpointError, match=r"Only in this state: .*zero_one"):
        zf.simulate(2)(lambda: zf.restore(tmp_path, placed("zero_one", 0)[1]))()
