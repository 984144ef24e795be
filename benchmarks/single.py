"""What bare ``zf.value_and_grad`` costs on one rank, over ``loss.backward()``: time and memory.

Time is measured in one process, the two forms taking turns; peak memory in a fresh process for
each form, because a peak cannot be taken back. The promise is at most 3 % of either.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import meters, report
from benchmarks.models import SIZES, Size, batches, build, loss_of

Form = Callable[[Tensor], Tensor]
PROMISE = 1.03


def by_backward(size: Size) -> Form:
    """ids to loss; gradients are made with ``loss.backward()`` and dropped."""
    module = build(size)

    def run(ids: Tensor) -> Tensor:
        loss = loss_of(module(ids), ids)
        loss.backward()
        for p in module.parameters():
            p.grad = None
        return loss.detach()

    return run


def by_value_and_grad(size: Size) -> Form:
    """ids to loss; gradients are made with ``zf.value_and_grad`` and dropped."""
    import zfunc as zf

    model = zf.functionalize(build(size))
    grad = zf.value_and_grad(lambda params, ids: loss_of(model.apply(params, ids), ids))
    return lambda ids: grad(model.params, ids)[0].detach()


FORMS = {"backward": by_backward, "value_and_grad": by_value_and_grad}


def take_turns(size: Size, rounds: int) -> dict[str, Any]:
    """Seconds of each form, alternating, after one untimed turn each; and the two losses."""
    forms = {name: make(size) for name, make in FORMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    losses: dict[str, list[float]] = {name: [] for name in FORMS}
    for ids in islice(batches(size, 0), rounds + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            losses[name].append(float(form(ids)))
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": {name: each[1:] for name, each in seconds.items()}, "losses": losses}


def peak_of(form_name: str, size: Size, rounds: int) -> dict[str, Any]:
    """Bytes that stepping adds on top of the model, in this fresh process."""
    form = FORMS[form_name](size)
    gc.collect()
    baseline = meters.status_bytes("VmRSS")
    meters.forget_peak()
    for ids in islice(batches(size, 0), rounds):
        form(ids)
    return {"peak": meters.status_bytes("VmHWM") - baseline}


def in_a_process(task: str, args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Run ``task`` in a fresh interpreter, where the allocator's settings take effect."""
    command = [sys.executable, "-m", "benchmarks.single", task, args.size, str(rounds)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=args.timeout)
    if done.returncode:
        raise RuntimeError(f"{task} failed\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(args: argparse.Namespace, console: Console) -> int:
    """Print and store both ratios; 1 if one breaks the promise or the losses differ at all."""
    turns = in_a_process("time", args, args.rounds * args.steps)
    peaks = {
        name: median(in_a_process(name, args, 3)["peak"] for _ in range(args.rounds))
        for name in FORMS
    }
    old, new = (turns["seconds"][name] for name in FORMS)
    pinned = os.environ.get("MALLOC_MMAP_THRESHOLD_", "glibc's own")
    settings = {"size": args.size, "turns": len(old), "MALLOC_MMAP_THRESHOLD_": pinned}
    found = report.record("value_and_grad", settings, FORMS) | {
        "time_ratio": median(b / a for a, b in zip(old, new, strict=True)),
        "time_ratio_of_minima": min(new) / min(old),
        "peak_ratio": peaks["value_and_grad"] / peaks["backward"],
        "peak_bytes": peaks,
        "losses_equal": turns["losses"]["backward"] == turns["losses"]["value_and_grad"],
        "seconds": turns["seconds"],
    }
    console.print(
        f"value_and_grad / backward(), {args.size}, one rank, one thread, {len(old)} turns each\n"
        f"time {found['time_ratio']:.3f} (of minima {found['time_ratio_of_minima']:.3f}), "
        f"peak memory {found['peak_ratio']:.3f} "
        f"({peaks['value_and_grad'] / meters.MIB:.0f} / {peaks['backward'] / meters.MIB:.0f} MiB), "
        f"losses bitwise equal: {found['losses_equal']}"
    )
    console.print(f"written: {report.write(found, args.out)}")
    kept = max(found["time_ratio"], found["peak_ratio"]) <= PROMISE
    return 0 if kept and found["losses_equal"] else 1


def main() -> None:
    task, size, rounds = sys.argv[1], SIZES[sys.argv[2]], int(sys.argv[3])
    torch.set_num_threads(1)
    found = take_turns(size, rounds) if task == "time" else peak_of(task, size, rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
