"""Step times of each contestant and the yardstick, alive in the same ranks, step by step in turn.

Between a run and the next a shared machine may drift by ten per cent; between a step and the next
it hardly does. So this mode resolves differences that fresh processes cannot, and says nothing of
memory. Who begins alternates. Each pair has ranks of its own: where six contestants shared a
process, whose freed pages were cleared in whose step made more difference than their code.
Everybody has the same allocator: its threshold is pinned, and large pages are on or off for all.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice
from statistics import fmean, median, quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zfunc as zf
from benchmarks import report
from benchmarks.models import SIZES, batches, build
from benchmarks.peers import load


def take_turns(peers: list[str], size_name: str, warmup: int, turns: int) -> dict[str, Any]:
    """One rank: seconds (after the warm-up) and losses of each contestant, step by step."""
    torch.set_num_threads(1)
    size = SIZES[size_name]
    running = {name: load(name).build(build(size)) for name in peers}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    cpu: dict[str, list[float]] = {name: [] for name in peers}
    losses: dict[str, list[float]] = {name: [] for name in peers}
    stream = list(islice(batches(size, zf.rank()), warmup + turns))
    shown = track(stream, "turns", console=Console(stderr=True), disable=zf.rank() != 0)
    for turn, ids in enumerate(shown):
        first = turn % len(peers)
        for name in peers[first:] + peers[:first]:
            torch.distributed.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name].append(float(running[name].step(ids)))
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - used)
    params = sum(p.numel() for p in build(size).parameters())
    return {"params": params, "seconds": seconds, "cpu": cpu, "losses": losses}


def by_step(seen: list[dict[str, Any]], what: str, name: str) -> list[tuple[float, ...]]:
    """What the ranks saw of one contestant: a tuple over ranks for each step."""
    return list(zip(*(rank[what][name] for rank in seen), strict=True))


def summarise_one(seen: list[dict[str, Any]], name: str, yardstick: str) -> dict[str, Any]:
    """One row: a ratio compares two steps of one turn, each as slow as its slowest rank."""
    own, base = ([max(step) for step in by_step(seen, "seconds", of)] for of in (name, yardstick))
    losses, expected = (
        [fmean(step) for step in by_step(seen, "losses", of)] for of in (name, yardstick)
    )
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    quarter, middle, three_quarters = quantiles(ratios, n=4, method="inclusive")
    return {
        "step_seconds_median": median(own),
        "yardstick_seconds_median": median(base),
        "step_seconds_min": min(own),
        "cpu_seconds": median(max(step) for step in by_step(seen, "cpu", name)),
        "ratio_median": middle,
        "ratio_quartiles": [quarter, three_quarters],
        "ratio_of_minima": min(own) / min(base),
        "loss_gap": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    """The rows as a table for people."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in (
        "step s",
        f"{found['yardstick']} s",
        f"/ {found['yardstick']}",
        "quartiles",
        "minima",
        "CPU s",
        "loss gap",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in found["contestants"].items():
        low, high = row["ratio_quartiles"]
        table.add_row(
            name,
            f"{row['step_seconds_median']:.3f}",
            f"{row['yardstick_seconds_median']:.3f}",
            f"{row['ratio_median']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['ratio_of_minima']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['loss_gap']:.0e}",
        )
    console.print(table)


def compare(args: argparse.Namespace, peers: list[str], console: Console) -> int:
    """Launch the ranks, print the table, write the JSON; 1 if losses disagree."""
    # One process, one allocator: what zf.init would choose is what everybody gets.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")
    turns, yardstick = args.rounds * args.steps, peers[0]
    pairs = {
        name: zf.launch(
            take_turns, [yardstick, name], args.size, args.warmup, turns, nprocs=args.ranks
        )
        for name in peers[1:]
    }
    rows = {name: summarise_one(seen, name, yardstick) for name, seen in pairs.items()}
    facts = {key: value for key, value in vars(args).items() if key not in ("out", "peers")}
    found = report.record("turns", facts, peers) | {
        "params": next(iter(pairs.values()))[0]["params"],
        "yardstick": yardstick,
        "contestants": rows,
        "losses_agree": all(row["loss_gap"] <= report.LOSS_TOLERANCE for row in rows.values()),
        "ranks": pairs,
    }
    pages = "on" if os.environ["THP_MEM_ALLOC_ENABLE"] == "1" else "off"
    console.print(
        f"{found['params'] / 1e6:.1f}M parameters, {args.ranks} gloo ranks, one thread each, "
        f"{turns} turns, large pages {pages} for all"
    )
    print_table(found, console)
    console.print(f"written: {report.write(found, args.out)}")
    return 0 if found["losses_agree"] else 1
