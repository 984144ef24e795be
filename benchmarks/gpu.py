"""Every kernel on one GPU, in under ten minutes, with one command.

    python -m benchmarks.gpu --out gpu-results               # all stages, on the first GPU
    python -m benchmarks.gpu --only w4_mm decode --budget 120
    python -m benchmarks.gpu --dry-run                       # without one: small, on the twins
    python -m benchmarks.gpu --predict                       # the table of gpu-predictions.md

Stages: all kernels compiled ahead, by as many processes as there are cores; ceilings (what a copy
and a bf16 product reach here: every share below is of these); transforms of torch with the real
kernels; correctness (each kernel beside its twin on several samples, twice, bit for bit); timing
beside torch, torch.compile, cuBLAS, Liger and torchao as far as they are installed; end to end: the
layers of a decoder in a CUDA graph, and an optimizer step; and steps of training beside torch, DDP
and FSDP2 (:mod:`benchmarks.gpu_step`), on two ranks where there are two GPUs. Each stage has a
deadline, each row is in ``rows.jsonl`` as soon as it is known, and what there was no time for is
named. The best launch configurations go to ``kernels/configs/<name of the GPU>.json``. The name of
the GPU, its driver, its clocks and temperature while it was busy and what held them down are rows.

Times are those of a CUDA graph of up to 20 calls that rotate through enough copies of their buffers
to leave the cache, the median of up to 20 replays; two medians that differ by more than 2 % are
flagged, and so is what cannot be captured: it was timed with the host's launches in it.
Before any of it was run each row had a predicted share
(``docs/figures/gpu-predictions.md``); a row that misses it by more than 15 % either
way is marked, to be looked at with ``ncu``.

A dry run compiles for every target (sm_80, sm_90, sm_100, gfx90a, gfx942) what a run would launch,
and prints no time at all: a CPU's says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_compile
from benchmarks.gpu_ahead import units
from benchmarks.gpu_cases import CASES as FLAT
from benchmarks.gpu_cases import COPY, PRODUCT, Case, Size
from benchmarks.gpu_checks import correctness, transforms
from benchmarks.gpu_clocks import Watch, driver
from benchmarks.gpu_decode import BYTES, end_to_end
from benchmarks.gpu_layers import layers
from benchmarks.gpu_step import steps, table
from benchmarks.gpu_targets import TARGETS
from benchmarks.gpu_timing import Ceilings, Clock, Timing, ceilings
from benchmarks.gpu_tuning import candidates
from benchmarks.meters import hardware, versions
from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu

__all__ = ["Run", "main"]

CASES = FLAT | {"layers": layers}
TRIES = 13  # the most configurations of a kernel
QUICK = 0.05  # seconds for the time of a configuration that is tried
# Shares of the budget; what a stage leaves over goes to those behind it.
STAGES = {
    "compile": 0.1,
    "ceilings": 0.02,
    "transforms": 0.04,
    "correctness": 0.07,
    "timing": 0.32,
    "decode": 0.13,
    "steps": 0.32,
}


@dataclass
class Run:
    """What one run knows and writes.

    Attributes:
        out: folder of ``rows.jsonl`` and ``summary.txt``.
        size: of the problems.
        device: where everything runs.
        end: when the budget is spent, by ``time.monotonic``.
        only: names (of kernels, or ``decode``) to which timing is restricted.
        rows: all rows so far.
    """

    out: Path
    size: Size
    device: torch.device
    end: float
    only: frozenset[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, stage: str, name: str, **found: Any) -> None:
        """Note a row, on disk at once."""
        row = {"stage": stage, "name": name, **found}
        self.rows.append(row)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only


def stage(run: Run, name: str, body: Callable[[float], None]) -> None:
    """Run a stage until its deadline; what goes wrong in it is a row, and the others go on."""
    left = run.end - time.monotonic()
    rest = list(STAGES)[list(STAGES).index(name) :]
    share = STAGES[name] / sum(STAGES[x] for x in rest)
    start = time.monotonic()
    try:
        body(start + max(left, 0) * share)
    except Exception as error:
        run.add(name, "stage", error=f"{type(error).__name__}: {error}"[:500])
    run.add(name, "stage", seconds=round(time.monotonic() - start, 1))


def tuned(
    case: Case, clock: Clock, device: torch.device, deadline: float
) -> tuple[dict[str, int], Timing]:
    """The quickest configuration, and what a call takes with it."""
    table = dispatch.table(device)
    kept = table[case.kernel]
    best, least = kept, Timing(float("inf"), False, True)
    tries = candidates(case.kernel, kept) if case.tune else iter([kept])
    for how in tries:
        if least.seconds < float("inf") and time.monotonic() > deadline:
            break
        table[case.kernel] = how
        try:
            found = clock(case.ours, case.copies, patience=QUICK)
        except Exception:  # does not fit this GPU: shared memory, registers
            if how is kept:
                raise
            continue
        if found.seconds < least.seconds:
            best, least = how, found
    table[case.kernel] = best
    return best, clock(case.ours, case.copies)


def dispatch_name(device: torch.device) -> str:
    """What the table of launch configurations is kept under."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def timing(run: Run, clock: Clock, roof: Ceilings, deadline: float) -> None:
    """Every case beside its baselines."""
    families = [name for name in CASES if run.wants(name)]
    for i, family in enumerate(families):
        mine = time.monotonic() + max(deadline - time.monotonic(), 0) / (len(families) - i)
        for case in CASES[family](run.size, run.device):
            if time.monotonic() > mine:
                run.add("timing", case.name, skipped="no time left")
                continue
            try:
                one(run, case, clock, roof, mine)
            except Exception as error:
                run.add("timing", case.name, error=f"{type(error).__name__}: {error}"[:500])


