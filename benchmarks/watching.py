"""What ``zf.profile`` adds to a step, and how much of the step's time it finds.

Steps of a GPT alternate, one that is watched and one that is not, on the same state. Times are CPU
seconds of the thread that computes, so that other programs do not count.

    python -m benchmarks.watching                        # 34M parameters
    python -m benchmarks.watching --stage 3 --remat --pairs 9

The exit status is 1 where a promise is broken: at most 10 % added, at least 95 % found within
operators, both as medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console

import zfunc as zf
from benchmarks import report
from benchmarks.models import SIZES, batches, build, loss_of
from zfunc.foresight.costs import covered
from zfunc.foresight.layer_names import named
from zfunc.foresight.op_times import HostTimes
from zfunc.foresight.profiling import watching
from zfunc.foresight.watch import Watch

MOST_ADDED, LEAST_FOUND = 0.10, 0.95


def pairs(size_name: str, stage: int, remat: bool, count: int) -> list[dict[str, float]]:
    """Of each pair: CPU seconds of both steps, and those that were found within operators."""
    size = SIZES[size_name]
    model = zf.functionalize(build(size))

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model.apply(params, ids), ids)

    tx = zf.optim.adamw(1e-3)
    step = zf.donate(zf.shard(zf.train_step(loss_fn, tx), stage=stage))
    step = zf.remat(step) if remat else step
    state = step.place(zf.TrainState.create(model.params, tx))
    stream, found = batches(size, 0), []

    def timed(run: Any, ids: torch.Tensor) -> float:
        nonlocal state
        gc.collect()
        begin = time.thread_time()
        state, _ = run(state, ids)
        return time.thread_time() - begin

    for i in range(count + 1):  # the first pair warms up
        ids = next(stream)
        plain = timed(step, ids)
        times = HostTimes(time.thread_time)
        watch = Watch(times, on_gpu=False)
        with watching(watch):
            times.begin()
            watched = timed(named(step, watch.layers), ids)
        rows = [row for row in watch.rows() if row.kind == "compute"]
        row = {"plain": plain, "watched": watched, "within": covered(rows), "rows": len(rows)}
        found += [row] if i else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), default="small", help="of the model (%(default)s)")
    add("--stage", type=int, choices=range(4), default=0, help="of zf.shard (%(default)s)")
    add("--remat", action="store_true", help="recompute layers")
    add("--pairs", type=int, default=5, help="of steps (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    machine = report.record("watching", vars(given), ["zfunc"])
    rows = pairs(given.size, given.stage, given.remat, given.pairs)
    for row in rows:
        console.print(
            f"{row['plain']:.3f} s plain, {row['watched']:.3f} s watched, "
            f"{row['within']:.3f} s of it within {row['rows']:.0f} operators"
        )
    added = statistics.median(row["watched"] / row["plain"] - 1 for row in rows)
    within = statistics.median(row["within"] / row["watched"] for row in rows)
    console.print(
        f"{machine['date']} · torch {machine['versions']['torch']} · {given.size}, stage "
        f"{given.stage}: {added:+.1%} added, {within:.1%} found (medians)"
    )
    return int(added > MOST_ADDED or within < LEAST_FOUND)


if __name__ == "__main__":
    sys.exit(main())
