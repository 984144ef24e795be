"""Python's cyclic collector waits while a state is placed, and only then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc.engine.collector import collector_waits


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if was_on else gc.disable()


def test_it_goes_on_when_the_last_thread_is_done_also_after_an_error() -> None:
    inside, leave = threading.Barrier(2), threading.Event()

    def other() -> None:
        with collector_waits():
            inside.wait()
            leave.wait()

    @collector_waits()
    def fail() -> None:
        inside.wait()
        raise ZeroDivisionError

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_the_user_turned_off_stays_off() -> None:
    gc.disable()
    with collector_waits():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_nothing_is_collected_while_many_leaves_are_placed() -> None:
    collections: list[int] = []

    def count(phase: str, found: dict[str, Any]) -> None:
        collections.append(found["generation"])

    tx = zf.optim.adam(1e-3)
    step = zf.shard(zf.train_step(lambda params, batch: params["0"].sum(), tx), stage=3)
    state = zf.TrainState.create({str(i): torch.ones(3) for i in range(2000)}, tx)
    gc.callbacks.append(count)
    try:
        step.place(state)
        during = len(collections)
        gc.collect()
    finally:
        gc.callbacks.remove(count)
    assert during <= 4  # begun and ended: one before, and one after
    assert len(collections) > during
    assert gc.isenabled()
