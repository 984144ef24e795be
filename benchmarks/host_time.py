"""Host time of a step that has almost nothing to compute: what Python and launches cost.

48 layers of width 32 on a handful of rows: torch alone, DDP, FSDP2 and zfunc's stages take the same
steps on the same data, on 1 and on 2 gloo ranks, one thread each. A GPU waits for its host wherever
these milliseconds exceed its own. Rounds alternate the contestants in the same processes; a
contestant's figure is the least step of its best round, in wall time and in CPU time.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --ranks 1 --peers torch ddp zfunc0
    python -m benchmarks.host_time --dry-run       # a few steps of everything, nothing is judged

"zfunc3" merges small layers as it does by default; in "zfunc3 layers" each layer is a unit.
Besides: 10,000 leaves of 3 elements at stage 3 on two simulated ranks, ``place`` and a step.

The exit status is 1 where a promise is broken: on 1 rank stages 0 to 2 within 1.25 of DDP and stage
3 within 1.5; on 2 ranks within 1.5 and 2; stage 3 by layer within half of FSDP2; ``place`` of the
10,000 leaves within 1 s, a step within 0.45 s. Trust it on a quiet machine only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zfunc as zf
from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN, ROWS = 32, 64, 8
BY_LAYER = 1 << 17  # unit_bytes under which a layer is a unit, and so is the root
PEERS = ("torch", "ddp", "fsdp2", "zfunc0", "zfunc1", "zfunc2", "zfunc3", "zfunc3 layers")
PROMISES = {  # ranks -> contestant -> (yardstick, most)
    1: {f"zfunc{stage}": ("ddp", 1.5 if stage == 3 else 1.25) for stage in range(4)}
    | {"zfunc3 layers": ("fsdp2", 0.5)},
    2: {f"zfunc{stage}": ("ddp", 2.0 if stage == 3 else 1.5) for stage in range(4)}
    | {"zfunc3 layers": ("fsdp2", 0.5)},
}
PLACE_S, STEP_S = 1.0, 0.45
LOSS_GAP = 1e-4  # relative, fp32: the order of additions may differ, nothing else

Advance = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Pre-LN residual MLP, ``[rows, WIDTH] -> [rows, WIDTH]``: six leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two linear maps, ``[rows, WIDTH] -> [rows, WIDTH]``."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


@dataclass(frozen=True)
class Plan:
    """What each contestant does in each round."""

    layers: int
    warmup: int
    steps: int
    rounds: int


def build(layers: int) -> Stack:
    """The model with the weights that every contestant starts from (seed 0)."""
    torch.manual_seed(0)
    return Stack(layers)


def torch_step(model: nn.Module) -> Advance:
    """The loop that torch's users write, with AdamW in its fused form."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def advance(x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return advance


def ddp_step(module: Stack) -> Advance:
    return torch_step(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))


def fsdp2_step(module: Stack) -> Advance:
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return torch_step(module)


def zfunc_step(module: Stack, stage: int, **how: Any) -> Advance:
    model = zf.functionalize(module)
    tx = zf.optim.adamw(1e-3)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (model.apply(params, x) - x).square().mean()

    step = zf.shard(zf.donate(zf.train_step(loss_fn, tx)), stage=stage, **how)
    state = step.place(zf.TrainState.create(model.params, tx))

    def advance(x: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, x)
        return metrics["loss"]

    return advance


def started(name: str, layers: int) -> Advance:
    """A contestant by name, ready to step."""
    return start(name, build(layers))


def start(name: str, module: Stack) -> Advance:
    if name.startswith("zfunc"):
        how = {"unit_bytes": BY_LAYER} if name.endswith("layers") else {}
        return zfunc_step(module, int(name[5]), **how)
    return {"torch": torch_step, "ddp": ddp_step, "fsdp2": fsdp2_step}[name](module)


def timed(advance: Advance, plan: Plan) -> dict[str, Any]:
    """Losses, and wall and CPU seconds of each step behind the warm-up."""
    draw = torch.Generator().manual_seed(1 + zf.rank())
    batches = [torch.randn(ROWS, WIDTH, generator=draw) for _ in range(plan.warmup + plan.steps)]
    seconds, cpu, losses = [], [], []
    for x in batches:
        if zf.world_size() > 1:
            dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        losses.append(float(advance(x)))
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return {"losses": losses, "seconds": seconds[plan.warmup :], "cpu": cpu[plan.warmup :]}


