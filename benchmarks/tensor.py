"""A step of an unmodified Llama on two tensor ranks: ``zf.split`` against torch's DTensor.

The same Hugging Face model, weights and batches; layers are cut alike (queries, keys, values, gate
and up by their outputs, the other two by their inputs), AdamW is fused, fp32, two gloo ranks with
one thread each. DTensor takes a plan written by hand (``parallelize_module``), zfunc finds its own.
Both are alive in the same two ranks and take steps in turn; who begins alternates. A run has ranks
of its own, and its figure is the median over its turns of one step's time over the other's, each as
slow as its slower rank.

    python -m benchmarks.tensor
    python -m benchmarks.tensor --sizes 12M --runs 1 --turns 5
    python -m benchmarks.tensor --dry-run          # small and short, nothing is judged

The vocabulary is whole in both; in the second row both cut it (tables and heads, logits gathered).
Memory is that of steps after the first ones, in ranks of their own with one contestant each, in
turns: the kernel's peak over what the process had before there was a model, of the fuller rank, the
median over as many launches as there are runs (one differs from the next by some 2 MiB).

The exit status is 1 where a promise is broken: with the whole vocabulary the geometric mean over
sizes of the runs' medians is at most 1, none above 1.05; no peak is above DTensor's; losses agree.
Trust it on a quiet machine only.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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
from benchmarks.meters import MIB, forget_peak, status_bytes

ROOT = Path(__file__).resolve().parents[1]
RANKS, LEARNING_RATE, WEIGHT_DECAY = 2, 3e-4, 0.1
YARDSTICK, OURS = "DTensor", ("zfunc", "zfunc fuse")
LOSS_GAP = 1e-4  # relative, fp32, over all turns: the order of additions may differ, nothing else
MEAN_MOST, EACH_MOST = 1.0, 1.05

Advance = Callable[[Tensor], float]


@dataclass(frozen=True)
class Size:
    """A Llama, and its batch: ``batch`` texts of ``length`` tokens."""

    width: int
    layers: int
    vocab: int
    heads: int = 8
    kv_heads: int = 4
    batch: int = 4
    length: int = 128


SIZES = {"12M": Size(512, 4, 512), "60M": Size(1024, 5, 1024), "dry": Size(64, 2, 64, length=16)}


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    size: Size
    vocab: bool  # whether the vocabulary is cut
    warmup: int
    turns: int


def build(size: Size) -> nn.Module:
    """The model with the weights that every contestant starts from (seed 0)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.width,
            intermediate_size=size.width * 8 // 3 // 16 * 16,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
        )
    )


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def dtensor_step(module: Any, plan: Plan) -> Advance:
    """What torch's users write: a plan by hand, and the usual loop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    columns = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    for layer in module.model.layers:
        cuts = {x: ColwiseParallel() for x in columns} | {x: RowwiseParallel() for x in rows}
        parallelize_module(layer, mesh, cuts)
    if plan.vocab:
        table = RowwiseParallel(input_layouts=Replicate())
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(module, mesh, {"model.embed_tokens": table, "lm_head": head})
    every = list(module.parameters())
    cut = [p for p in every if isinstance(p, DTensor)]  # the fused update takes no mixed list
    whole = [p for p in every if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW(
        [{"params": cut}, {"params": whole}],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def advance(ids: Tensor) -> float:
        loss = loss_of(module(ids, use_cache=False).logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return advance


def zfunc_step(module: nn.Module, plan: Plan, fuse: bool) -> Advance:
    model = zf.functionalize(module, fuse=fuse)
    tx = zf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, ids, use_cache=False).logits, ids)

    step = zf.split(zf.donate(zf.train_step(loss_fn, tx)), model, tensor=RANKS, vocab=plan.vocab)
    state = step.place(zf.TrainState.create(model.params, tx))

    def advance(ids: Tensor) -> float:
        nonlocal state
        state, metrics = step(state, ids)
        return float(metrics["loss"])

    return advance


def start(name: str, plan: Plan) -> Advance:
    """A contestant by name, ready to step."""
    module = build(plan.size)
    if name == YARDSTICK:
        return dtensor_step(module, plan)
    return zfunc_step(module, plan, fuse=name.endswith("fuse"))


def batches(plan: Plan) -> list[Tensor]:
    """The same on both ranks, as tensor ranks want them."""
    size, draw = plan.size, torch.Generator().manual_seed(1)
    shape = (size.batch, size.length)
    turns = range(plan.warmup + plan.turns)
    return [torch.randint(0, size.vocab, shape, generator=draw) for _ in turns]


def take_turns(peers: list[str], plan: Plan) -> dict[str, Any]:
    """One rank: losses, and wall and CPU seconds behind the warm-up, of each contestant."""
    torch.set_num_threads(1)
    running = {name: start(name, plan) for name in peers}
    seen: dict[str, Any] = {name: {"losses": [], "seconds": [], "cpu": []} for name in peers}
    for turn, ids in enumerate(batches(plan)):
        first = turn % len(peers)
        for name in peers[first:] + peers[:first]:
            dist.barrier()
            start_s, used = time.perf_counter(), time.process_time()
            loss = running[name](ids)
            seconds, cpu = time.perf_counter() - start_s, time.process_time() - used
            seen[name]["losses"].append(loss)
            if turn >= plan.warmup:
                seen[name]["seconds"].append(seconds)
                seen[name]["cpu"].append(cpu)
    return seen


def remember(name: str, plan: Plan) -> dict[str, Any]:
    """One rank with one contestant: peak memory of steps over that before there was a model."""
    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama  # noqa: F401  # not part of what is measured

    start(name, Plan(SIZES["dry"], plan.vocab, 0, 0))(torch.zeros(1, 4, dtype=torch.long))
    gc.collect()
    before = status_bytes("VmRSS")
    advance = start(name, plan)
    for ids in batches(plan)[:2]:
        advance(ids)
    gc.collect()
    forget_peak()
    for ids in batches(plan)[2:]:
        advance(ids)
    return {"peak": status_bytes("VmHWM") - before}


def ratios(seen: list[dict[str, Any]], name: str, what: str) -> list[float]:
    """Turn by turn, a contestant's step over the yardstick's, each as its slower rank saw it."""

    def steps(of: str) -> list[float]:
        return [max(pair) for pair in zip(*(rank[of][what] for rank in seen), strict=True)]

    return [a / b for a, b in zip(steps(name), steps(YARDSTICK), strict=True)]


def summarise(runs: list[list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """A contestant over all runs of one size."""
    wall = [median(ratios(seen, name, "seconds")) for seen in runs]
    pairs = [(a, b) for seen in runs for a, b in zip(*losses(seen, name), strict=True)]
    return {
        "runs": wall,
        "runs_cpu": [median(ratios(seen, name, "cpu")) for seen in runs],
        "ratio": median(wall),
        "seconds": median(x for seen in runs for x in seen[0][name]["seconds"]),
        "yardstick_seconds": median(x for seen in runs for x in seen[0][YARDSTICK]["seconds"]),
        "loss_gap": max(abs(a - b) / abs(b) for a, b in pairs),
    }


def losses(seen: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    return seen[0][name]["losses"], seen[0][YARDSTICK]["losses"]


def measured(args: argparse.Namespace, size: str, vocab: bool, console: Console) -> dict[str, Any]:
    """Times and peaks of one size."""
    plan = Plan(SIZES[size], vocab, args.warmup, args.turns)
    peers = [YARDSTICK, *args.peers]
    runs = []
    for at in range(args.runs):
        runs.append(zf.launch(take_turns, peers, plan, nprocs=RANKS))
        shown = ", ".join(
            f"{x} {median(ratios(runs[-1], x, 'seconds')):.3f} "
            f"(CPU {median(ratios(runs[-1], x, 'cpu')):.3f})"
            for x in args.peers
        )
        console.print(f"{size}, {cut(vocab)}, run {at + 1}: {shown}")
    rows = {name: summarise(runs, name) for name in args.peers}
    found = {"parameters": numel(SIZES[size]), "rows": rows}
    if not args.no_memory:
        short = Plan(plan.size, vocab, 2, 3)
        peaks: dict[str, list[int]] = {name: [] for name in peers}
        for _ in range(args.runs):
            for name, seen in peaks.items():
                seen.append(max(r["peak"] for r in zf.launch(remember, name, short, nprocs=RANKS)))
        for name, row in rows.items():
            row["peaks"], row["yardstick_peaks"] = peaks[name], peaks[YARDSTICK]
            row["peak"], row["yardstick_peak"] = median(peaks[name]), median(peaks[YARDSTICK])
    return found


def cut(vocab: bool) -> str:
    return "vocabulary cut" if vocab else "vocabulary whole"


def numel(size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(size).parameters())


def judge(found: dict[str, Any]) -> list[str]:
    """The promises that are broken; those of time are of the first contestant, table whole."""
    broken = []
    timed = found.get(cut(False), {})
    ratios = {size: next(iter(of["rows"].values()))["ratio"] for size, of in timed.items()}
    mean = math.prod(ratios.values()) ** (1 / max(1, len(ratios)))
    found["geometric_mean"] = mean
    if mean > MEAN_MOST:
        broken.append(f"the geometric mean is {mean:.3f} of {YARDSTICK}, at most {MEAN_MOST}")
    for size, ratio in ratios.items():
        if ratio > EACH_MOST:
            broken.append(f"{size}: {ratio:.3f} of {YARDSTICK}, at most {EACH_MOST}")
    for vocab in (False, True):
        for size, of in found.get(cut(vocab), {}).items():
            for name, row in of["rows"].items():
                broken += [f"{size}, {cut(vocab)}, {name}: {why}" for why in faults(row)]
    return broken


def faults(row: dict[str, Any]) -> list[str]:
    found = []
    if row["loss_gap"] > LOSS_GAP:
        found.append(f"losses differ by {row['loss_gap']:.0e}")
    if row.get("peak", 0) > row.get("yardstick_peak", 0):
        found.append(
            f"peak memory {row['peak'] / MIB:.0f} MiB, {YARDSTICK} "
            f"{row['yardstick_peak'] / MIB:.0f} MiB"
        )
    return found


def print_table(found: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    heads = ("parameters", "s", f"{YARDSTICK} s", "ratio", "runs", "CPU runs", "peak MiB")
    for title in (*heads, f"{YARDSTICK} MiB", "loss gap"):
        table.add_column(title, justify="right")
    for vocab in (False, True):
        for size, of in found.get(cut(vocab), {}).items():
            for name, row in of["rows"].items():
                peaks = [row.get(key, math.nan) / MIB for key in ("peak", "yardstick_peak")]
                table.add_row(
                    f"{name}, {size}, {cut(vocab)}",
                    f"{of['parameters'] / 1e6:.1f}M",
                    f"{row['seconds']:.3f}",
                    f"{row['yardstick_seconds']:.3f}",
                    f"{row['ratio']:.3f}",
                    " ".join(f"{x:.2f}" for x in row["runs"]),
                    " ".join(f"{x:.2f}" for x in row["runs_cpu"]),
                    *(f"{x:.1f}" for x in peaks),
                    f"{row['loss_gap']:.0e}",
                )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, default=["12M", "60M"], help="default: 12M 60M")
    add("--peers", nargs="+", choices=OURS, default=["zfunc"], help="default: zfunc")
    add("--vocab", choices=("whole", "cut", "both"), default="both", help="default: both")
    add("--runs", type=int, default=5, help="times that ranks start anew (%(default)s)")
    add("--warmup", type=int, default=3, help="untimed turns of each run (%(default)s)")
    add("--turns", type=int, default=20, help="timed turns of each run (%(default)s)")
    add("--no-memory", action="store_true", help="measure time alone")
    add("--dry-run", action="store_true", help="a small model, few turns; judge nothing")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    return parser.parse_args()


def main() -> None:
    args, console = arguments(), Console(width=max(Console().width, 140))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.dry_run:
        args.sizes, args.runs, args.warmup, args.turns = ["dry"], 1, 1, 3
    told = {k: v for k, v in vars(args).items() if k != "out"}
    found = report.record("tensor", told, [YARDSTICK, *args.peers])
    for vocab in {"whole": (False,), "cut": (True,), "both": (False, True)}[args.vocab]:
        found[cut(vocab)] = {size: measured(args, size, vocab, console) for size in args.sizes}
    found["broken"] = [] if args.dry_run else judge(found)
    print_table(found, console)
    for line in found["broken"]:
        console.print(f"[bold red]broken: {line}[/]")
    console.print(f"written: {report.write(found, args.out)}")
    sys.exit(1 if found["broken"] else 0)


if __name__ == "__main__":
    main()
