"""A training step on one GPU, and on two where there are two: zfunc beside torch, DDP and FSDP2.

    python -m benchmarks.gpu_step --out gpu-results
    python -m benchmarks.gpu_step --dry-run           # tiny, on the CPU, over gloo

A GPT of 370M parameters (100M on a GPU of less than 40 GB), texts of 1,024 tokens, AdamW: in TF32,
and with bfloat16 beside float32 masters. For each: milliseconds of a step (the median of 20, by
events), those of the host until all 20 were issued, peak memory, what the profiler says of
communication with nothing beside it and of a GPU with nothing to do, and whether a steady step
waits for the device (``torch.cuda.set_sync_debug_mode("error")``). Losses must agree. Beside time
and memory of zfunc's stands what ``zf.foresee`` says of them from the published peaks of this GPU.

Contestants share the processes of a number of ranks; one that fails is a row, and the others go on
in fresh ones. What there was no time for is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_rank import CONTESTANTS, GPU_SIZES
from benchmarks.train_step import FIXED, free_port, wait_for

__all__ = ["steps", "table"]

ROOT = Path(__file__).resolve().parents[1]
CLOSE = {"": 2e-3, "bf16": 3e-2}  # of losses: TF32 and sums in another order; 8 bits of mantissa
Add = Callable[..., None]


def steps(
    add: Add, device: torch.device, deadline: float, contestants: Iterable[str] = CONTESTANTS
) -> None:
    """Contestants on one rank, and on two where there are as many GPUs."""
    real = device.type == "cuda"
    size = "tiny"
    if real:
        memory = torch.cuda.get_device_properties(0).total_memory
        size = "370M" if memory > 40e9 else "100M"
    worlds = [n for n in (1, 2) if not real or torch.cuda.device_count() >= n]
    for i, ranks in enumerate(worlds):
        mine = time.monotonic() + max(deadline - time.monotonic(), 0) / (len(worlds) - i)
        names = [x for x in contestants if ranks == 1 or not x.startswith("torch")]
        _world(add, names, ranks, size, device.type, mine)
    if worlds == [1]:
        add("steps", "2 ranks", skipped="there is one GPU")


def _world(add: Add, names: list[str], ranks: int, size: str, device: str, end: float) -> None:
    yardstick: dict[str, list[float]] = {}
    while names:
        found, error = _run(names, ranks, size, device, end)
        for row in found:
            add("steps", **_row(row, ranks, size, yardstick))
        names = names[len(found) :]
        if names and time.monotonic() < end:
            add("steps", _label(names[0], ranks), error=error)
            names = names[1:]
            continue
        for name in names:
            add("steps", _label(name, ranks), skipped="no time left")
        return


def _run(
    names: list[str], ranks: int, size: str, device: str, end: float
) -> tuple[list[list[dict[str, Any]]], str]:
    """What each contestant gave on each rank, as far as they came; why they came no further."""
    with tempfile.TemporaryDirectory() as folder:
        out, port, processes = Path(folder), free_port(), []
        given = {"names": names, "size": size, "device": device, "out": folder}
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            env = {**os.environ, **(FIXED if device == "cpu" else {"MASTER_ADDR": "127.0.0.1"})}
            env |= {key: str(value) for key, value in (place | {"LOCAL_WORLD_SIZE": ranks}).items()}
            command = [sys.executable, "-m", "benchmarks.gpu_rank", json.dumps(given)]
            with (out / f"rank{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
                )
        failed = wait_for(processes, max(end - time.monotonic(), 1.0))
        logs = [(out / f"rank{rank}.log").read_text() for rank in range(ranks)]
        files = [out / f"rank{rank}.jsonl" for rank in range(ranks)]
        lines = [path.read_text().splitlines() if path.exists() else [] for path in files]
        found = [[json.loads(line) for line in row] for row in zip(*lines, strict=False)]
    return found, "" if failed is None else f"rank {failed}: {logs[failed][-700:]}"


def _label(name: str, ranks: int) -> str:
    return f"{name}, {ranks} rank{'s' if ranks > 1 else ''}"


def _row(
    seen: list[dict[str, Any]], ranks: int, size: str, yardstick: dict[str, list[float]]
) -> dict[str, Any]:
    """The ranks' slowest figures, and whether the losses are those of the first of its kind."""
    name, first = seen[0]["name"], seen[0]
    losses = [sum(each) / len(seen) for each in zip(*(x["losses"] for x in seen), strict=True)]
    kind = "bf16" if "bf16" in name else ""
    model = yardstick.setdefault(kind, losses)
    distance = max(abs(x - y) / abs(y) for x, y in zip(losses, model, strict=True))
    row = {"name": _label(name, ranks), "losses": losses, "right": distance <= CLOSE[kind]}
    if "milliseconds" not in first:
        return row
    shape = GPU_SIZES[size]
    worst = {k: max(x[k] for x in seen) for k, v in first.items() if isinstance(v, float | int)}
    tokens = ranks * shape.batch * shape.tokens / (worst["milliseconds"] / 1e3)
    waits = next((x["waits"] for x in seen if x["waits"]), "")
    more = {"size": size, "tokens_per_second": round(tokens), "waits": waits}
    return row | worst | more | {"kernels": first["kernels"]}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of this stage for people."""
    for row in rows:
        if "milliseconds" in row:
            yield (
                f"{row['name']:30s} {row['milliseconds']:8.2f} ms ({row['host']:.2f} of the host)  "
                f"{row['tokens_per_second']:8d} tokens/s  peak {row['peak'] / 2**30:5.1f} GiB  "
                f"communication {row['communication']:.2f} ms, {row['exposed']:.2f} exposed; idle "
                f"{row['idle']:.2f}  {'WAITS ' + row['waits'] if row['waits'] else 'no wait'}"
                f"{'' if row['right'] else '  LOSSES DIFFER'}{_foreseen(row)}"
            )


def _foreseen(row: dict[str, Any]) -> str:
    """What was said before of what was measured, where it was."""
    if "foreseen_peak" not in row:
        return ""
    ahead = row.get("foreseen_milliseconds")
    return f"  foreseen {row['foreseen_peak'] / 2**30:.1f} GiB" + (
        f", {ahead:.2f} ms" if ahead else ""
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a contestant failed or losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, without figures")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    given = parser.parse_args(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run tries the code on the CPU.", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def add(stage: str, name: str, **found: Any) -> None:
        rows.append({"stage": stage, "name": name, **found})
        with (given.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")

    device = torch.device("cpu" if given.dry_run else "cuda")
    steps(add, device, time.monotonic() + given.budget, given.contestants)
    print("\n".join(table(rows)))
    for row in rows:
        if "error" in row or "skipped" in row:
            print(f"{row['name']}: {row.get('error') or row['skipped']}")
    return int(any("error" in row or row.get("right") is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
