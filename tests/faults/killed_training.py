"""Trains with its state on disk and saves checkpoints, is killed and restarted, over and over.

Run by ``test_killed_training.py`` in a fresh interpreter: each life of a run is a fork of it,
and forking is safe only where no thread has run yet. Runs follow one another until there have
been enough kills; some restart from what is on disk, some from the newest checkpoint, on one rank
or two. Whatever a restart finds has to be a state that the uninterrupted run went through, no
older than what the dead process has told of, and the end has to be that run's end. Prints JSON.
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
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

import zfunc as zf
from tests.faults.killed import forked
from tests.laws.cases import ADAMW, bits, named, trained
from tests.laws.models import block, mean_square, stack
from zfunc import optim

EVERYTHING = [getattr(zf, name) for name in zf.__all__]  # imported before the forks, not in each

F64 = torch.float64
STEPS, SAVE_EVERY = 40, 3
TX = optim.chain(optim.clip_by_global_norm(0.5), ADAMW)


def noisy(params: Any, batch: Any) -> Tensor:
    """With dropout, so that the random key has to be right as well."""
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.2), params["blocks"], batch["x"])
    return mean_square(x @ params["head"]["w"], batch["y"])


CASE = trained(stack, noisy)


def digest(state: Any) -> str:
    """Of every bit of a full state."""
    seen = xxhash.xxh3_128()
    for name, leaf in named(state).items():
        seen.update(name.encode() + (bits(leaf) if isinstance(leaf, Tensor) else b""))
    return seen.hexdigest()


def sharded(step: Any) -> Any:
    return zf.shard(step, stage=3, unit_bytes=600)


def reference(ranks: int, log: int) -> None:
    """The uninterrupted run, in memory: digest and loss after every step."""

    def body() -> None:
        step = sharded(CASE.step(TX))
        state = step.place(CASE.state(TX, F64))
        for n in range(STEPS + 1):
            full = digest(step.unplace(state))
            batch = zf.local_batch(CASE.batch(n, F64))
            if zf.rank() == 0:
                tell(log, digest=full)
            state, metrics = step(state, batch)
            if zf.rank() == 0:
                tell(log, loss=float(metrics["loss"]).hex())

    zf.simulate(ranks)(body)()


def tell(log: int, **row: Any) -> None:
    os.write(log, json.dumps(row).encode() + b"\n")


def told(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


def life(folder: Path, log: int, ranks: int, restart: str) -> None:
    """From what is there to the last step."""

    def body() -> None:
        step = sharded(zf.offload(CASE.step(TX), to="disk", path=folder / "tier"))
        state, found = begun(step, folder / "saved", restart)
        full = digest(step.unplace(state))
        if zf.rank() == 0:
            tell(log, found=int(state.step), new=not found, digest=full)
        for n in range(int(state.step), STEPS):
            state, metrics = step(state, zf.local_batch(CASE.batch(n, F64)))
            tell(log, rank=zf.rank(), made=n + 1, loss=float(metrics["loss"]).hex())
            if (n + 1) % SAVE_EVERY == 0:
                block = n % 2 == 0
                zf.save(folder / "saved", state, block=block, keep=2)
                if block and zf.rank() == 0:
                    tell(log, saved=n + 1)
        full = digest(step.unplace(state))
        if zf.rank() == 0:
            tell(log, end=full)
        step.close()

    zf.simulate(ranks)(body)()


def begun(step: Any, saved: Path, restart: str) -> tuple[Any, bool]:
    """The state to go on from, and whether there was one."""
    fresh = CASE.state(TX, F64)
    if restart == "recover":
        try:
            return zf.recover(step, fresh), True
        except zf.CheckpointError as error:
            if "holds no state" not in str(error):
                raise
            return step.place(fresh), False
    state = step.place(fresh)
    if saved.exists() and zf.checkpoints(saved):
        return zf.restore(saved, like=state), True
    return state, False


def wait_for_more(log: Path, seconds: float = 30.0) -> None:
    """Until a life has told of something, or is not likely to."""
    size, deadline = log.stat().st_size, time.monotonic() + seconds
    while log.stat().st_size == size and time.monotonic() < deadline:
        time.sleep(0.002)


def check(rows: list[dict[str, Any]], history: list[str], losses: list[str], restart: str) -> None:
    """What the lives of one run have told, in order."""
    made: dict[int, int] = {}
    saved = 0
    for row in rows:
        if "made" in row:
            made[row["rank"]] = row["made"]
            assert row["loss"] == losses[row["made"] - 1], row
        elif "saved" in row:
            saved = row["saved"]
        elif "found" in row:
            assert not (row["new"] and (made if restart == "recover" else saved)), row
            least = min(made.values(), default=0) if restart == "recover" else saved
            most = max(made.values(), default=0) + (restart == "recover")
            assert least <= row["found"] <= most, (least, row, most)
            assert row["digest"] == history[row["found"]], row
            made = dict.fromkeys(made, row["found"])
    assert rows[-1] == {"end": history[STEPS]}


def killed(root: Path, kills: int, draw: random.Random) -> dict[str, int]:
    """Runs that are killed some times and then end in peace, until there were so many kills."""
    history, losses = {}, {}
    for ranks in (1, 2):
        log = os.open(root / f"reference-{ranks}", os.O_CREAT | os.O_RDWR | os.O_APPEND)
        child = forked(lambda ranks=ranks, log=log: reference(ranks, log))
        assert os.waitpid(child, 0)[1] == 0
        rows = told(root / f"reference-{ranks}")
        history[ranks] = [row["digest"] for row in rows if "digest" in row]
        losses[ranks] = [row["loss"] for row in rows if "loss" in row]
    done, resumed = 0, 0
    kinds = cycle(product(("recover", "restore"), (1, 2)))
    for runs, (restart, ranks) in enumerate(kinds):
        folder = root / f"run-{runs}"
        folder.mkdir()
        log = os.open(folder / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
        status, left = int(signal.SIGKILL), max(2, kills // 20)  # so that all kinds have a turn
        while status:
            child = forked(lambda: life(folder, log, ranks, restart))  # noqa: B023
            if done < kills and left:
                left -= 1
                if draw.random() < 0.8:  # at any time, but mostly when it has something to lose
                    wait_for_more(folder / "log")
                time.sleep(draw.uniform(0.0, 0.2))
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            assert status == 0 or os.WIFSIGNALED(status), f"{folder}: status {status}"
            done += status != 0
        os.close(log)
        rows = told(folder / "log")
        check(rows, history[ranks], losses[ranks], restart)
        resumed += sum(row.get("new") is False for row in rows)
        if done >= kills and runs >= 3:
            return {"kills": done, "runs": runs + 1, "resumed": resumed}
    raise AssertionError


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    made = killed(Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3])))
    print(json.dumps(made))
