"""One run at a time saves into a folder: the other is refused, and told who is there."""

from __future__ import annotations

import fcntl
import shutil
import sys
from pathlib import Path

import pytest

import zfunc as zf
from tests import warm
from zfunc.files import locking

HOLD = """
import sys, zfunc as zf
zf.save(sys.argv[1], {"step": 1})
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_and_told_who_has_the_folder(tmp_path: Path) -> None:
    other = warm.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=warm.PIPE, stdout=warm.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        with pytest.raises(zf.CheckpointError, match=f"another run: process {other.pid} on "):
            zf.save(tmp_path, {"step": 2})
        assert zf.restore(tmp_path, {"step": 0}) == {"step": 1}
    finally:
        other.kill()  # which releases it
        other.communicate()
    zf.save(tmp_path, {"step": 2})
    assert [c.step for c in zf.checkpoints(tmp_path)] == [2, 1]


def test_processes_that_the_holder_starts_share_its_lock(tmp_path: Path) -> None:
    zf.save(tmp_path, {"step": 0})
    ran = warm.run(
        [sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert [c.step for c in zf.checkpoints(tmp_path)] == [1, 0]


def test_a_folder_that_was_deleted_is_locked_anew(tmp_path: Path) -> None:
    root = tmp_path / "a"
    zf.save(root, {"step": 0})
    shutil.rmtree(root)
    zf.save(root, {"step": 1})
    with (root / ".lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len([1 for folder in locking._held if folder == root.resolve()]) == 1
