"""What saving in the background costs: step times with and without it, interleaved in one run.

Blocks of ten steps alternate: one with a ``zf.save(block=False)`` before its first step, one
without. The time of a block includes the copy that ``save`` takes; each block with a save is
compared with the mean of the blocks beside it, so that a machine that drifts does not matter.

    python -m benchmarks.saving                       # 30M parameters, 2 gloo ranks, stage 3
    python -m benchmarks.saving --stage 1 --pairs 8
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import zfunc as zf
from benchmarks import report
from benchmarks.models import LEARNING_RATE, SIZES, WEIGHT_DECAY, batches, build, loss_of

ROOT = Path(__file__).resolve().parents[1]
FIXED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of the ranks, which inherit it


def blocks(size_name: str, stage: int, pairs: int, steps: int, folder: str) -> dict[str, Any]:
    """One rank: seconds of each block, plain ones at even places."""
    torch.set_num_threads(1)
    size = SIZES[size_name]
    model = zf.functionalize(build(size))

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(model.apply(params, ids), ids)

    tx = zf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    step = zf.donate(zf.shard(zf.train_step(loss_fn, tx), stage=stage))
    state = step.place(zf.TrainState.create(model.params, tx))
    held = zf.tree.size_bytes(state)
    stream = batches(size, zf.rank())
    ranks = zf.ranks.axes.group(None, "data")
    seconds, calls = [], []
    for i in range(-2, 2 * pairs + 1):  # two blocks to warm up, one more plain one at the end
        ids = list(islice(stream, steps))
        ranks.barrier()
        start = time.perf_counter()
        if i % 2:
            zf.save(folder, state, block=False, keep=1)
            calls.append(time.perf_counter() - start)
        for one in ids:
            state, _ = step(state, one)
        ranks.barrier()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    zf.save(folder, state)
    return {
        "seconds": seconds[2:],
        "save_call": calls[1:],
        "blocking_save": time.perf_counter() - start,
        "state_bytes": held,
    }


def overheads(seconds: list[float]) -> list[float]:
    """Of each block with a save, against the mean of its two neighbours."""
    return [
        2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]) - 1 for i in range(1, len(seconds), 2)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="small", help="default: %(default)s")
    add("--stage", type=int, choices=range(4), default=3, help="default: %(default)s")
    add("--ranks", type=int, default=2, help="gloo ranks, one thread each (%(default)s)")
    add("--pairs", type=int, default=6, help="blocks with a save (%(default)s)")
    add("--steps", type=int, default=10, help="steps of a block (%(default)s)")
    add("--folder", help="where to save; by default a temporary folder")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    args = parser.parse_args()
    os.environ.update(FIXED)
    folder = args.folder or tempfile.mkdtemp(prefix="zfunc-saving-")
    try:
        seen = zf.launch(
            blocks, args.size, args.stage, args.pairs, args.steps, folder, nprocs=args.ranks
        )
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    each = overheads(seen[0]["seconds"])
    plain = statistics.median(seen[0]["seconds"][::2]) / args.steps
    facts = {key: value for key, value in vars(args).items() if key not in ("out", "folder")}
    record = report.record("saving", {**facts, "environment": FIXED}, [])
    record |= {"overheads": each, "median_overhead": statistics.median(each), "ranks": seen}
    console = Console()
    console.print(
        f"{args.size}, stage {args.stage}, {args.ranks} ranks: {plain:.3f} s per step; a save in "
        f"{args.steps} steps adds {100 * statistics.median(each):.1f} % "
        f"({', '.join(f'{100 * x:.1f}' for x in each)}); the call takes "
        f"{statistics.median(seen[0]['save_call']):.3f} s, a blocking save "
        f"{seen[0]['blocking_save']:.2f} s of {seen[0]['state_bytes'] / 1e6:.0f} MB per rank"
    )
    console.print(f"written: {report.write(record, args.out)}")


if __name__ == "__main__":
    main()
