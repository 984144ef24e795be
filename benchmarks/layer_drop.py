"""Progressive layer dropping against the full model: time, work, bytes, and loss.

A byte-level GPT of 12 layers trains on the corpus that every Python ships, at ZeRO stage 3.

First the cost in steady state (theta has arrived): full and dropping steps take turns in the same
ranks, so what the machine does meanwhile falls on both. Then the loss at equal time: the full model
trains for ``--steps``, the dropping one for as many as fit into the same time at the cost measured,
each on its own cosine; they are scored on held-out text.

    python -m benchmarks.layer_drop
    python -m benchmarks.layer_drop --steps 400 --turns 60 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

import zfunc as zf
from benchmarks.meters import hardware, versions
from zfunc.commands.training import Run, make_step, optimizer, validate
from zfunc.language import gpt
from zfunc.language.corpus import batch_at, read_corpus
from zfunc.language.gpt import GPTConfig

STEADY = 10**6  # steps after which theta has arrived
KINDS = ("full", "dropping")
MODEL = GPTConfig(width=192, depth=12, heads=4)


def step_of(kind: str, run: Run, tx: Any, sharded: bool = True) -> Any:
    step: Any = make_step(run, tx)
    if kind == "dropping":
        step = zf.drop_layers(step, theta=run.drop or 1.0, gamma=100 / run.steps)
    return zf.donate(zf.shard(step, stage=3) if sharded else step)


def fresh(step: Any, run: Run, tx: Any) -> Any:
    params = gpt.init(run.model, zf.random.key(run.seed))
    return step.place(zf.TrainState.create(params, tx, key=run.seed))


def batches(run: Run) -> Callable[[int], Any]:
    corpus = read_corpus(run.data, context=run.context)
    return lambda n: batch_at(n, corpus.train, run.batch, run.context, run.seed)


def costs(run: Run, turns: int) -> dict[str, dict[str, float]]:
    """Mean seconds and bytes per step of each kind; the kinds take turns."""
    torch.set_num_threads(1)
    tx, batch = optimizer(run), batches(run)
    steps = {kind: step_of(kind, run, tx) for kind in KINDS}
    states = {kind: fresh(step, run, tx) for kind, step in steps.items()}
    for kind in KINDS:
        states[kind], _ = steps[kind](states[kind], zf.local_batch(batch(0)))  # all layers run
        states[kind] = states[kind].replace(step=torch.tensor(STEADY))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for n in range(turns):
        for kind in KINDS if n % 2 else reversed(KINDS):
            mine, start = zf.local_batch(batch(n)), time.perf_counter()
            with zf.comm.ledger() as led:
                states[kind], metrics = steps[kind](states[kind], mine)
            float(metrics["loss"])
            seconds[kind].append(time.perf_counter() - start)
            sent[kind].append(led.total_bytes)
    return {k: {"seconds": fmean(seconds[k]), "bytes": fmean(sent[k])} for k in KINDS}


def work(run: Run, turns: int) -> dict[str, float]:
    """Mean floating-point operations per step of each kind, forward and backward, on one rank."""
    tx, batch, out = optimizer(run), batches(run), {}
    for kind in KINDS:
        step = step_of(kind, run, tx, sharded=False)
        state = fresh(step, run, tx)
        state, _ = step(state, batch(0))
        state = state.replace(step=torch.tensor(STEADY))
        with FlopCounterMode(display=False) as counter:
            for n in range(turns):
                state, _ = step(state, batch(n))
        out[kind] = counter.get_total_flops() / turns
    return out


def train(run: Run, kind: str) -> dict[str, Any]:
    """Validation loss and wall time of one run, scoring not counted."""
    torch.set_num_threads(1)
    tx, corpus = optimizer(run), read_corpus(run.data, context=run.context)
    step = step_of(kind, run, tx)
    state, seconds, curve = fresh(step, run, tx), 0.0, []
    for n in range(run.steps):
        batch = batch_at(n, corpus.train, run.batch, run.context, run.seed)
        start = time.perf_counter()
        state, metrics = step(state, zf.local_batch(batch))
        curve.append(float(metrics["loss"]))
        seconds += time.perf_counter() - start
    val = validate(state.params, corpus.heldout, run, torch.device("cpu"))
    return {"steps": run.steps, "seconds": seconds, "val_loss": val, "curve": curve}


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"12 layers, stage 3, 2 gloo ranks, theta {result['theta']:g}")
    for head in ("", "s / step", "GFLOP / step", "KiB sent / step", "steps", "run s", "val loss"):
        table.add_column(head, justify="right" if head else "left")
    for kind in KINDS:
        cost, runs = result["cost"][kind], result["runs"][kind]
        table.add_row(
            kind,
            f"{cost['seconds']:.4f}",
            f"{result['flops'][kind] / 1e9:.2f}",
            f"{cost['bytes'] / 1024:.0f}",
            str(runs[0]["steps"]) if runs else "-",
            f"{fmean(r['seconds'] for r in runs):.0f}" if runs else "-",
            " ".join(f"{r['val_loss']:.4f}" for r in runs) or "-",
        )
    full, less = (result["cost"][kind] for kind in KINDS)
    table.caption = (
        f"time per sample {1 - less['seconds'] / full['seconds']:.1%} lower, work "
        f"{1 - result['flops']['dropping'] / result['flops']['full']:.1%}, bytes "
        f"{1 - less['bytes'] / full['bytes']:.1%}"
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=100, help="steps of each kind that are timed")
    parser.add_argument("--steps", type=int, default=0, help="steps of the full model's training")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    console = Console()
    base = Run(model=MODEL, batch=16, context=128, steps=max(args.steps, 1), drop=args.theta)

    def ranks(fn: Callable[..., Any], *given: Any) -> Any:
        return zf.launch(fn, *given, nprocs=2)[0]

    with console.status("time and bytes, taking turns"):
        cost = ranks(costs, base, args.turns)
    with console.status("floating-point operations"):
        flops = work(base, args.turns // 4 + 1)
    runs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    ratio = cost["full"]["seconds"] / cost["dropping"]["seconds"]
    for seed in args.seeds if args.steps else []:
        for kind, steps in zip(KINDS, (args.steps, round(args.steps * ratio)), strict=True):
            with console.status(f"training: {kind}, {steps} steps, seed {seed}"):
                runs[kind].append(ranks(train, replace(base, steps=steps, seed=seed), kind))
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "theta": args.theta,
        "cost": cost,
        "flops": flops,
        "runs": runs,
    }
    show(result, console)
    path = args.out / f"layer_drop-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