def one(run: Run, case: Case, clock: Clock, roof: Ceilings, deadline: float) -> None:
    """One row of the table."""
    how, (seconds, steady, graph) = tuned(case, clock, run.device, deadline)
    others: dict[str, Timing | str] = {}
    for label, call in case.baselines.items():
        try:
            others[label] = clock(call, case.copies)
        except Exception as error:
            others[label] = f"{type(error).__name__}: {error}"[:200]
    if not clock.real:
        run.add("timing", case.name, kernel=case.kernel, ran=[*others], predicted=case.predicted)
        return
    share = max(case.bytes / seconds / roof.copy, case.operations / seconds / roof.product)
    found = {k: v for k, v in others.items() if isinstance(v, Timing)}
    run.add(
        "timing",
        case.name,
        kernel=case.kernel,
        microseconds=round(seconds * 1e6, 2),
        share=round(share, 3),
        predicted=case.predicted,
        missed=abs(share / case.predicted - 1) > 0.15,
        steady=steady,
        eager=["ours"] * (not graph) + [k for k, v in found.items() if not v.graph],
        ratios={k: round(v.seconds / seconds, 3) for k, v in found.items()},
        absent={k: v for k, v in others.items() if isinstance(v, str)},
        config=how,
    )


def compiling(run: Run, targets: list[str], jobs: int, deadline: float) -> None:
    """Kernels ahead of their first launch: for the GPU at hand, in a dry run for all targets."""
    real = run.device.type == "cuda"
    places = [gpu_compile.here(run.device)] if real else list(map(gpu_compile.of_target, targets))
    families = [name for name in CASES if run.wants(name)]
    kinds = list(BYTES) if run.wants("decode") else []
    todo = list(units(list(dispatch.KERNELS), families, TRIES if real else 1, kinds))
    beside = gpu_compile.baselines() if real else None
    try:
        gpu_compile.ahead(run.add, places, todo, jobs, deadline)
        if beside is not None:
            beside.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        run.add("compile", "torch.compile", skipped="no time left: baselines compile as they run")
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()


def summary(run: Run, real: bool) -> Iterator[str]:
    """The table for people."""
    kind = dispatch_name(run.device) if real else "dry run on the CPU's twins: no figure is a GPU's"
    yield f"{kind}; torch {torch.__version__}"
    yield from table(run.rows)
    for row in run.rows:
        if "error" in row:
            yield f"ERROR {row['stage']} {row['name']}: {row['error']}"
        elif row["stage"] == "compile" and "kernels" in row:
            skipped = f"; {row['skipped']}" if "skipped" in row else ""
            yield f"compile      {row['name']:42s} {row['kernels']} kernels{skipped}"
        elif row["name"] == "clocks":
            yield f"clocks       {row['found'] or 'no tool here tells them'}"
        elif "milliseconds" in row:
            continue  # in the table above
        elif "right" in row:
            yield f"{row['stage']:12s} {row['name']:42s} {'right' if row['right'] else 'WRONG'}"
        elif row["stage"] == "ceilings" and "copy" in row:
            yield f"ceilings     copy {row['copy']:.2f} TB/s, bf16 {row['product']:.0f} TFLOP/s"
        elif "skipped" in row:
            yield f"{row['stage']:12s} {row['name']:42s} {row['skipped']}"
        elif "microseconds" in row:
            ratios = "  ".join(f"{k} {v:.2f}x" for k, v in row["ratios"].items())
            mark = (" MISSED" if row.get("missed") else "") + ("" if row["steady"] else " unsteady")
            if row["eager"]:  # the host's time to launch is in it
                mark += f" EAGER, no graph: {', '.join(row['eager'])}"
            yield (
                f"{row['name']:42s} {row['microseconds']:10.2f} us  {row['share']:4.0%} of the "
                f"ceiling (predicted {row['predicted']:.0%}){mark}  {ratios}"
            )
        elif "ran" in row:
            beside = ", ".join(row.get("ran", [])) or "nothing"
            yield f"{row['stage']:12s} {row['name']:42s} ran beside {beside}"


