"""Layers that sleep, on four ranks: does a pipeline take as long as its schedule says?

``python -m benchmarks.pipeline --sleep``. A layer's forward, the gradient of its input and that of
its weight take 20 ms each, in which the processor is free: four ranks fit on any machine, and what
a step takes is the order of its actions, the waits for messages, and what lies between actions.
A system wakes nobody in time, some later than others: what is planned is what a sleep of 20 ms
takes here while all ranks sleep, which is measured before each schedule and printed.

Gradients of input and weight are nodes of their own. One ``autograd.Function`` with both computes
both whenever autograd comes by: ``ctx.needs_input_grad`` says what required grad in forward, not
what this backward was asked for (torch 2.13).

torch's schedules of the same names run the same layers, cut by hand, in the same processes. Their
step ends with the optimizer of each rank; ours also tells all ranks the loss and takes the norm of
all gradients.
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
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
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


class Stream(nn.Module):
    """Some of the layers, behind a table if the first is among them, so that its input has a
    gradient like all others."""

    def __init__(self, seconds: float, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH) if first == 0 else nn.Identity()
        self.layers = nn.ModuleList(Layer(seconds) for _ in range(first, last))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(Stream):
    """The whole, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


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
    torch.manual_seed(0)
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


def peer(schedule: str, seconds: float, warmup: int, turns: int) -> list[float]:
    """One rank: seconds of each step of torch's schedule."""
    from torch.distributed import pipelining

    rank, chunks = dist.get_rank(), RANKS * SCHEDULES[schedule]
    own = [rank]
    if chunks > RANKS:
        own.append(chunks - 1 - rank if schedule == "zbv" else RANKS + rank)
    stages = []
    for k in own:
        first, last = LAYERS * k // chunks, LAYERS * (k + 1) // chunks
        part = Stream(seconds, first, last)
        stages.append(pipelining.PipelineStage(part, k, chunks, torch.device("cpu")))
    run = getattr(pipelining, PEERS[schedule])(
        stages if len(stages) > 1 else stages[0],
        MICROBATCHES,
        loss_fn=lambda x, _: x.square().mean(),
    )
    weights = [x for stage in stages for x in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    found = []
    for _ in range(warmup + turns):
        ids = torch.zeros(MICROBATCHES, dtype=torch.long)
        dist.barrier()
        begun = time.perf_counter()
        given, losses = (ids,) if 0 in own else (), list[Tensor]()
        asked = {"target": ids, "losses": losses} if chunks - 1 in own else {}
        run.step(*given, **asked, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - begun)
    return found[warmup:]


def every(schedules: list[str], seconds: float, warmup: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    how, found = (seconds, warmup, turns), dict[str, Any]()
    for name in schedules:
        found[name] = timed(name, *how)
        if name in PEERS:
            found[name]["torch"] = peer(name, *how)
    return found


def measured(dry: bool, console: Console) -> dict[str, Any]:
    """All schedules: what a step takes, as its slowest rank saw it, over what is planned."""
    how = (DRY_SECONDS, 1, 2) if dry else (SECONDS, 2, 5)
    seen = zf.launch(every, [*SCHEDULES], *how, nprocs=RANKS)
    rows = {name: row([rank[name] for rank in seen]) for name in SCHEDULES}
    print_table(rows, console)
    return {"rows": rows, "ranks": seen}


def slowest(ranks: list[dict[str, Any]], whose: str) -> float:
    """Seconds of a step, as its slowest rank saw it."""
    return median(max(step) for step in zip(*(rank[whose] for rank in ranks), strict=True))


def row(ranks: list[dict[str, Any]]) -> dict[str, float]:
    took, planned = slowest(ranks, "seconds"), median(rank["planned"] for rank in ranks)
    found = {"seconds": took, "planned": planned, "ratio": took / planned}
    if "torch" in ranks[0]:
        found["torch"] = slowest(ranks, "torch")
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
    for title in ("s", "planned s", "ratio", "torch's s", "CPU s of the busiest rank", "a sleep s"):
        table.add_column(title, justify="right")
    for name, of in rows.items():
        cells = (of.get(key) for key in ("seconds", "planned", "ratio", "torch", "cpu", "sleep"))
        table.add_row(name, *("" if x is None else f"{x:.4f}" for x in cells))
    console.print(table)
