"""What ``zf.profile`` adds to a step, what it finds of its time, and whether FLOPs are foreseen.

Steps of a GPT alternate, one that is watched and one that is not, on the same state. Times are CPU
seconds of the thread that computes, so that other programs do not count.

    python -m benchmarks.watching                        # 34M parameters
    python -m benchmarks.watching --stage 3 --remat --pairs 9

The exit status is 1 where a promise is broken: at most 10 % added, at least 95 % of the time found
within operators or between those of one module, both as medians, and the FLOPs of ``zf.foresee``,
equal by phase.
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
from benchmarks.models import SIZES, Size, batches, build, loss_of
from zfunc.foresight.costs import by_module, covered
from zfunc.foresight.flops import summed
from zfunc.foresight.layer_names import named
from zfunc.foresight.op_times import HostTimes
from zfunc.foresight.profiling import watching
from zfunc.foresight.watch import Watch

MOST_ADDED, LEAST_FOUND = 0.10, 0.95


def step_and_state(size: Size, stage: int, remat: bool) -> tuple[Any, Any]:
    """A step of a GPT, and its full state."""
    model = zf.functionalize(build(size))

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model.apply(params, ids), ids)

    tx = zf.optim.adamw(1e-3)
    step = zf.donate(zf.shard(zf.train_step(loss_fn, tx), stage=stage))
    return zf.remat(step) if remat else step, zf.TrainState.create(model.params, tx)


def pairs(
    size: Size, step: Any, state: Any, count: int
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Of each pair: CPU seconds of both steps, and those that were found.

    And the FLOPs of a step, by phase.
    """
    state = step.place(state)
    stream, found, flops = batches(size, 0), [], {}

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
        flops = dict(summed(rows).by_phase)
        row = {"plain": plain, "watched": watched, "within": covered(rows), "rows": len(rows)}
        row["between"] = by_module(rows, {}, {})[""].between_seconds
        found += [row] if i else []
    return found, flops


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
    size = SIZES[given.size]
    step, state = step_and_state(size, given.stage, given.remat)
    ids = next(batches(size, 0))
    told = dict(zf.foresee(step, state, ids, ranks=1, device="cpu").flops.by_phase)
    rows, flops = pairs(size, step, state, given.pairs)
    for row in rows:
        console.print(
            f"{row['plain']:.3f} s plain, {row['watched']:.3f} s watched, "
            f"{row['within']:.3f} s of it within {row['rows']:.0f} operators, "
            f"{row['between']:.3f} s between those of a module"
        )
    added = statistics.median(row["watched"] / row["plain"] - 1 for row in rows)
    within = statistics.median(row["within"] / row["watched"] for row in rows)
    found = statistics.median((row["within"] + row["between"]) / row["watched"] for row in rows)
    console.print(
        f"{machine['date']} · torch {machine['versions']['torch']} · {given.size}, stage "
        f"{given.stage}: {added:+.1%} added, {found:.1%} found, {within:.1%} within operators "
        "(medians)"
    )
    console.print(f"FLOPs {sum(flops.values())}, foreseen {sum(told.values())}; by phase: {flops}")
    return int(added > MOST_ADDED or found < LEAST_FOUND or flops != told)


if __name__ == "__main__":
    sys.exit(main())
