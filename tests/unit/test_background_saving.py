"""``zf.save(block=False)``: the copy, the waiting, and errors that are never lost."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests import warm
from tests.laws.cases import ADAMW, assert_same, train
from tests.laws.models import CASES
from zfunc.files import background
from zfunc.files.conversion import OnDisk, OpenCheckpoint
from zfunc.files.inventory import TensorLeaf
from zfunc.files.saving import Task

F64 = torch.float64
STACK = CASES["stack"]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ".lock")


def test_the_copy_is_of_the_saved_step(tmp_path: Path) -> None:
    """Training goes on in the same memory while the checkpoint is written."""

    def body(stage: int) -> Any:
        step = zf.donate(zf.shard(STACK.step(ADAMW), stage=stage))
        state = step.place(STACK.state(ADAMW, F64))
        expected = {}
        for i in range(5):
            expected[i] = zf.full(state)
            saving = zf.save(tmp_path / str(stage), state, block=False)
            assert saving.step == i
            _, state = train(step, state, STACK, 1)
        return expected

    for stage in range(4):
        (expected, _) = zf.simulate(2)(body)(stage)
        for i, full in expected.items():
            assert_same(zf.restore(tmp_path / str(stage), full, step=i), full)


def test_what_does_not_lie_in_memory_is_written_before_save_returns(tmp_path: Path) -> None:
    """A node that streams its values: their files may change as soon as training goes on."""
    values = {"a": torch.arange(5.0), "b": torch.ones(2, 2)}
    sizes = {name: TensorLeaf(tuple(x.shape), x.dtype) for name, x in values.items()}
    node = OnDisk(OpenCheckpoint(sizes, lambda name: values[name]))
    saving = zf.save(tmp_path, {"disk": node, "w": torch.ones(3)}, step=1, block=False)
    for x in values.values():
        x.zero_()
    saving.wait()
    like = {"disk": {"a": torch.zeros(5), "b": torch.zeros(2, 2)}, "w": torch.zeros(3)}
    got = zf.restore(tmp_path, like)
    assert got["disk"]["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert got["disk"]["b"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert got["w"].tolist() == [1.0] * 3


def test_waiting_is_waiting(tmp_path: Path) -> None:
    saving = zf.save(tmp_path, {"w": torch.ones(10**6), "step": 1}, block=False)
    saving.wait()
    assert saving.done and saving.path.is_dir()
    saving.wait()


def test_an_error_in_the_background_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    def fail(then: Any) -> None:
        def body() -> None:
            zf.save(tmp_path, {"w": torch.ones(9), "step": 1})
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full_disk) if zf.rank() == 1 else None
                saving = zf.save(tmp_path, {"w": torch.ones(10**5), "step": 2}, block=False)
                saving._thread and saving._thread.join()
            then(saving)

        with pytest.raises(zf.CheckpointError, match="No space left on device"):
            zf.simulate(2)(body)()
        assert names(tmp_path) == ["step-00000001"]

    fail(lambda saving: saving.wait())
    fail(lambda saving: zf.save(tmp_path, {"step": 3}))
    fail(lambda saving: zf.restore(tmp_path, {"w": torch.ones(9), "step": 3}))
    fail(lambda saving: None)  # the end of the world


def test_who_waits_again_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, whoever was told before: by its own wait, or by the next save."""
    done = background.complete

    def on_one(task: Task, *how: Any) -> None:
        if task.rank == 1:
            raise OSError(28, "No space left on device")
        done(task, *how)

    def body(by_the_next: bool) -> list[str]:
        failing = zf.save(tmp_path, {"w": torch.ones(9), "step": 2}, block=False)
        first = partial(zf.save, tmp_path, {"step": 3}) if by_the_next else failing.wait
        told = []
        for wait in (first, failing.wait, failing.wait):
            with pytest.raises(zf.CheckpointError) as raised:
                wait()
            told.append(str(raised.value))
        zf.save(tmp_path, {"w": torch.ones(9), "step": 4})  # told once is enough for what follows
        return told

    monkeypatch.setattr(background, "complete", on_one)
    for by_the_next in (False, True):
        for first, *again in zf.simulate(2)(body)(by_the_next):
            assert "No space left on device" in first and again == [first, first]


AT_EXIT = """
import os, sys, torch, zfunc as zf
first = zf.save(sys.argv[1], {"w": torch.ones(3_000_000), "step": 1}, block=False)
if sys.argv[2] == "fails":
    first.wait()  # it is the second one that fails
    def full_disk(*args): raise OSError(28, "No space left on device")
    os.pwrite = full_disk
    zf.save(sys.argv[1], {"w": torch.ones(3), "step": 2}, block=False)
"""


@pytest.mark.parametrize("how", ["works", "fails"])
def test_the_end_of_the_program_waits(how: str, tmp_path: Path) -> None:
    ran = warm.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path), how], capture_output=True, text=True
    )
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [(1, True)]
    assert ("No space left on device" in ran.stderr) == (how == "fails")
