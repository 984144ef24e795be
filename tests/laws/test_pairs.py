"""Pairs and more of ``precision``, ``remat``, ``accumulate``, ``donate`` and ``shard``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, Case, assert_same, regression, train, trained
from tests.laws.covering import each
from tests.laws.models import block, mean_square, stack
from zfunc import optim, tree

F32, BF16 = torch.float32, torch.bfloat16

WRAPS: dict[str, Callable[[Any], Any]] = {
    "precision": lambda f: zf.precision(f, loss_scale="dynamic"),
    "remat": zf.remat,
    "accumulate": lambda f: zf.accumulate(f, 3),
    "donate": zf.donate,
}
NUMERIC = {"precision", "accumulate"}  # the others change no bit
SETS = [
    names
    for k in range(1, len(WRAPS) + 1)
    for names in itertools.combinations(sorted(WRAPS), k)
    if k > 1 or names[0] not in NUMERIC  # those have laws of their own
]


def noisy_loss(params: Any, batch: Any) -> zf.Mean:
    """Dropout in layers, an aux, and an exact mean."""

    def noisy(p: Any, x: Tensor) -> Tensor:
        return F.dropout(block(p, x), 0.1)

    x = zf.scan(noisy, params["blocks"], block(params["first"], batch["x"]))
    error = (x @ params["head"]["w"] - batch["y"]).square()
    kept = batch["x"][:, :1] > -1.0
    return zf.Mean((error * kept).sum(), kept.sum())


CASE = trained(
    lambda t: stack(t, layers=4), noisy_loss, batch=lambda i, t: regression(i, t, rows=36)
)


def run(names: tuple[str, ...], stage: int | None, ranks: int, steps: int = 2) -> Any:
    full = CASE.state(ADAMW, F32)

    def body() -> Any:
        step = CASE.step(ADAMW)
        for name in names:
            step = WRAPS[name](step)
        step = step if stage is None else zf.shard(step, stage=stage, unit_bytes=600)
        assert_same(step.unplace(step.place(full)), full)
        metrics, state = train(step, step.place(full), CASE, steps, F32)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


_RUNS: dict[Any, Any] = {}


def expected(names: tuple[str, ...], stage: int | None, ranks: int) -> Any:
    """The run of those among the transforms that change numbers."""
    key = (tuple(name for name in names if name in NUMERIC), stage, ranks)
    if key not in _RUNS:
        _RUNS[key] = run(*key)
    return _RUNS[key]


@pytest.mark.parametrize(
    ("names", "stage", "order"), each(SETS, (None, 0, 1, 2, 3), (1, -1), times=2), ids=str
)
def test_what_changes_no_number_changes_none_in_company(
    names: tuple[str, ...], stage: int | None, order: int
) -> None:
    """``remat`` and ``donate`` beside any others; and every order of wrapping is the same step."""
    ranks = 1 if stage is None else 3 if len(names) == len(WRAPS) else 2
    numeric = tuple(name for name in names if name in NUMERIC)
    mine = names[::order] if names != numeric else names[::-1]
    assert_same(run(mine, stage, ranks), expected(names, stage, ranks))


@pytest.mark.parametrize(("stage", "ranks"), each([0, 1, 2, 3], [2, 3, 4]))
def test_all_of_them_on_many_ranks(stage: int, ranks: int) -> None:
    """Every rank ends in the same bits, near the run of stage 0 without remat and donate.

    Losses differ by bf16's rounding alone, though ranks drop out different elements: so
    the comparison is with the same world at another stage.
    """
    every = tuple(sorted(WRAPS))
    runs = run(every, stage, ranks)
    for other in runs:
        assert_same(other, runs[0])
    losses = [float(m["loss"]) for m in runs[0][0]]
    near = [float(m["loss"]) for m in expected(every, 0, ranks)[0][0]]
    assert losses == pytest.approx(near, rel=2**-6)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_precision_and_accumulate_are_the_plain_loop(stage: int | None) -> None:
    """Microbatches in 16 bits, their gradients summed in fp32: bitwise on one rank."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"].to(params["first"]["w"].dtype)
        x = zf.scan(block, params["blocks"], block(params["first"], x))
        return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])

    case = trained(stack, loss)
    state = case.state(ADAMW, F32)
    for i in range(3):
        total = None
        for k in range(4):
            batch = tree.map(lambda x, k=k: x[3 * k : 3 * k + 3], case.batch(i, F32))
            low = tree.map(lambda p: p.to(BF16).requires_grad_(), state.params)
            found = torch.autograd.grad(loss(low, batch) * 0.25, tree.leaves(low))
            grads = [g.float() for g in found]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        by_path = dict(zip(tree.paths(state.params), total or [], strict=True))
        mean = tree.map_with_path(lambda path, p, by=by_path: by[path], state.params)
        updates, opt_state = ADAMW.update(mean, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    def body() -> Any:
        step = zf.remat(zf.accumulate(zf.donate(zf.precision(case.step(ADAMW))), 4))
        step = step if stage is None else zf.shard(step, stage=stage)
        _, placed = train(step, step.place(case.state(ADAMW, F32)), case, 3, F32)
        return step.unplace(placed)

    assert_same(zf.simulate(1)(body)()[0], state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_describe_says_what_is_sent(stage: int) -> None:
    """Of a batch before a first step, and after it, on each rank."""
    ranks, names = 3, tuple(sorted(WRAPS))

    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"] @ params["first"]["w"] + params["first"]["b"]
        x = zf.scan(block, params["blocks"], x)
        return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])

    case: Case = trained(stack, loss, batch=lambda i, t: regression(i, t, rows=9))

    def body() -> None:
        step = case.step(ADAMW)
        for name in names:
            step = WRAPS[name](step)
        step = zf.shard(step, stage=stage, unit_bytes=600)
        state = step.place(case.state(ADAMW, F32))
        held = step.describe(case.batch(0, F32))
        assert held.state_bytes == tree.size_bytes(state)
        for name in names:
            assert f"{name}" in held
        for i in range(3):
            with zf.comm.ledger() as led:
                state, _ = step(state, case.batch(i, F32))
        assert held.sent_bytes == led.total_bytes
        assert f"{held.flops} FLOPs; at most {held.peak_bytes} bytes" in held
        assert step.describe().sent_bytes == led.total_bytes

    zf.simulate(ranks)(body)()


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_step_of_all_is_pure(stage: int | None) -> None:
    """Twice the same call gives the same bits, and leaves its input as it was."""
    names = ("accumulate", "precision", "remat")

    def body() -> None:
        step = CASE.step(ADAMW)
        for name in names:
            step = WRAPS[name](step)
        step = step if stage is None else zf.shard(step, stage=stage)
        batch = zf.local_batch(CASE.batch(0, F32))
        state, _ = step(step.place(CASE.state(ADAMW, F32)), batch)
        kept = [x.clone() for x in tree.leaves(state) if isinstance(x, Tensor)]
        first, second = step(state, batch), step(state, batch)
        assert_same(step.unplace(first[0]), step.unplace(second[0]))
        assert_same(first[1], second[1])
        held = [x for x in tree.leaves(state) if isinstance(x, Tensor)]
        assert all(torch.equal(x, y) for x, y in zip(held, kept, strict=True))

    zf.simulate(1 if stage is None else 2)(body)()


def uses(step: Any) -> dict[str, Callable[[Any], Any]]:
    return {
        "step": lambda s: step(s, zf.local_batch(CASE.batch(0, F32))),
        "unplace": step.unplace,
        "full": zf.full,
        "map": lambda s: tree.map(lambda p: p + 1, s.params),
        "optimizer": lambda s: tree.map(lambda p: p + 1, s.opt_state),
    }


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_donated_state_is_spent_and_its_memory_lives_on(stage: int | None) -> None:
    def body() -> None:
        step = CASE.step(ADAMW)
        for name in WRAPS:
            step = WRAPS[name](step)
        step = step if stage is None else zf.shard(step, stage=stage)
        old = step.place(CASE.state(ADAMW, F32))

        def memory(state: Any) -> set[int]:
            held = tree.leaves((state.params, state.opt_state))
            return {x.untyped_storage().data_ptr() for x in held if x.numel() > 1}

        before = memory(old)
        new, _ = step(old, zf.local_batch(CASE.batch(0, F32)))
        assert memory(new) == before
        for use in uses(step).values():
            with pytest.raises(zf.DonatedStateError):
                use(old)
        step(new, zf.local_batch(CASE.batch(1, F32)))

    zf.simulate(1 if stage is None else 2)(body)()
