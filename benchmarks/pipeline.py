"""A step of an unmodified module in two stages: ``zf.pipeline`` against torch's ``Schedule1F1B``.

The same GPT, weights and batches; 8 microbatches, cut behind the same layers, AdamW fused, fp32,
two gloo ranks with one thread each. torch takes two modules that were cut by hand
(``PipelineStage``), zfunc the whole one (``zf.functionalize``). torch runs 1F1B, and we five
schedules. Each of ours has ranks of its own with torch beside it: both are alive in the same two
processes and take steps in turn; who begins alternates. The figure of a run is the median over its
turns of one step's time over the other's, each as slow as its slower rank.

    python -m benchmarks.pipeline
    python -m benchmarks.pipeline --sizes 7M --peers 1f1b --runs 1 --turns 5 --no-memory
    python -m benchmarks.pipeline --peers torch    # torch alone, and where its time goes
    python -m benchmarks.pipeline --sleep          # layers that sleep, against the schedule's plan
    python -m benchmarks.pipeline --dry-run        # small and short, nothing is judged

``zbv`` has two chunks on each rank, of half as many layers. Memory is that of steps after the first
ones, in ranks of their own with one contestant each: the kernel's peak over what the process had
before there was a model.

The exit status is 1 where a promise is broken. On each size the best schedule takes at most torch's
time and 1f1b at most 1.05 of it; under 1f1b no rank's peak is above that rank's with torch; losses
agree. With ``--sleep`` a step takes within 10 % of what ``timeline`` says, and zb and zbv less than
1f1b. Trust times on a quiet machine only.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zfunc as zf
from benchmarks import pipeline_sleep, report
from benchmarks.meters import MIB, forget_peak, status_bytes
from benchmarks.models import GPT, LEARNING_RATE, WEIGHT_DECAY, Size, build, loss_of
from benchmarks.peers import fused_adamw
from benchmarks.phases import Phases

ROOT = Path(__file__).resolve().parents[1]
RANKS, MICROBATCHES = 2, 8
YARDSTICK = "torch"
OURS = {"1f1b": 1, "gpipe": 1, "zb": 1, "zb_lean": 1, "zbv": 2}  # how many chunks a rank has
LOSS_GAP = 1e-4  # relative, fp32, over all turns: the order of additions may differ, nothing else
BEST_MOST, PLAIN, PLAIN_MOST = 1.0, "1f1b", 1.05

SIZES = {
    "7M": Size(layers=8, width=256, heads=8, vocab=1024, tokens=64, batch=16),
    "30M": Size(layers=8, width=512, heads=8, vocab=4096, tokens=64, batch=16),
    "dry": Size(layers=4, width=32, heads=2, vocab=64, tokens=16, batch=8),
}

Advance = Callable[[Tensor], float | None]
"""A step: ids ``[B, T + 1]`` to the loss, on ranks that know it."""


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    size: Size
    warmup: int
    turns: int


class Part(nn.Module):
    """What torch's users write: some of the layers, the tables before them, the head behind."""

    def __init__(self, whole: GPT, first: int, last: int) -> None:
        super().__init__()
        begins, ends = first == 0, last == len(whole.blocks)
        self.embed = whole.embed if begins else None
        self.position = whole.position if begins else None
        self.blocks = whole.blocks[first:last]
        self.norm = whole.norm if ends else None
        self.head = whole.head if ends else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_step(size: Size, phases: Phases | None = None) -> Advance:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, layers = dist.get_rank(), size.layers
    cuts = (0, layers // 2, layers)
    part = Part(build(size), cuts[rank], cuts[rank + 1])
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = fused_adamw(part.parameters())
    if phases is not None:
        phases.watch_torch(stage, optimizer)

    def advance(ids: Tensor) -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids[:, :-1], return_outputs=False)
        else:
            schedule.step(target=ids[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return advance


def zfunc_step(size: Size, name: str) -> Advance:
    parts = RANKS * OURS[name]
    model = zf.functionalize(build(size))
    tx = zf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, ids[:, :-1]), ids[:, 1:])

    step = zf.pipeline(
        zf.donate(zf.train_step(loss_fn, tx)),
        microbatches=MICROBATCHES,
        schedule=name,
        partition=[size.layers * i // parts for i in range(parts + 1)],
        pipe=RANKS,
    )
    state = step.place(zf.TrainState.create(model.params, tx))

    def advance(ids: Tensor) -> float:
        nonlocal state
        state, metrics = step(state, ids)
        return float(metrics["loss"])

    return advance


def start(name: str, size: Size) -> Advance:
    """A contestant by name, ready to step."""
    return torch_step(size) if name == YARDSTICK else zfunc_step(size, name)


def batches(plan: Plan) -> list[Tensor]:
    """The same on both ranks, as the stages of a pipeline want them."""
    size, draw = plan.size, torch.Generator().manual_seed(1)
    shape, turns = (size.batch, size.tokens + 1), range(plan.warmup + plan.turns)
    return [torch.randint(0, size.vocab, shape, generator=draw) for _ in turns]


def take_turns(peers: list[str], plan: Plan) -> dict[str, Any]:
    """One rank: losses, and wall and CPU seconds behind the warm-up, of each contestant."""
    torch.set_num_threads(1)
    running = {name: start(name, plan.size) for name in peers}
    seen: dict[str, Any] = {name: {"losses": [], "seconds": [], "cpu": []} for name in peers}
    for turn, ids in enumerate(batches(plan)):
        first = turn % len(peers)
        for name in peers[first:] + peers[:first]:
            dist.barrier()
            start_s, used = time.perf_counter(), time.process_time()
            loss = running[name](ids)
            seconds, cpu = time.perf_counter() - start_s, time.process_time() - used
            seen[name]["losses"].append(loss)
            if turn >= plan.warmup:
                seen[name]["seconds"].append(seconds)
                seen[name]["cpu"].append(cpu)
    return seen


def remember(name: str, plan: Plan) -> int:
    """One rank with one contestant: peak memory of steps over that before there was a model."""
    torch.set_num_threads(1)
    rehearsed = Plan(SIZES["dry"], 0, 1)
    start(name, rehearsed.size)(batches(rehearsed)[0])
    gc.collect()
    before = status_bytes("VmRSS")
    advance = start(name, plan.size)
    for ids in batches(plan)[: plan.warmup]:
        advance(ids)
    gc.collect()
    forget_peak()
    for ids in batches(plan)[plan.warmup :]:
        advance(ids)
    return status_bytes("VmHWM") - before


def spend(plan: Plan) -> dict[str, float]:
    """One rank of torch alone: milliseconds of a step by what it does."""
    torch.set_num_threads(1)
    phases = Phases()
    advance = torch_step(plan.size, phases)
    stream = batches(plan)
    for ids in stream[: plan.warmup]:
        advance(ids)
    phases.clear()
    for ids in stream[plan.warmup :]:
        dist.barrier()
        with phases.whole():
            advance(ids)
    return phases.by_step(plan.turns)


def steps(seen: list[dict[str, Any]], name: str, what: str) -> list[float]:
    """What a step took, turn by turn, as its slower rank saw it."""
    return [max(pair) for pair in zip(*(rank[name][what] for rank in seen), strict=True)]


def ratios(seen: list[dict[str, Any]], name: str, what: str) -> list[float]:
    """Turn by turn, a contestant's step over the yardstick's."""
    own, base = steps(seen, name, what), steps(seen, YARDSTICK, what)
    return [a / b for a, b in zip(own, base, strict=True)]


def summarise(runs: list[list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """A contestant over all runs of one size."""
    wall = [median(ratios(seen, name, "seconds")) for seen in runs]
    return {
        "runs": wall,
        "runs_cpu": [median(ratios(seen, name, "cpu")) for seen in runs],
        "ratio": median(wall),
        "seconds": median(x for seen in runs for x in steps(seen, name, "seconds")),
        "yardstick_seconds": median(x for seen in runs for x in steps(seen, YARDSTICK, "seconds")),
        "loss_gap": max(gap for seen in runs for gap in loss_gaps(seen, name)),
    }


def loss_gaps(seen: list[dict[str, Any]], name: str) -> list[float]:
    """By turn, on the last rank, the only one to which torch tells the loss."""
    pairs = zip(*(seen[-1][of]["losses"] for of in (name, YARDSTICK)), strict=True)
    return [abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs]


def measured(args: argparse.Namespace, size: str, console: Console) -> dict[str, Any]:
    """Times and peaks of one size."""
    plan = Plan(SIZES[size], args.warmup, args.turns)
    peers = [name for name in args.peers if name != YARDSTICK]
    runs: dict[str, list[Any]] = {name: [] for name in peers}
    for at in range(args.runs):
        for name in peers:
            seen = zf.launch(take_turns, [YARDSTICK, name], plan, nprocs=RANKS)
            runs[name].append(seen)
            wall, cpu = (median(ratios(seen, name, what)) for what in ("seconds", "cpu"))
            console.print(f"{size}, run {at + 1}, {name}: {wall:.3f} (CPU {cpu:.3f})")
    found: dict[str, Any] = {
        "parameters": numel(SIZES[size]),
        "rows": {name: summarise(runs[name], name) for name in peers},
        "ranks": runs,
    }
    if not args.no_memory:
        short = Plan(plan.size, 2, 3)
        every = dict.fromkeys([YARDSTICK, *peers])
        found["peaks"] = {name: zf.launch(remember, name, short, nprocs=RANKS) for name in every}
    if YARDSTICK in args.peers:
        found["phases"] = zf.launch(spend, plan, nprocs=RANKS)
    return found


def numel(size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(size).parameters())


def judge(sizes: dict[str, Any]) -> list[str]:
    """The promises that are broken."""
    return [f"{size}: {why}" for size, found in sizes.items() for why in faults(found)]


def faults(found: dict[str, Any]) -> list[str]:
    """Those of one size; of schedules that did not run nothing is said."""
    rows, peaks = found["rows"], found.get("peaks", {})
    broken = [
        f"{name}: losses differ by {row['loss_gap']:.0e}"
        for name, row in rows.items()
        if row["loss_gap"] > LOSS_GAP
    ]
    best = min(rows, key=lambda name: rows[name]["ratio"], default=None)
    if best is not None and rows[best]["ratio"] > BEST_MOST:
        broken.append(f"the best, {best}, takes {rows[best]['ratio']:.3f}, at most {BEST_MOST}")
    if PLAIN in rows and rows[PLAIN]["ratio"] > PLAIN_MOST:
        broken.append(f"{PLAIN} takes {rows[PLAIN]['ratio']:.3f}, at most {PLAIN_MOST}")
    for rank, pair in enumerate(zip(peaks.get(PLAIN, ()), peaks.get(YARDSTICK, ()), strict=False)):
        if pair[0] > pair[1]:
            ours, base = (x / MIB for x in pair)
            broken.append(f"{PLAIN}: rank {rank} peaks at {ours:.0f} MiB, {YARDSTICK} {base:.0f}")
    return broken


def print_table(sizes: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    heads = ("parameters", "s", f"{YARDSTICK} s", "ratio", "runs", "CPU runs", "peak MiB by rank")
    for title in (*heads, YARDSTICK, "loss gap"):
        table.add_column(title, justify="right")
    for size, of in sizes.items():
        peaks = of.get("peaks", {})
        for name, row in of["rows"].items():
            table.add_row(
                f"{name}, {size}",
                f"{of['parameters'] / 1e6:.1f}M",
                f"{row['seconds']:.3f}",
                f"{row['yardstick_seconds']:.3f}",
                f"{row['ratio']:.3f}",
                " ".join(f"{x:.2f}" for x in row["runs"]),
                " ".join(f"{x:.2f}" for x in row["runs_cpu"]),
                *(mebibytes(peaks.get(each, ())) for each in (name, YARDSTICK)),
                f"{row['loss_gap']:.0e}",
            )
    if table.row_count:
        console.print(table)


def mebibytes(sizes: Sequence[int]) -> str:
    return " ".join(f"{x / MIB:.0f}" for x in sizes)


def print_phases(sizes: dict[str, Any], console: Console) -> None:
    """Where torch's step spends its time."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("torch, ms a step", no_wrap=True)
    shown = {size: of for size, of in sizes.items() if "phases" in of}
    for name in next(iter(shown.values()))["phases"][0] if shown else ():
        table.add_column(name, justify="right")
    for size, of in shown.items():
        for rank, phases in enumerate(of["phases"]):
            cells = (f"{x:.1f}" for x in phases.values())
            table.add_row(f"{size} ({of['parameters'] / 1e6:.1f}M), rank {rank}", *cells)
        if "peaks" in of:
            console.print(f"{size}: torch peaks at {mebibytes(of['peaks'][YARDSTICK])} MiB by rank")
    if shown:
        console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=["7M", "30M"], help="default: 7M 30M")
    add(
        "--peers",
        nargs="+",
        choices=(YARDSTICK, *OURS),
        default=[*OURS],
        help=f"schedules of ours; with {YARDSTICK} also where its time goes (default: all of ours)",
    )
    add("--runs", type=int, default=5, help="times that ranks start anew (%(default)s)")
    add("--warmup", type=int, default=3, help="untimed turns of each run (%(default)s)")
    add("--turns", type=int, default=20, help="timed turns of each run (%(default)s)")
    add("--no-memory", action="store_true", help="measure time alone")
    add("--sleep", action="store_true", help="layers that sleep, on 4 ranks, and nothing else")
    add("--dry-run", action="store_true", help="a small model, few turns; judge nothing")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), Console(width=max(Console().width, 140))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.dry_run:
        args.sizes, args.runs, args.warmup, args.turns = ["dry"], 1, 1, 3
    told = {k: v for k, v in vars(args).items() if k != "out"}
    if args.sleep:
        found = report.record("pipeline-sleep", told, pipeline_sleep.SCHEDULES)
        found |= pipeline_sleep.measured(args.dry_run, console)
        broken = pipeline_sleep.judge(found["rows"])
    else:
        found = report.record("pipeline", told, [YARDSTICK, *args.peers])
        found["sizes"] = {size: measured(args, size, console) for size in args.sizes}
        broken = judge(found["sizes"])
        print_table(found["sizes"], console)
        print_phases(found["sizes"], console)
    found["broken"] = [] if args.dry_run else broken
    for line in found["broken"]:
        console.print(f"[bold red]broken: {line}[/]")
    console.print(f"written: {report.write(found, args.out)}")
    sys.exit(1 if found["broken"] else 0)


if __name__ == "__main__":
    main()
