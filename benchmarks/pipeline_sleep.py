"""Layers that sleep, on four ranks: does a pipeline take as long as its schedule says?

``python -m benchmarks.pipeline --sleep``. A layer's forward, the gradient of its input and that of
its weight take 20 ms each, in which the processor is free: four ranks fit on any machine, and what
a step takes is the order of its actions, the waits for messages, and what lies between actions.
A system wakes nobody in time, some later than others: what is planned is what a sleep of 20 ms
takes here while all ranks sleep, which is measured before each schedule and printed.

Gradients of input and weight are nodes of their own. One ``autograd.Function`` with both computes
both whenever autograd comes by: ``ctx.needs_input_grad`` says what required grad in forward, not
what this backward was asked for (torch 2.13).
"""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import Function

import zfunc as zf

RANKS, MICROBATCHES, LAYERS, WIDTH = 4, 8, 8, 4
# Chunks of a rank.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zb_lean": 1, "zbv": 2}
GAP_MOST = 0.1
PLAIN, FASTER = "1f1b", ("zb", "zb_lean", "zbv")  # those with less of a bubble
SECONDS, DRY_SECONDS = 0.02, 0.002
SLEEPS = 20  # whose mean is what one takes


class Passing(Function):
    """A stream as it is, after a while; backward takes as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class Weighing(Function):
    """A weight as it is, at once; its gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class Layer(nn.Module):
    """``[B, D] -> [B, D]``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = Passing.apply(x, self.seconds)
        return passed + Weighing.apply(self.weight, self.seconds)


class Model(nn.Module):
    """A table in front, so that the first layer's input has a gradient like all others."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)
        self.layers = nn.ModuleList(Layer(seconds) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def slept(seconds: float) -> float:
    """What a sleep of so many seconds takes, while all ranks sleep."""
    took = []
    dist.barrier()
    for _ in range(SLEEPS):
        begun = time.perf_counter()
        time.sleep(seconds)
        took.append(time.perf_counter() - begun)
    return fmean(took)


def timed(schedule: str, seconds: float, warmup: int, turns: int) -> dict[str, Any]:
    """One rank: seconds of each step, and what the schedule says."""
    model, tx = zf.functionalize(Model(seconds)), zf.optim.sgd(0.01)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return model.apply(params, ids)

    chunks = RANKS * SCHEDULES[schedule]
    step = zf.pipeline(
        zf.donate(zf.train_step(loss_fn, tx)),
        microbatches=MICROBATCHES,
        schedule=schedule,
        partition=range(0, LAYERS + 1, LAYERS // chunks),
        pipe=RANKS,
    )
    state = step.place(zf.TrainState.create(model.params, tx))
    takes = slept(seconds)
    found, cpu = [], []
    for _ in range(warmup + turns):
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        state, metrics = step(state, torch.zeros(MICROBATCHES, dtype=torch.long))
        float(metrics["loss"])
        found.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
    plan: Any = next(t for t in step.transforms if t.name == "pipeline")
    chunk = takes * LAYERS / chunks
    cost = {"F": chunk, "B": 2 * chunk, "I": chunk, "W": chunk}
    planned = plan.plan.makespan(cost)
    return {"seconds": found[warmup:], "cpu": cpu[warmup:], "planned": planned, "sleep": takes}


def every(schedules: list[str], seconds: float, warmup: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {name: timed(name, seconds, warmup, turns) for name in schedules}


def measured(dry: bool, console: Console) -> dict[str, Any]:
    """All schedules: what a step takes, as its slowest rank saw it, over what is planned."""
    how = (DRY_SECONDS, 1, 2) if dry else (SECONDS, 2, 5)
    seen = zf.launch(every, [*SCHEDULES], *how, nprocs=RANKS)
    rows = {name: row([rank[name] for rank in seen]) for name in SCHEDULES}
    print_table(rows, console)
    return {"rows": rows, "ranks": seen}


def row(ranks: list[dict[str, Any]]) -> dict[str, float]:
    steps = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    took, planned = median(steps), median(rank["planned"] for rank in ranks)
    found = {"seconds": took, "planned": planned, "ratio": took / planned}
    found["cpu"] = max(median(rank["cpu"]) for rank in ranks)
    return {**found, "sleep": median(rank["sleep"] for rank in ranks)}


def judge(rows: dict[str, dict[str, float]]) -> list[str]:
    """The promises that are broken."""
    broken = [
        f"{name} takes {of['ratio']:.3f} of what its schedule says, at most {1 + GAP_MOST}"
        for name, of in rows.items()
        if of["ratio"] > 1 + GAP_MOST
    ]
    return broken + [
        f"{name} is not faster than {PLAIN}"
        for name in FASTER
        if rows[name]["seconds"] >= rows[PLAIN]["seconds"]
    ]


def print_table(rows: dict[str, dict[str, float]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{RANKS} ranks, {MICROBATCHES} microbatches", no_wrap=True)
    for title in ("s", "planned s", "ratio", "CPU s of the busiest rank", "s of a sleep"):
        table.add_column(title, justify="right")
    for name, of in rows.items():
        cells = (of[key] for key in ("seconds", "planned", "ratio", "cpu", "sleep"))
        table.add_row(name, *(f"{x:.4f}" for x in cells))
    console.print(table)
