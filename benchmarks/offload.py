"""A model that is much larger than the memory it trains in: state on disk against state in memory.

    python -m benchmarks.offload                     # some 170M parameters, 2 GB of Adam state
    python -m benchmarks.offload --depth 24 --steps 3

Each form trains the same GPT on the same batches in a process of its own, with gradients clipped
by their global norm. Of the form on disk it shows that the peak of resident memory beyond the
imports is a small part of the state; and what it makes of the device: the bytes that a step
reads and writes, over the time that it takes, against a plain copy of just as many bytes in
the same process, between the same files, with O_DIRECT and nothing else. Steps and copies take
turns, since what a device can do changes from one minute to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zfunc as zf
from benchmarks import meters
from zfunc import optim
from zfunc.buffers.ring import Ring
from zfunc.language import gpt
from zfunc.transforms.offloading.blocks import BLOCK, FileRegion, Files

RESULTS = Path(__file__).parent / "results"
TIMES, SHARE = 10.0, 0.8  # the promises: state over peak memory, bandwidth over that of a copy
THREADS = (1, 2, 4)  # of a copy; the fastest is what the device can do


def make_step(config: gpt.GPTConfig) -> Any:
    """AdamW with clipping; the loss is that of next-byte prediction."""
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, weight_decay=0.1))

    def loss(params: Any, ids: Tensor) -> Tensor:
        return gpt.loss(params, ids, config)

    return zf.train_step(loss, tx), tx


def begin(form: str, config: gpt.GPTConfig, args: Any, folder: Path) -> tuple[Any, Any]:
    """A step of one form, and its first state, made leaf by leaf where it is to be."""
    step, tx = make_step(config)
    step = zf.shard(zf.donate(step), stage=3, unit_bytes=args.unit_bytes)
    if form == "disk":
        step = zf.offload(step, to="disk", path=folder, buffers=args.buffers)
    make = partial(zf.TrainState.create, tx=tx)
    state = step.init(lambda: make(gpt.init(config, zf.random.key(0))))
    return step, state


def train(form: str, config: gpt.GPTConfig, args: Any, folder: Path) -> dict[str, Any]:
    """Losses, seconds per step, bytes of state and peak memory of one form, in this process."""
    torch.set_num_threads(args.threads)
    zf.init()
    tiny = gpt.GPTConfig(vocab=256, width=64, depth=1, heads=1)
    first, state = begin(form, tiny, args, folder / "tiny")  # what torch imports late
    first(state, torch.zeros(1, args.tokens + 1, dtype=torch.int64))
    first.close()
    del first, state
    rest = meters.status_bytes("VmRSS")
    meters.forget_peak()
    step, state = begin(form, config, args, folder)
    losses, seconds, moved, peaks = [], [], [], []
    copies: list[dict[int, float]] = []
    draw = torch.Generator().manual_seed(1)
    for n in range(args.steps):
        ids = torch.randint(0, config.vocab, (1, args.tokens + 1), generator=draw)
        before, start = device_bytes(), time.perf_counter()
        state, metrics = step(state, ids)
        seconds.append(time.perf_counter() - start)
        moved.append([b - a for a, b in zip(before, device_bytes(), strict=True)])
        losses.append(float(metrics["loss"]))
        peaks.append(meters.status_bytes("VmHWM"))
        if form == "disk" and n:
            copies.append({threads: copy(folder, *moved[-1], threads) for threads in THREADS})
            meters.forget_peak()  # the copy's own buffers
    if form == "disk":
        print(step.describe(), file=sys.stderr)
    step.close()
    return {
        "losses": losses,
        "seconds": seconds,
        "peak": max(peaks) - rest,
        "state": 12 * gpt.count(config),
        "moved": moved,
        "copy_seconds": {threads: [turn[threads] for turn in copies] for threads in THREADS},
    }


def device_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from, and written to, storage (proc(5), io)."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


def copy(folder: Path, read: int, written: int, threads: int) -> float:
    """Seconds to read and write so many bytes, block by block, between the state's files."""
    found = sorted((folder / "rank-00000").rglob("*.bin"))
    files, ring = Files([folder / "rank-00000"]), Ring()
    blocks: list[tuple[FileRegion, int]] = []
    for path in found:
        name = str(path.relative_to(folder / "rank-00000"))
        region = FileRegion(name, 0, path.stat().st_size // 4096 * 4096)
        blocks += [(region, k) for k in range(region.nbytes // BLOCK)]
    reads, writes = read // BLOCK, written // BLOCK
    target = FileRegion("copy.bin", 0, max(len(blocks), 1) * BLOCK)
    files.reserve(target.name, target.nbytes)

    def one(i: int) -> None:
        region, k = blocks[i % len(blocks)]
        buffer = ring.take(BLOCK)
        assert buffer is not None
        path = files.folders[0] / region.name
        plain(path, k * BLOCK, buffer.view[:BLOCK], write=False)
        if i * writes // reads != (i + 1) * writes // reads:
            place = files.folders[0] / target.name
            plain(place, i % len(blocks) * BLOCK, buffer.view[:BLOCK], write=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(reads)))
    taken = time.perf_counter() - start
    (files.folders[0] / target.name).unlink()
    return taken


def plain(path: Path, offset: int, data: memoryview, write: bool) -> None:
    """One system call, past the page cache; no checksum."""
    fd = os.open(path, (os.O_WRONLY if write else os.O_RDONLY) | os.O_DIRECT)
    try:
        done = os.pwritev(fd, [data], offset) if write else os.preadv(fd, [data], offset)
        assert done == len(data)
    finally:
        os.close(fd)


def table(runs: dict[str, dict[str, Any]], count: int) -> Table:
    """What a reader wants to know, a row for each form."""
    shown = Table(title=f"{count / 1e6:.0f}M parameters, AdamW, clipped by global norm")
    for name in ("state", "bytes of state", "peak RSS beyond imports", "step", "read + written"):
        shown.add_column(name, justify="left" if name == "state" else "right")
    for form, run in runs.items():
        step = median(run["seconds"][1:])
        moved = sum(median(row[k] for row in run["moved"][1:]) for k in (0, 1))
        speed = f"{moved / 1e9:.2f} GB, {moved / step / 1e9:.2f} GB/s" if form == "disk" else ""
        shown.add_row(
            form,
            f"{run['state'] / 1e9:.2f} GB",
            f"{run['peak'] / 1e6:.0f} MB",
            f"{step:.2f} s",
            speed,
        )
    return shown


def main() -> int:
    """Run both forms, print the table, keep the figures; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=96)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; others read, write, check"
    )
    parser.add_argument("--buffers", type=int, default=3)
    parser.add_argument("--unit-bytes", type=int, default=1 << 25)
    parser.add_argument("--path", default=".", help="folder on the device to be used")
    parser.add_argument("--only", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = gpt.GPTConfig(vocab=256, width=args.width, depth=args.depth, heads=args.width // 64)
    if args.only:
        print(json.dumps(train(args.only, config, args, Path(args.folder))))
        return 0
    runs = {}
    for form in ("memory", "disk"):
        with tempfile.TemporaryDirectory(dir=args.path, prefix="offload-") as folder:
            command = [sys.executable, "-m", "benchmarks.offload", "--only", form]
            command += ["--folder", folder, *sys.argv[1:]]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[form] = json.loads(done.stdout.splitlines()[-1])
    return report(runs, gpt.count(config), vars(args))


def report(runs: dict[str, dict[str, Any]], count: int, args: dict[str, Any]) -> int:
    """Print and keep what was measured."""
    console = Console()
    console.print(table(runs, count))
    disk = runs["disk"]
    ratio = disk["state"] / disk["peak"]
    steps = disk["seconds"][1:]
    copies = min(disk["copy_seconds"].values(), key=median)
    share = median(copy / step for copy, step in zip(copies, steps, strict=True))
    same = disk["losses"] == runs["memory"]["losses"]
    console.print(f"state over peak memory: {ratio:.1f} (promised {TIMES:.0f})")
    console.print(f"bandwidth over that of a plain copy: {share:.0%} (promised {SHARE:.0%})")
    for threads, taken in disk["copy_seconds"].items():
        listed = ", ".join(f"{s:.2f}" for s in taken)
        console.print(f"the copy by {threads} threads, after each step: {listed} s")
    console.print(f"the steps: {', '.join(f'{s:.2f}' for s in steps)} s")
    console.print(f"losses bit for bit those in memory: {'yes' if same else 'NO'}")
    RESULTS.mkdir(exist_ok=True)
    told = {name: value for name, value in args.items() if name not in ("path", "folder")}
    record = {"arguments": told, "machine": meters.hardware(), "versions": meters.versions()}
    record |= {"runs": runs, "ratio": ratio, "share": share, "same": same}
    path = RESULTS / f"offload-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(record, indent=1))
    return 0 if same and ratio >= TIMES and share >= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
