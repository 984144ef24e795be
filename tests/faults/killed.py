"""A process that forks savers, kills each at some instant, and looks at what they leave.

Run by ``test_kill_save.py`` in a fresh interpreter: forking is safe only where no thread
has run yet. Prints one JSON object.
"""

from __future__ import annotations

import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # torch.set_num_threads would start a pool before the fork
os.environ["MKL_NUM_THREADS"] = "1"

import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zfunc as zf
from tests.laws.parts import Parts
from zfunc.layout.splits import Cut

# Whatever changes files, and what makes it durable. Who is killed before he opens a file to read
# it leaves what he leaves before the next of these.
CALLS = ("open", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "write")


def state(step: int) -> dict[str, Any]:
    w = torch.full((90, 100), float(step))
    return {"p": {"w": w}, "note": f"step {step}", "step": step}


def in_layers(step: int) -> dict[str, Any]:
    """The same of a model of three layers."""
    full = state(step)
    return {**full, "p": {**full["p"], "blocks": zf.Layers([{"b": full["p"]["w"][:9]}] * 3)}}


def consistent(root: Path, how: str, least: int, most: int) -> int:
    """The step that is restored: one of those that were saved, whole, and not too old."""
    made = full(how)
    got = zf.restore(root, made(0))
    n = int(got["step"])
    assert least <= n <= most, (least, n, most)
    for mine, theirs in zip(zf.tree.leaves(got["p"]), zf.tree.leaves(made(n)["p"]), strict=True):
        assert torch.equal(mine, theirs)
    assert got["note"] == f"step {n}"
    extra = zf.extra(root, step=n)
    assert extra and extra == [{"step": n, "rank": rank} for rank in range(len(extra))]
    return n


def full(how: str) -> Callable[[int], dict[str, Any]]:
    """What is saved, whole."""
    return in_layers if how == "pipe" else state


def split(step: int, ranks: int) -> dict[str, Any]:
    """The same, of which each rank has a part of the columns."""
    full = state(step)
    splits = {"w": Cut(1).split((90, 100), ranks)}
    return {**full, "p": Parts(full["p"], splits, ranks)}


def on_a_mesh(step: int) -> dict[str, Any]:
    """The same, as a split and sharded step placed it, on two replicas of half of the ranks."""
    full, mesh = state(step), zf.mesh(data=1, tensor=-1, replica=2)
    wrapped = zf.split(zf.Step(lambda state: (state, {})), rules={"w": zf.Cut(1)}, mesh=mesh)
    placed = zf.shard(wrapped, stage=3, mesh=mesh).place({"params": full["p"], "step": step})
    return {**full, "p": placed["params"]}


def in_stages(step: int) -> dict[str, Any]:
    """Layers on two stages, each sharded over the rest of the ranks."""
    full, mesh = in_layers(step), zf.mesh(data=-1, pipe=2)
    wrapped = zf.pipeline(zf.Step(lambda state: (state, {})), 1, mesh=mesh)
    placed = zf.shard(wrapped, stage=3, mesh=mesh).place({"params": full["p"], "step": step})
    return {**full, "p": placed["params"]}


def saved(root: Path, step: int, block: bool, ranks: int, how: str = "") -> None:
    made: dict[str, Any] = {"split": partial(split, ranks=ranks), "mesh": on_a_mesh}
    made["pipe"] = in_stages

    def body() -> None:
        here = made.get(how, state)
        zf.restore(root, here(0))
        extra = {"step": step, "rank": zf.rank()}
        zf.save(root, here(step), block=block, keep=2, extra=extra)

    zf.simulate(ranks)(body)()


def forked(child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    return pid


def kill_at(n: int) -> None:
    """From here on this process kills itself before the n-th call that touches files."""
    count, opening = 0, os.open

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any, **how: Any) -> Any:
            nonlocal count
            count += call is not opening or bool(args[1] & (os.O_WRONLY | os.O_RDWR))
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **how)

        return before

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def at_every_call(root: Path, how: str, ranks: int) -> dict[str, int]:
    """Save, killed before the first call, the second, ... until a save gets through.

    ``again``: it is always the same step, the only one that there is. ``split``: ranks have parts
    of rows. ``mesh``: they do, as steps place them, on two replicas. ``pipe``: they have layers.
    """
    zf_step, kills = 1, 0
    assert os.waitpid(forked(lambda: first(root, how)), 0)[1] == 0
    while True:
        this = zf_step + (how != "again")

        def child(this: int = this, kills: int = kills) -> None:
            kill_at(kills + 1)
            saved(root, this, how != "background", ranks, how)

        status = os.waitpid(forked(child), 0)[1]
        zf_step = consistent(root, how, zf_step, this)
        if not os.WIFSIGNALED(status):
            assert status == 0 and zf_step == this
            return {"kills": kills, "step": zf_step}
        kills += 1


def first(root: Path, how: str = "") -> None:
    zf.save(root, full(how)(1), extra={"step": 1, "rank": 0})


def at_random(root: Path, seconds: float, rng: random.Random) -> dict[str, int]:
    """Savers that save as fast as they can, each killed after a random time."""
    assert os.waitpid(forked(lambda: first(root)), 0)[1] == 0
    step, kills, end = 1, 0, time.monotonic() + seconds

    def child() -> None:
        start = int(zf.restore(root, state(0))["step"])
        for n in range(start + 1, start + 10_000):
            saved(root, n, block=n % 3 > 0, ranks=1 + n % 2)

    while time.monotonic() < end:
        pid = forked(child)
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"a saver failed: {status}"
        kills += 1
        step = consistent(root, "", step, step + 10_000)
    return {"kills": kills, "step": step}


def main() -> None:
    root, what = Path(sys.argv[1]), sys.argv[2]
    if what == "random":
        found = at_random(root, float(sys.argv[3]), random.Random(int(sys.argv[4])))
    else:
        found = at_every_call(root, what, int(sys.argv[3]))
    left = sorted(p.name for p in root.iterdir())
    print(json.dumps({**found, "left": left}))


if __name__ == "__main__":
    main()
