"""Progressive layer dropping against the full model: time, work, bytes, and loss.

A byte-level GPT of 12 layers trains on the corpus that every Python ships, at ZeRO stage 3.

First the cost in steady state (theta has arrived): full and dropping steps take turns in the same
ranks, so what the machine does meanwhile falls on both. Coins are coins, so the time saved is told
for the mean number of layers that they keep in the long run, too. Then, with ``--steps``, the loss
at equal time: the full model trains for so many steps, the dropping one for as many as fit into the
same time at the cost measured, each on its own cosine; both are scored on held-out text on the way.

    python -m benchmarks.layer_drop
    python -m benchmarks.layer_drop --turns 40 --steps 3000 --width 64

The exit status is 1 where less than 22 % of the time is saved (theta 0.5, width 192 or more), or a
dropping run ends above the full one of as much time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, linear_regression
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
from zfunc.transforms.layer_drop import keep_probability

STEADY = 10**6  # steps after which theta has arrived
KINDS = ("full", "dropping")
DEPTH = 12
WIDTH = 192  # in narrower layers Python takes much of the time, and it is not promised
SAVED = 0.22  # of the time, promised for theta 0.5
POINTS = 12  # of each curve


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
    """Mean seconds and bytes per step of each kind, and layers run; the kinds take turns.

    ``seconds`` of the dropping kind is the mean as it was, ``expected`` that at the number of
    layers which coins keep in the long run, by a straight line through its own steps.
    """
    torch.set_num_threads(1)
    tx, batch = optimizer(run), batches(run)
    steps = {kind: step_of(kind, run, tx) for kind in KINDS}
    states = {kind: fresh(step, run, tx) for kind, step in steps.items()}
    for kind in KINDS:
        states[kind], _ = steps[kind](states[kind], zf.local_batch(batch(0)))  # all layers run
        states[kind] = states[kind].replace(step=torch.tensor(STEADY))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    layers: list[float] = []
    for n in range(turns):
        for kind in KINDS if n % 2 else reversed(KINDS):
            mine, start = zf.local_batch(batch(n)), time.perf_counter()
            with zf.comm.ledger() as led:
                states[kind], metrics = steps[kind](states[kind], mine)
            float(metrics["loss"])
            seconds[kind].append(time.perf_counter() - start)
            sent[kind].append(led.total_bytes)
            if kind == "dropping":
                layers.append(sum(label.startswith("reduce blocks.") for label in led.by_label))
    slope, intercept = linear_regression(layers, seconds["dropping"])
    kept = sum(keep_probability(i, DEPTH, run.drop or 1.0) for i in range(DEPTH))
    out = {k: {"seconds": fmean(seconds[k]), "bytes": fmean(sent[k])} for k in KINDS}
    out["full"] |= {"expected": out["full"]["seconds"], "layers": DEPTH}
    out["dropping"] |= {"expected": intercept + slope * kept, "layers": fmean(layers)}
    return out


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
    """Losses and wall time of one run, scoring not counted."""
    torch.set_num_threads(1)
    tx, corpus = optimizer(run), read_corpus(run.data, context=run.context)
    step, scored = step_of(kind, run, tx), -(-run.steps // POINTS)
    state, seconds, curve, points = fresh(step, run, tx), 0.0, [], []
    for n in range(run.steps):
        batch = batch_at(n, corpus.train, run.batch, run.context, run.seed)
        start = time.perf_counter()
        state, metrics = step(state, zf.local_batch(batch))
        curve.append(float(metrics["loss"]))
        seconds += time.perf_counter() - start
        if (n + 1) % scored == 0 or n + 1 == run.steps:
            val = validate(state.params, corpus.heldout, run, torch.device("cpu"))
            points.append((n + 1, val))
    last = {"kind": kind, "seed": run.seed, "steps": run.steps, "seconds": seconds}
    return {**last, "val_loss": points[-1][1], "points": points, "curve": curve}


def saved(result: dict[str, Any], what: str) -> float:
    full, less = (result["cost"][kind][what] for kind in KINDS)
    return float(1 - less / full)


def show(result: dict[str, Any], console: Console) -> None:
    theta, cost = result["theta"], result["cost"]
    title = f"{DEPTH} layers of width {result['width']}, stage 3, 2 gloo ranks, theta {theta:g}"
    table = Table(title=title)
    for head in ("", "layers", "s / step", "GFLOP / step", "KiB sent / step"):
        table.add_column(head, justify="right" if head else "left")
    for kind in KINDS:
        table.add_row(
            kind,
            f"{cost[kind]['layers']:.2f}",
            f"{cost[kind]['seconds']:.4f}",
            f"{result['flops'][kind] / 1e9:.2f}",
            f"{cost[kind]['bytes'] / 1024:.0f}",
        )
    table.caption = (
        f"time per sample {saved(result, 'seconds'):.1%} lower with the layers of these turns, "
        f"{saved(result, 'expected'):.1%} with those of the long run; work "
        f"{1 - result['flops']['dropping'] / result['flops']['full']:.1%}, bytes "
        f"{saved(result, 'bytes'):.1%}"
    )
    console.print(table)
    for full, less in result["pairs"]:
        console.print(
            f"seed {full['seed']}, {full['steps'] * cost['full']['expected']:.0f} s: full "
            f"{full['val_loss']:.4f} nats after {full['steps']} steps, dropping "
            f"{less['val_loss']:.4f} after {less['steps']}"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Validation loss against time, at the measured cost of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for pair in result["pairs"]:
        for run, colour in zip(pair, ("tab:blue", "tab:orange"), strict=True):
            cost = result["cost"][run["kind"]]["expected"]
            at, losses = zip(*run["points"], strict=True)
            first = pair is result["pairs"][0]
            label = run["kind"] if first else None
            axes.plot([n * cost for n in at], losses, ".-", color=colour, label=label)
    axes.set(xlabel="seconds", ylabel="held-out nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def kept(result: dict[str, Any], console: Console) -> bool:
    """Whether the promises hold, of those that were tried."""
    fine = True
    if result["theta"] == 0.5 and result["width"] >= WIDTH:
        fine = saved(result, "expected") >= SAVED
        console.print(f"{SAVED:.0%} of the time saved: {'kept' if fine else 'BROKEN'}")
    for full, less in result["pairs"]:
        better = less["val_loss"] <= full["val_loss"]
        word = "kept" if better else "BROKEN"
        console.print(f"no worse in the time of {full['steps']} full steps: {word}")
        fine &= better
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--turns", type=int, default=120, help="steps of each kind that are timed")
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="of the full model")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    console, model = Console(), GPTConfig(width=args.width, depth=DEPTH, heads=4)
    base = Run(model=model, batch=16, context=128, steps=1, drop=args.theta)

    def ranks(fn: Callable[..., Any], *given: Any) -> Any:
        return zf.launch(fn, *given, nprocs=2)[0]

    with console.status("time and bytes, taking turns"):
        cost = ranks(costs, base, args.turns)
    with console.status("floating-point operations"):
        flops = work(base, args.turns // 4 + 1)
    ratio = cost["full"]["expected"] / cost["dropping"]["expected"]
    pairs = []
    for budget in args.steps:
        for seed in args.seeds:
            pair = []
            for kind, steps in zip(KINDS, (budget, round(budget * ratio)), strict=True):
                with console.status(f"training: {kind}, {steps} steps, seed {seed}"):
                    pair.append(ranks(train, replace(base, steps=steps, seed=seed), kind))
            pairs.append(pair)
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "theta": args.theta,
        "width": args.width,
        "cost": cost,
        "flops": flops,
        "pairs": pairs,
    }
    show(result, console)
    path = args.out / f"layer_drop-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    if pairs:
        draw(result, path.with_suffix(".png"))
    console.print(f"written: {path}")
    return 0 if kept(result, console) else 1


if __name__ == "__main__":
    sys.exit(main())
