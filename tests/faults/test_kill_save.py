"""SIGKILL, a full disk, no permission: the last good checkpoint is always there."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def killed(*words: Any) -> dict[str, Any]:
    ran = warm.run(
        [sys.executable, "-m", "tests.faults.killed", *map(str, words)],
        capture_output=True, text=True, cwd=ROOT, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(json.loads(ran.stdout))


HOWS = [*product(["block", "background", "again", "split"], [1, 2]), ("mesh", 4)]
HOWS += [("pipe", 2), ("pipe", 4)]


@pytest.mark.parametrize(("how", "ranks"), HOWS)
def test_killed_before_every_call_that_touches_files(how: str, ranks: int, tmp_path: Path) -> None:
    found = killed(tmp_path, how, ranks)
    assert found["kills"] > 15  # or nothing was tried
    shown = [name for name in found["left"] if not name.startswith(".")]
    assert 1 <= len(shown) <= 2  # keep=2
    assert found["left"] == [".lock", *shown]  # and what the dead had left is cleared away


def test_killed_at_random_instants(tmp_path: Path) -> None:
    seconds = float(os.environ.get("ZFUNC_KILL_SECONDS", "4"))
    found = killed(tmp_path, "random", seconds, 7)
    assert found["kills"] >= 10
    assert found["step"] > 1


LIMITED = """
import os, resource, sys, torch, zfunc as zf
def save(n, size): return zf.save(sys.argv[1], {"w": torch.ones(size), "step": n}, **how)
how = {}
save(1, 10)
how = {"block": sys.argv[2] == "block"}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(2, 100_000).wait()
except zf.CheckpointError as error:
    print("said", error)
print(sorted(os.listdir(sys.argv[1])))
save(3, 20).wait()
"""


@pytest.mark.parametrize("how", ["block", "background"])
def test_the_system_refuses_in_the_middle(how: str, tmp_path: Path) -> None:
    """By its own limit on sizes of files, which is a full disk to whoever writes."""
    ran = warm.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), how], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    said, left = ran.stdout.splitlines()
    assert said.startswith("said") and "File too large" in said
    assert left == "['.lock', 'step-00000001']"
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [(3, True), (1, True)]


def test_a_disk_without_room_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)

    class Small:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(zf.CheckpointError, match=r"bytes left, the checkpoint needs 4,000,000"):
        zf.save(tmp_path, {"w": torch.ones(10**6)}, step=1)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_no_permission(tmp_path: Path) -> None:
    zf.save(tmp_path, {"step": 1})
    tmp_path.chmod(0)
    me = os.geteuid()
    os.seteuid(65534 if me == 0 else me)  # nothing is forbidden to root
    try:
        for use in (zf.save, zf.restore):
            with pytest.raises(zf.CheckpointError, match="Permission denied"):
                use(tmp_path, {"step": 1})
    finally:
        os.seteuid(me)
        tmp_path.chmod(0o755)


def test_a_path_that_ranks_do_not_share(tmp_path: Path) -> None:
    def body() -> None:
        zf.save(tmp_path / str(zf.rank()), {"step": 1})

    with pytest.raises(zf.CheckpointError, match=r"rank 1 does not see .*file system that they"):
        zf.simulate(2)(body)()
    assert not list(tmp_path.glob("*/step-*"))
    assert not list(tmp_path.glob("*/.saving-*"))