def rank(peers: list[str], plan: Plan) -> list[dict[str, Any]]:
    """One rank: every contestant in every round, each time from the start."""
    torch.set_num_threads(1)
    if not dist.is_initialized():  # one rank: DDP and FSDP2 want a group all the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rounds = []
    for turn in range(plan.rounds):
        first = turn % len(peers)
        order = peers[first:] + peers[:first]
        rounds.append({name: timed(started(name, plan.layers), plan) for name in order})
    return rounds


def collectives(ranks: int, plan: Plan) -> dict[str, int]:
    """Units and collectives per step of stage 3 by layer, by its own account."""

    module = build(plan.layers)  # here: the ranks are threads with one random generator

    def count() -> dict[str, int]:
        advance = start("zfunc3 layers", module)
        draw = torch.Generator().manual_seed(0)
        for _ in range(2):
            advance(torch.randn(ROWS, WIDTH, generator=draw))
        with zf.comm.ledger() as led:
            advance(torch.randn(ROWS, WIDTH, generator=draw))
        gathered = {label for label in led.by_label if label.startswith("gather ")}
        return {"units": len(gathered), "collectives": led.calls}

    return zf.simulate(max(2, ranks))(count)()[0]


def summarise(seen: list[list[dict[str, Any]]], peers: list[str]) -> dict[str, Any]:
    """Of each contestant the best round's least step, as slow as its slowest rank, in ms."""
    rows = {}
    for name in peers:
        best = {}
        for what in ("seconds", "cpu"):
            rounds = [
                min(max(step) for step in zip(*(one[k][name][what] for one in seen), strict=True))
                for k in range(len(seen[0]))
            ]
            best[what] = 1e3 * min(rounds)
        rows[name] = {"ms": best["seconds"], "cpu_ms": best["cpu"]}
    agreeing = [name for name in peers if len(seen) == 1 or name != "torch"]
    for name in agreeing:  # torch alone trains each rank by itself
        pairs = zip(mean_losses(seen, name), mean_losses(seen, agreeing[0]), strict=True)
        rows[name]["loss_gap"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return rows


def mean_losses(seen: list[list[dict[str, Any]]], name: str) -> list[float]:
    """A contestant's losses in the first round, means over the ranks."""
    return [fmean(step) for step in zip(*(one[0][name]["losses"] for one in seen), strict=True)]


def judge(rows: dict[str, Any], ranks: int) -> list[str]:
    """Fill in ratios; the promises that are broken."""
    broken = []
    for name, (yardstick, most) in PROMISES.get(ranks, {}).items():
        if name in rows and yardstick in rows:
            row, base = rows[name], rows[yardstick]
            row |= {"yardstick": yardstick, "most": most, "ratio": row["ms"] / base["ms"]}
            row["cpu_ratio"] = row["cpu_ms"] / base["cpu_ms"]
            if row["ratio"] > most:
                broken.append(f"{name}: {row['ratio']:.2f} of {yardstick}, ranks: {ranks}")
    for name, row in rows.items():
        if row.get("loss_gap", 0.0) > LOSS_GAP:
            broken.append(f"{name}: losses differ by {row['loss_gap']:.0e}, ranks: {ranks}")
    return broken


def many_leaves(count: int, steps: int) -> dict[str, float]:
    """Seconds of ``place`` and of the best step of many tiny leaves, two simulated ranks."""

    def run() -> tuple[float, float]:
        tx = zf.optim.adamw(1e-3)
        params = {f"leaf{i}": torch.full((3,), 1.0) for i in range(count)}

        def loss_fn(params: Any, batch: Tensor) -> Tensor:
            return torch.cat(list(params.values())).mul(batch).square().sum()

        step = zf.shard(zf.donate(zf.train_step(loss_fn, tx)), stage=3)
        state = zf.TrainState.create(params, tx)
        start = time.perf_counter()
        state = step.place(state)
        placed = time.perf_counter() - start
        best = float("inf")
        for _ in range(steps):
            start = time.perf_counter()
            state, _metrics = step(state, torch.tensor(0.5))
            best = min(best, time.perf_counter() - start)
        return placed, best

    placed, stepped = zip(*zf.simulate(2)(run)(), strict=True)
    return {"leaves": count, "place_s": max(placed), "step_s": max(stepped)}


def print_table(rows: dict[str, Any], ranks: int, console: Console) -> None:
    table = Table(title=f"{ranks} rank{'s' * (ranks > 1)}", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for title in ("ms", "CPU ms", "ratio", "CPU ratio", "promised", "loss gap"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows.items():
        ratio = ["", "", ""]
        if "ratio" in row:
            most = f"<= {row['most']} {row['yardstick']}"
            ratio = [f"{row['ratio']:.2f}", f"{row['cpu_ratio']:.2f}", most]
        gap = f"{row['loss_gap']:.0e}" if "loss_gap" in row else ""
        figures = (f"{row['ms']:.2f}", f"{row['cpu_ms']:.2f}", *ratio, gap)
        table.add_row(name, *figures)
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    add("--layers", type=int, default=48, help="blocks (%(default)s)")
    add("--warmup", type=int, default=8, help="untimed steps of each round (%(default)s)")
    add("--steps", type=int, default=30, help="timed steps of each round (%(default)s)")
    add("--rounds", type=int, default=2, help="times that each contestant runs (%(default)s)")
    add("--leaves", type=int, default=10_000, help="tiny leaves; 0: leave them out (%(default)s)")
    add("--dry-run", action="store_true", help="few steps of a small model; judge nothing")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    return parser.parse_args()


def headline(found: dict[str, Any], plan: Plan) -> str:
    machine = found["hardware"]
    return (
        f"{found['date']} · {machine['cpu']}, {machine['cores']} cores · torch "
        f"{found['versions']['torch']}\n{plan.layers} layers of width {WIDTH}, {ROWS} rows a rank, "
        f"the least of {plan.steps} steps after {plan.warmup}, best of {plan.rounds} rounds"
    )


def run(args: argparse.Namespace, plan: Plan, console: Console) -> dict[str, Any]:
    """Measure all that is asked for, and print it; ``broken`` lists the promises not kept."""
    found = report.record(
        "host_time", {k: v for k, v in vars(args).items() if k != "out"}, args.peers
    )
    console.print(headline(found, plan))
    broken: list[str] = []
    found["ranks"] = {}
    for ranks in args.ranks:
        rows = summarise(zf.launch(rank, args.peers, plan, nprocs=ranks), args.peers)
        broken += judge(rows, ranks)
        print_table(rows, ranks, console)
        found["ranks"][ranks] = rows
    if "zfunc3 layers" in args.peers:
        found["by_layer"] = counted = collectives(max(args.ranks), plan)
        console.print(
            f"stage 3 by layer: {counted['units']} units, {counted['collectives']} collectives"
        )
    if args.leaves:
        found["many_leaves"] = many = many_leaves(args.leaves, 2 if args.dry_run else 5)
        console.print(
            f"{args.leaves} leaves of 3, stage 3, two simulated ranks: place "
            f"{many['place_s']:.2f} s (promised {PLACE_S}), a step {many['step_s']:.3f} s "
            f"(promised {STEP_S})"
        )
        broken += [f"place took {many['place_s']:.2f} s"] * (many["place_s"] > PLACE_S)
        broken += [f"a step took {many['step_s']:.3f} s"] * (many["step_s"] > STEP_S)
    return found | {"broken": [] if args.dry_run else broken}


def main() -> None:
    args, console = arguments(), Console(width=max(Console().width, 100))
    plan = Plan(args.layers, args.warmup, args.steps, args.rounds)
    if args.dry_run:
        plan, args.leaves = Plan(4, 2, 3, 1), min(args.leaves, 100)
    found = run(args, plan, console)
    for line in found["broken"]:
        console.print(f"[bold red]broken: {line}[/]")
    console.print(f"written: {report.write(found, args.out)}")
    sys.exit(1 if found["broken"] else 0)


if __name__ == "__main__":
    main()
