"""``zf.plan`` on this machine: does it put steps in the order in which they really take time?

Stage {0, 1, 3} x remat {no, yes} x accumulate {1, 4} of a GPT, two gloo ranks with one thread each,
the same global batch. First the machine is calibrated and the plan is made, then each choice is
measured: three rounds, the choices in turn, each the median of a few steps. The figure is the
correlation of ranks (Spearman) between predicted seconds and the medians of the rounds. Beside it
stands that of two rounds with each other: no prediction can do better than the machine repeats
itself.

    python -m benchmarks.planning
    python -m benchmarks.planning --size tiny --rounds 2       # to try the program itself

The exit status is 1 if the correlation is below 0.8. Trust it on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import zfunc as zf
from benchmarks.meters import hardware, versions
from benchmarks.models import GPT, LEARNING_RATE, SIZES, WEIGHT_DECAY, Size
from benchmarks.peers import loss_of
from zfunc.foresight.calibration import measure

RANKS, ENOUGH = 2, 0.8
OVER = {"stage": [0, 1, 3], "remat": [False, True], "accumulate": [1, 4]}
Choice = tuple[Any, ...]
CHOICES: list[Choice] = list(product(*OVER.values()))


def step_and_state(size: Size, stage: int, remat: bool, accumulate: int) -> tuple[Any, Any]:
    """What a user would write for a choice."""
    torch.manual_seed(0)
    model = zf.functionalize(GPT(size))
    tx = zf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    step = zf.train_step(lambda params, ids: loss_of(model.apply(params, ids), ids), tx)
    step = zf.donate(zf.shard(step, stage=stage))
    step = zf.remat(step) if remat else step
    step = zf.accumulate(step, accumulate) if accumulate > 1 else step
    return step, zf.TrainState.create(model.params, tx)


def calibrated() -> zf.Cluster:
    """One rank of those that measure this machine together."""
    torch.set_num_threads(1)
    return measure(torch.device("cpu"))


def timed(size: Size, choice: Choice, warmup: int, steps: int) -> list[float]:
    """One rank: seconds of its steps behind the warm-up."""
    torch.set_num_threads(1)
    step, state = step_and_state(size, *choice)
    state = step.place(state)
    draw = torch.Generator().manual_seed(zf.rank())
    seen = []
    for turn in range(warmup + steps):
        ids = torch.randint(0, size.vocab, (size.batch, size.tokens), generator=draw)
        begin = time.perf_counter()
        state, metrics = step(state, ids)
        float(metrics["loss"])
        if turn >= warmup:
            seen.append(time.perf_counter() - begin)
    return seen


def planned(size: Size, cluster: zf.Cluster) -> dict[Choice, float]:
    """Predicted seconds of each choice."""
    ids = torch.empty(size.batch * RANKS, size.tokens, dtype=torch.int64, device="meta")

    def step_of(**given: Any) -> Any:
        return step_and_state(size, **given)[0]

    _, state = step_and_state(size, 0, False, 1)
    found = zf.plan(step_of, state, ids, cluster, over=OVER)
    if errors := [row.error for row in found.rows if row.error]:
        raise RuntimeError(errors[0])
    return {tuple(row.given[name] for name in OVER): row.seconds for row in found.rows}


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of distinct numbers.

    >>> correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    places = [[sorted(row).index(x) for x in row] for row in (a, b)]
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(*places, strict=True)) / (n * (n * n - 1))


def measured(size: Size, number: int, args: argparse.Namespace) -> dict[Choice, float]:
    """Seconds of each choice in one round, which begins with another one each time."""
    found = {}
    for choice in CHOICES[number:] + CHOICES[:number]:
        seen = zf.launch(timed, size, choice, args.warmup, args.steps, nprocs=RANKS)
        found[choice] = max(median(rank) for rank in seen)
    return found


def table(predicted: dict[Choice, float], took: dict[Choice, float]) -> Table:
    """All choices, the fastest prediction first."""
    found = Table(box=box.SIMPLE)
    for name in (*OVER, "predicted s", "measured s", "of the fastest"):
        found.add_column(name, justify="right")
    fastest = min(took.values())
    for choice in sorted(CHOICES, key=lambda x: predicted[x]):
        times = f"{predicted[choice]:.3f}", f"{took[choice]:.3f}", f"{took[choice] / fastest:.2f}"
        found.add_row(*map(str, choice), *times)
    return found


def record(
    args: argparse.Namespace, predicted: dict[Choice, float], rounds: list[dict[Choice, float]]
) -> Path:
    """Write all figures as JSON."""
    now = datetime.now(UTC)
    rows = [
        {
            **dict(zip(OVER, choice, strict=True)),
            "predicted": predicted[choice],
            "measured": [row[choice] for row in rounds],
        }
        for choice in CHOICES
    ]
    found = {
        "benchmark": "planning",
        "date": now.isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "settings": {name: getattr(args, name) for name in ("size", "rounds", "warmup", "steps")},
        "rows": rows,
    }
    path: Path = args.out / f"planning-{args.size}-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def main() -> int:
    """The whole program; returns its exit status."""
    parser = argparse.ArgumentParser(description="zf.plan's order of steps against measured times.")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the GPT")
    parser.add_argument("--rounds", type=int, default=3, help="in which all choices take a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a turn that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn that count")
    out = Path(__file__).resolve().parent / "results"
    parser.add_argument("--out", type=Path, default=out, help="folder for the JSON file")
    args = parser.parse_args()
    size, console = SIZES[args.size], Console(highlight=False)

    predicted = planned(size, zf.launch(calibrated, nprocs=RANKS)[0])
    rounds = []
    for number in range(args.rounds):
        rounds.append(measured(size, number, args))
        console.print(f"round {number + 1} of {args.rounds} measured")
    took = {choice: median(row[choice] for row in rounds) for choice in CHOICES}
    console.print(table(predicted, took))
    told = [[row[choice] for choice in CHOICES] for row in (predicted, took, *rounds)]
    found = correlation(told[0], told[1])
    console.print(f"correlation of ranks: {found:.3f} (at least {ENOUGH})")
    if repeats := [correlation(a, b) for a, b in combinations(told[2:], 2)]:
        console.print(f"of two rounds with each other: {fmean(repeats):.3f}")
    console.print(f"written: {record(args, predicted, rounds)}")
    return int(found < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
