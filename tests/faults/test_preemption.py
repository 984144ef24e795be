"""One rank is asked to stop: all stop at the same step, with a finished save, and none waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, regression
from tests.laws.models import CASES

F64 = torch.float64
STACK = CASES["stack"]
STEPS = 8


def make() -> Any:
    return zf.shard(STACK.step(ADAMW), stage=3, unit_bytes=600)


def after(steps: int) -> Any:
    """The full state after so many steps that nothing interrupted."""
    step = make()
    state = step.place(STACK.state(ADAMW, F64))
    for i in range(steps):
        state, _ = step(state, zf.local_batch(regression(i, F64)))
    return step.unplace(state)


def train(path: Path, at: dict[int, int], how: str, block: bool = True) -> tuple[int, Any]:
    """Steps taken, and the handler afterwards; rank r is asked in step ``at[r]``."""
    step = make()
    state = step.place(STACK.state(ADAMW, F64))
    taken = 0
    with zf.preemption() as stop:
        for i in range(STEPS):
            if at.get(zf.rank()) == i:
                os.kill(os.getpid(), signal.SIGTERM) if how == "signal" else stop.ask()
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            taken = i + 1
            if stop():
                zf.save(path, state, block=block)
                break
    return taken, signal.getsignal(signal.SIGTERM)


def restored(path: Path) -> Any:
    step = make()
    return step.unplace(zf.restore(path, like=step.place(STACK.state(ADAMW, F64))))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("at", [{0: 2}, {1: 2}, {0: 2, 1: 3}, {0: 0, 1: 6}])
def test_simulated_ranks_stop_together(at: dict[int, int], ranks: int, tmp_path: Path) -> None:
    taken = [n for n, _ in zf.simulate(ranks)(train)(tmp_path, at, "ask", block=False)]
    assert taken == [min(at.values()) + 2] * ranks  # a step later
    assert_same(zf.simulate(ranks)(restored)(tmp_path)[0], zf.simulate(ranks)(after)(taken[0])[0])


def test_real_ranks_stop_together_when_one_gets_the_signal(tmp_path: Path) -> None:
    results = zf.launch(train, tmp_path, {1: 3}, "signal", False, nprocs=2)
    assert [taken for taken, _ in results] == [5, 5]
    assert [handler for _, handler in results] == [signal.SIG_DFL] * 2
    assert_same(zf.simulate(2)(restored)(tmp_path)[0], zf.simulate(2)(after)(5)[0])


def test_nobody_is_asked(tmp_path: Path) -> None:
    assert [n for n, _ in zf.simulate(2)(train)(tmp_path, {}, "ask")] == [STEPS] * 2
    assert not list(tmp_path.iterdir())


def test_alone_a_rank_hears_it_at_once(tmp_path: Path) -> None:
    taken, handler = train(tmp_path, {0: 3}, "signal")
    assert taken == 4 and handler == signal.SIG_DFL
    assert_same(restored(tmp_path), after(4))


def test_one_clock_decides_for_all() -> None:
    def body() -> int:
        with zf.preemption(seconds=0.2 if zf.rank() == 1 else 1000.0) as stop:
            for k in range(10**6):
                zf.psum(torch.ones(1))
                if stop():
                    return k
                time.sleep(0.01)
        return -1

    first, *others = zf.simulate(3)(body)()
    assert first > 0 and others == [first] * 2


def test_nobody_waits_for_the_decision() -> None:
    """Rank 1 comes to each boundary only when rank 0 is past it."""
    past = [threading.Event() for _ in range(4)]

    def body() -> list[bool]:
        told = []
        with zf.preemption() as stop:
            for k in range(4):
                zf.psum(torch.ones(1))  # stands for the step
                if zf.rank() == 1:
                    assert past[k].wait(30), "rank 0 waits in stop()"
                    if k == 1:
                        stop.ask()
                told.append(stop())
                if zf.rank() == 0:
                    past[k].set()
        return told

    assert zf.simulate(2)(body)() == [[False, False, True, True]] * 2


def test_one_object_serves_all_simulated_ranks() -> None:
    with zf.preemption() as stop:

        def body() -> list[bool]:
            told = []
            for k in range(4):
                if zf.rank() == 0 and k == 1:
                    os.kill(os.getpid(), signal.SIGTERM)  # which the main thread gets
                zf.psum(torch.ones(1))
                told.append(stop())
            return told

        first, second = zf.simulate(2)(body)()
    assert first == second and first == sorted(first)


def test_the_handler_of_the_user_is_put_back() -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with zf.preemption() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop() and stop() and not heard
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(ZeroDivisionError), zf.preemption():
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        thread = threading.Thread(target=lambda: train(Path("unused"), {}, "ask"))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_does_not_ask_is_an_error() -> None:
    def body() -> None:
        with zf.preemption() as stop:
            for _ in range(3):
                zf.psum(torch.ones(1))
                if zf.rank() == 0:
                    stop()

    with pytest.raises(zf.DesyncError, match="preemption"):
        zf.simulate(2)(body)()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_limit_is_a_positive_number(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds"), zf.preemption(seconds=seconds):
        pass
