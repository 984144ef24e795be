"""One rank of one run, in a process of its own: step, measure, write what was seen as JSON.

The baseline of memory is what is resident after all imports, before the model exists. The peak is
read twice: with set-up included, and of the steps alone (the kernel's mark is reset after set-up).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import meters
from benchmarks.models import SIZES, batches, build
from benchmarks.peers import CONTESTANTS, load


@dataclass(frozen=True)
class Seen:
    """What one rank saw: seconds, bytes, losses. ``losses`` start at the first warm-up step."""

    params: int
    losses: list[float]
    seconds: list[float]  # of each timed step
    cpu_seconds: float  # per timed step
    lo_bytes: float  # per timed step, of all ranks on this machine together
    ledger_bytes: float | None  # per timed step, of this rank, by the contestant's own account
    peak: int  # bytes above the baseline, while stepping
    peak_with_setup: int


def measure(name: str, size_name: str, warmup: int, steps: int) -> Seen:
    """Run one contestant for ``warmup + steps`` steps on this rank of the group."""
    size = SIZES[size_name]
    contestant = load(name)
    baseline = meters.status_bytes("VmRSS")
    contestant.join()
    module = build(size)
    params = sum(p.numel() for p in module.parameters())
    running = contestant.build(module)
    del module
    gc.collect()
    setup_peak = meters.status_bytes("VmHWM")
    meters.forget_peak()

    stream = batches(size, dist.get_rank())
    losses = [float(running.step(ids)) for ids in islice(stream, warmup)]
    timed = list(islice(stream, steps))
    seconds: list[float] = []
    dist.barrier()
    lo, cpu = meters.loopback_bytes(), time.process_time()
    with running.ledger() as led:
        for ids in timed:
            start = time.perf_counter()
            losses.append(float(running.step(ids)))
            seconds.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    dist.barrier()
    lo = meters.loopback_bytes() - lo

    peak = meters.status_bytes("VmHWM")
    return Seen(
        params=params,
        losses=losses,
        seconds=seconds,
        cpu_seconds=cpu / steps,
        lo_bytes=lo / steps,
        ledger_bytes=None if led is None else led.total_bytes / steps,
        peak=peak - baseline,
        peak_with_setup=max(peak, setup_peak) - baseline,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", choices=CONTESTANTS, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seen = measure(args.name, args.size, args.warmup, args.steps)
    (args.out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(asdict(seen)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