def write_configs(device: torch.device, folder: Path) -> Path:
    """What differs from the configurations for any GPU, in a file named after this one."""
    slug = re.sub(r"[^a-z0-9]+", "-", dispatch_name(device).lower()).strip("-") or "dry-run"
    general, mine = dispatch.tables("\0", gpu(device).target), dispatch.table(device)
    own = {k: v for k, v in mine.items() if v != general[k]}
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(own.items()))
    path = folder / f"{slug}.json"
    path.write_text("{\n" + rows + "\n}\n")
    return path


def predictions() -> Iterator[str]:
    """The table of what is expected on an H200: nothing in it was measured."""
    yield "| | GB | floor, us | predicted share | predicted, us |"
    yield "|---|---|---|---|---|"
    size, device = Size(shapes=Size.shapes[:2], rows=(1,)), torch.device("meta")
    for cases in CASES.values():
        for case in cases(size, device):
            floor = max(case.bytes / COPY, case.operations / PRODUCT) * 1e6
            yield (
                f"| {case.name} | {case.bytes / 1e9:.3g} | {floor:.3g} | {case.predicted:.0%} "
                f"| {floor / case.predicted:.3g} |"
            )


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if something is wrong (not if it is slow)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--budget", type=float, help="seconds for all stages (default: 540; of a dry run 1800)"
    )
    parser.add_argument("--only", nargs="+", default=[], choices=[*CASES, "decode", "steps"])
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, without figures")
    parser.add_argument(
        "--targets",
        nargs="*",
        default=list(TARGETS),
        choices=TARGETS,
        help="what a dry run compiles for (default: all)",
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile"
    )
    parser.add_argument(
        "--configs", type=Path, help="folder for the tuned table (default: kernels/configs)"
    )
    parser.add_argument("--predict", action="store_true", help="print the predicted table only")
    given = parser.parse_args(arguments)
    if given.predict:
        print("\n".join(predictions()))
        return 0
    if not given.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run tries every stage on the CPU.", file=sys.stderr)
        return 2
    budget = 1800.0 if given.dry_run else 540.0
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "rows.jsonl").unlink(missing_ok=True)  # those of another run
    device = torch.device("cpu" if given.dry_run else "cuda")
    run = Run(
        given.out,
        Size.small() if given.dry_run else Size(),
        device,
        time.monotonic() + (budget if given.budget is None else given.budget),
        frozenset(given.only),
    )
    clock = Clock(real=not given.dry_run)
    run.add("setting", "machine", gpu=dispatch_name(device), target=gpu(device).target,
            gpus=torch.cuda.device_count(), driver=driver(), cuda=torch.version.cuda,
            hip=torch.version.hip, versions=versions(), **hardware())  # fmt: skip
    watch = Watch(given.out, device)
    roofs: list[Ceilings] = []

    def first(deadline: float) -> None:
        roofs.append(ceilings(clock, run.size, device))
        run.add("ceilings", "ceilings", **(asdict(roofs[0]) if clock.real else {}))

    late = None if clock.real else run.end  # without a GPU there is time to compile everything
    stage(run, "compile", lambda end: compiling(run, given.targets, given.jobs, late or end))
    stage(run, "ceilings", first)
    if not roofs:
        run.add("ceilings", "assumed", skipped="not measured: shares are of 4.3 TB/s, 780 TFLOP/s")
    roof = roofs[0] if roofs else Ceilings(4.3, 780.0)
    stage(run, "transforms", lambda end: transforms(run.add, run.size.backend, device, end))
    stage(run, "correctness", lambda deadline: correctness(run.add, device, deadline))
    stage(run, "timing", lambda deadline: timing(run, clock, roof.si(), deadline))
    if run.wants("decode"):
        stage(
            run, "decode", lambda end: end_to_end(run.add, clock, roof.si(), run.size, device, end)
        )
    if run.wants("steps"):
        torch.cuda.empty_cache()
        stage(run, "steps", lambda end: steps(run.add, device, end))
    run.add("setting", "clocks", found=watch.stop())
    folder = given.configs or (
        given.out if given.dry_run else Path(dispatch.__file__).parent / "configs"
    )
    print(f"configurations: {write_configs(device, folder)}")
    text = "\n".join(summary(run, clock.real))
    (given.out / "summary.txt").write_text(text + "\n")
    print(text)
    bad = any("error" in row or row.get("right") is False for row in run.rows)
    bad |= any(row["stage"] == "compile" and "skipped" in row for row in run.rows if not clock.real)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
