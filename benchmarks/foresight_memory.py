"""Peak memory of ranks on the CPU: what ``zf.foresee`` says before they run, and what they take.

What is outside of tensors (heaps of libraries, threads, connections) is one constant for a process:
what a run of a tiny model takes beyond what is foreseen of it. Predictions are written down first;
``compare`` runs the ranks then, each stage in processes of its own, as README's table does.

    python -m benchmarks.foresight_memory predict
    python -m benchmarks.foresight_memory compare FILE      # what `predict` has written
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import zfunc as zf
from benchmarks import train_step
from benchmarks.meters import MIB, hardware, versions
from benchmarks.models import GPT, SIZES
from benchmarks.peers import zfunc_step

STAGES = (0, 1, 2, 3)
RANKS = 2
TINY, TINY_STAGE = "tiny", 1  # the run of its own that gives the constant
RUN = {
    "ranks": RANKS,
    "warmup": 1,
    "steps": 2,
    "timeout": 1800.0,
    "mmap_threshold": train_step.MMAP_THRESHOLD,
    "large_pages": False,
}


def foreseen(size_name: str, stage: int) -> int:
    """The most bytes of tensors alive on a rank in a steady step."""
    size = SIZES[size_name]
    with torch.device("meta"):
        module = GPT(size)
    step, state = zfunc_step(module, stage)
    ids = torch.empty(size.batch, size.tokens, dtype=torch.int64, device="meta")
    return zf.foresee(step, state, ids, ranks=RANKS, device="cpu").peak_bytes


def measured(size_name: str, stage: int) -> int:
    """VmHWM of the worst rank over what is resident before the model exists, in steps alone."""
    run = train_step.run(f"zfunc{stage}", argparse.Namespace(size=size_name, **RUN))
    return max(rank["peak"] for rank in run.ranks)


def predict(args: argparse.Namespace) -> None:
    """Measure the constant, and write predictions with it."""
    tiny = {"foreseen": foreseen(TINY, TINY_STAGE), "measured": measured(TINY, TINY_STAGE)}
    constant = tiny["measured"] - tiny["foreseen"]
    tensors = {stage: foreseen(args.size, stage) for stage in STAGES}
    now = datetime.now(UTC)
    record = {
        "benchmark": "foresight_memory",
        "date": now.isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "settings": RUN,
        "size": args.size,
        "constant": constant,
        "constant_from": {"size": TINY, "stage": TINY_STAGE, **tiny},
        "foreseen": {str(stage): n for stage, n in tensors.items()},
        "predicted": {str(stage): n + constant for stage, n in tensors.items()},
    }
    path = args.out / f"foresight_memory-{args.size}-{now:%Y%m%d-%H%M%S}-predicted.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"a process takes {constant / MIB:.1f} MiB outside of tensors; written: {path}")


def compare(args: argparse.Namespace) -> None:
    """Run the ranks, and put what they take beside what was predicted."""
    record: dict[str, Any] = json.loads(args.file.read_text())
    record["compared"] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
    }
    rows = record["measured"] = {}
    print("stage  predicted MiB  measured MiB  error")
    for stage, told in record["predicted"].items():
        rows[stage] = seen = measured(record["size"], int(stage))
        error = told / seen - 1
        print(
            f"{stage:5s}  {told / MIB:13.1f}  {seen / MIB:12.1f}  {100 * error:+.1f} %", flush=True
        )
    path = args.file.with_name(args.file.name.replace("-predicted", "-compared"))
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight_memory")
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("predict", help=predict.__doc__)
    first.add_argument("--size", choices=SIZES, default="medium", help="default: %(default)s")
    first.add_argument("--out", type=Path, default=train_step.ROOT / "benchmarks" / "results")
    first.set_defaults(run=predict)
    second = commands.add_parser("compare", help=compare.__doc__)
    second.add_argument("file", type=Path, help="what `predict` has written")
    second.set_defaults(run=compare)
    args = parser.parse_args()
    os.environ.update(train_step.environment(argparse.Namespace(**RUN)))
    args.run(args)


if __name__ == "__main__":
    main()
