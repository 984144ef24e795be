"""LAMB of a tree that is cut over ranks takes the kernels, and steps as it does without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import Case, train
from tests.laws.models import CASES
from zfunc import kernels, optim, tree
from zfunc.kernels import lamb_triton
from zfunc.optim.updates import Moved

F32 = torch.float32
STEPS = 2


def lamb() -> Any:
    """Two rates of decay in one buffer, and gradients that are clipped on the way."""
    tx = optim.lamb(0.05, weight_decay=0.1, mask=lambda path: path != "head.b")
    return optim.chain(optim.clip_by_global_norm(0.5), tx)


def trained(case: Case, stage: int, ranks: int, route: Any, donated: bool = False) -> list[Any]:
    def body() -> Any:
        step = zf.shard(case.step(lamb()), stage=stage, unit_bytes=1 << 26 if ranks == 2 else 300)
        step = zf.donate(step) if donated else step
        with kernels.use(route):
            metrics, state = train(step, step.place(case.state(lamb(), F32)), case, STEPS, F32)
            return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()


def assert_alike(found: Any, expected: Any) -> None:
    pairs = zip(tree.leaves(found), tree.leaves(expected), strict=True)
    for x, y in pairs:
        if isinstance(x, Tensor) and x.is_floating_point():
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)
        elif isinstance(x, Tensor):
            assert torch.equal(x, y)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments each launch had; ranks are threads, of which one interprets at a time."""
    found: list[int] = []
    turn = threading.Lock()

    def noting(launch: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **how: Any) -> None:
            with turn:
                found.append(len(how["step"].starts))
                launch(*args, **how)

        return noted

    for name in ("lamb_moments", "lamb_apply"):
        monkeypatch.setattr(lamb_triton, name, noting(getattr(lamb_triton, name)))
    return found


# On four ranks most have nothing of the tiny leaves, some nothing at all.
@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [("stack", 1, 3), ("stack", 2, 2), ("stack", 3, 3), ("frozen", 2, 3), ("tiny leaves", 3, 4)],
)
def test_a_training_is_the_same(name: str, stage: int, ranks: int, launched: list[int]) -> None:
    case = CASES[name]
    expected = trained(case, stage, 1, "torch")[0]
    assert not launched
    runs = trained(case, stage, ranks, "triton", donated=stage == 2)
    assert launched and (ranks > 2 or max(launched) > 1)
    for run in runs:
        assert_alike(run, expected)
        assert_alike(run, runs[0])


def test_one_collective_between_the_passes() -> None:
    case = CASES["stack"]

    def body(route: Any) -> int:
        step = zf.shard(case.step(lamb()), stage=3)
        state = step.place(case.state(lamb(), F32))
        with kernels.use(route), zf.comm.ledger() as led:
            train(step, state, case, 1, F32)
        return led.calls_by_label["sums of leaves"]

    plain, fused = (zf.simulate(2)(body)(route)[0] for route in ("torch", "triton"))
    assert plain - fused == 1


def test_updates_can_be_told_afterwards() -> None:
    """Also where parameters are whole and moments are cut."""
    case = CASES["stack"]

    def body() -> Any:
        step = zf.shard(case.step(lamb()), stage=1)
        state = step.place(case.state(lamb(), F32))
        tx = optim.lamb(0.05, weight_decay=0.1)
        placed = state.opt_state[1]
        grads = tree.map(lambda m: torch.linspace(-1, 1, m.numel()), placed.mu)
        expected, _ = tx.update(grads, placed, state.params)
        with kernels.use("triton"):
            updates, _ = tx.update(grads, placed, state.params)
        assert isinstance(updates, Moved)
        for x, y in zip(tree.leaves(updates.force()), tree.leaves(expected), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)

    zf.simulate(2)(body)()


def test_second_moments_that_kernels_made_are_looked_at_before_they_freeze(
    launched: list[int],
) -> None:
    """Under ``compress_grads(freeze_step="auto")``: two windows of them at least."""
    case = CASES["stack"]

    def body() -> list[bool]:
        step = zf.compress_grads(zf.shard(case.step(lamb()), stage=0))
        state, frozen = step.place(case.state(lamb(), F32)), []
        with kernels.use("triton"):
            for i in range(2):
                state, _ = step(state, zf.local_batch(case.batch(i, F32)))
                frozen.append(bool(state.aux["compress_grads"]["frozen"]))
        return frozen

    assert zf.simulate(2)(body)() == [[False, False]] * 2
    assert launched
