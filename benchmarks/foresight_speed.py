"""How long ``zf.foresee`` itself takes for a model of 175 billion parameters on 1,024 ranks.

    python -m benchmarks.foresight_speed
    python -m benchmarks.foresight_speed --layers 8      # fewer layers, nothing is judged

Two steps of a GPT of GPT-3's size (96 layers of width 12,288), all layers, place and two steps:

- stage 3: ZeRO over 1,024 ranks in bfloat16, rematerialized, microbatches of 8 x 1,024 tokens;
- 3D: 16 x 8 x 8 ranks (data, tensor, pipe), 16 microbatches, a rank of a middle stage.

Each runs in a process of its own, with one thread. The exit status is 1 where it takes longer than
promised: 120 s and 2 GB, and 180 s. Trust it on a quiet machine only.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import zfunc as zf
from benchmarks import report
from zfunc import optim
from zfunc.language import gpt

RESULTS = Path(__file__).parent / "results"
RANKS, LAYERS, TOKENS = 1024, 96, 1024
MESH = zf.mesh(data=16, tensor=8, pipe=8)
MICROBATCHES = 16
RANK = 3 * (RANKS // 8) + 5  # of the fourth stage of eight: the mesh's slowest axis is pipe
PROMISED = {"stage 3": (120.0, 2e9), "3D": (180.0, float("inf"))}  # seconds, bytes


def stage_3(layers: int) -> zf.Foreseen:
    shape = gpt.GPTConfig(vocab=51200, width=12288, depth=layers, heads=96)
    tx = optim.adamw(1e-4)
    step = zf.train_step(lambda params, ids: gpt.loss(params, ids, shape), tx)
    step = zf.precision(zf.donate(zf.shard(step, stage=3)), compute=torch.bfloat16)
    state = zf.TrainState.create(gpt.shapes(shape), tx)
    ids = torch.empty(8, TOKENS + 1, dtype=torch.int64, device="meta")
    return zf.foresee(zf.remat(step), state, ids, ranks=RANKS)


def three_dimensions(layers: int) -> zf.Foreseen:
    shape = gpt.GPTConfig(vocab=51200, width=12288, depth=layers, heads=96)
    tx = optim.adamw(1e-4)
    step = zf.train_step(lambda params, ids: gpt.loss(params, ids, shape), tx)
    step = zf.split(step, rules=gpt.rules(shape))
    step = zf.pipeline(step, microbatches=MICROBATCHES)
    step = zf.precision(zf.donate(zf.shard(step, stage=1, mesh=MESH)), compute=torch.bfloat16)
    state = zf.TrainState.create(gpt.shapes(shape), tx)
    ids = torch.empty(MICROBATCHES, TOKENS + 1, dtype=torch.int64, device="meta")
    return zf.foresee(zf.remat(step), state, ids, ranks=RANKS, rank=RANK)


CASES = {"stage 3": stage_3, "3D": three_dimensions}


def alone(name: str, layers: int) -> dict[str, Any]:
    """What a case says, and what it took."""
    torch.set_num_threads(1)
    begun, used = time.perf_counter(), time.process_time()
    seen = CASES[name](layers)
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - used,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": seen.state_bytes,
        "peak_bytes": seen.peak_bytes,
        "sent_bytes": seen.sent.total_bytes,
        "flops": seen.flops.total,
    }


def judged(found: dict[str, dict[str, Any]]) -> list[str]:
    """The promises that are broken."""
    broken = []
    for name, took in found.items():
        seconds, resident = PROMISED[name]
        if took["seconds"] > seconds:
            broken.append(f"{name}: {took['seconds']:.0f} s, at most {seconds:.0f} s")
        if took["resident_bytes"] > resident:
            had = took["resident_bytes"] / 1e9
            broken.append(f"{name}: {had:.2f} GB, at most {resident / 1e9:.2f} GB")
    return broken


def table(found: dict[str, dict[str, Any]]) -> Table:
    """For rich."""
    shown = Table(box=box.SIMPLE_HEAD)
    for title in ("", "s", "CPU s", "resident GB", "state GB", "peak GB", "sent GB", "TFLOPs"):
        shown.add_column(title, justify="right")
    for name, took in found.items():
        sizes = ("resident_bytes", "state_bytes", "peak_bytes", "sent_bytes")
        shown.add_row(
            name,
            f"{took['seconds']:.1f}",
            f"{took['cpu_seconds']:.1f}",
            *(f"{took[size] / 1e9:.2f}" for size in sizes),
            f"{took['flops'] / 1e12:.4g}",
        )
    return shown


def main() -> int:
    """The program; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foresight_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="default: both")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args, console = parser.parse_args(), Console()
    told = {"layers": args.layers, "ranks": RANKS}
    record = report.record("foresight_speed", told, args.cases)
    found: dict[str, dict[str, Any]] = {}
    for name in args.cases:
        found[name] = zf.launch(alone, name, args.layers, nprocs=1)[0]
    console.print(table(found))
    broken = judged(found) if args.layers == LAYERS else []
    for line in broken:
        console.print(f"[bold red]broken: {line}[/]")
    record |= {"cases": found, "broken": broken}
    console.print(f"written: {report.write(record, args.out)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
