"""Kernels compiled ahead of a run, by several processes: for the GPU at hand, or for all targets.

A process is a :mod:`benchmarks.gpu_ahead`, which needs no GPU; each takes the next unit when it has
done one. Beside them on a GPU one process runs what ``torch.compile`` is to make of the baselines,
whose results torch keeps. A kernel whose shared memory does not fit is an error, unless it is a
configuration that is only tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.gpu_targets import TARGETS
from zfunc.kernels import dispatch
from zfunc.kernels.devices import gpu

__all__ = ["At", "ahead", "here", "of_target"]

ROOT = Path(__file__).resolve().parents[1]
Add = Callable[..., None]


@dataclass(frozen=True)
class At:
    """What is compiled for: what the processes are told, and the shared memory there is."""

    given: dict[str, Any]
    shared: int


def of_target(name: str) -> At:
    """One of the targets."""
    target = TARGETS[name]
    given = {"target": name, "arch": target.arch, "amd": target.amd}
    return At(given | {"name": target.example, "processors": target.processors}, target.shared)


def here(device: torch.device) -> At:
    """The GPU at hand."""
    on, found = gpu(device), torch.cuda.get_device_properties(device)
    arch: Any = on.target if dispatch.AMD else 10 * found.major + found.minor
    given = {"target": on.target, "arch": arch, "amd": dispatch.AMD}
    shared = 65536 if dispatch.AMD else found.shared_memory_per_block_optin
    return At(given | {"name": on.name, "processors": on.processors}, shared)


def ahead(add: Add, places: list[At], units: list[str], jobs: int, deadline: float) -> None:
    """Compile all units for each place; a row for each place, and for each unit that failed.

    Args:
        add: notes a row.
        places: what to compile for.
        units: see :mod:`benchmarks.gpu_ahead`.
        jobs: processes at a time.
        deadline: by ``time.monotonic``; what is not compiled then is compiled when it is run.
    """
    with Progress(disable=not sys.stderr.isatty()) as progress:
        for place in places:
            task = progress.add_task(f"compiling for {place.given['target']}", total=len(units))
            start, found = time.monotonic(), list[dict[str, Any]]()

            def note(
                answer: dict[str, Any], found: list[dict[str, Any]] = found, task: Any = task
            ) -> None:
                found.append(answer)
                progress.advance(task)

            _shared_out(place, units, jobs, deadline, note)
            _report(add, place, units, found, time.monotonic() - start)


def _shared_out(
    place: At, units: list[str], jobs: int, deadline: float, note: Callable[[dict[str, Any]], None]
) -> None:
    """Units over processes, each with a thread that feeds it."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for unit in units:
        todo.put(unit)
    processes = [_process(place) for _ in range(max(1, min(jobs, len(units))))]
    threads = [
        threading.Thread(target=_feed, args=(process, todo, note), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.1))
    finally:
        for process, thread in zip(processes, threads, strict=True):
            process.kill()
            process.wait()
            thread.join(5.0)  # its process is gone: it reads the end
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not yet sent
                    assert pipe is not None
                    pipe.close()


def _process(place: At) -> subprocess.Popen[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu_ahead", json.dumps(place.given)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )


def _feed(
    process: subprocess.Popen[str],
    todo: queue.SimpleQueue[str],
    note: Callable[[dict[str, Any]], None],
) -> None:
    assert process.stdin is not None and process.stdout is not None
    while True:
        try:
            unit = todo.get_nowait()
        except queue.Empty:
            return
        try:
            process.stdin.write(unit + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:  # it died, or was killed at the deadline
            note({"unit": unit, "kernels": [], "died": True})
            return
        note(json.loads(line))


def _report(
    add: Add, place: At, units: Iterable[str], found: list[dict[str, Any]], seconds: float
) -> None:
    target = place.given["target"]
    kernels = 0
    for answer in found:
        kind, *words = answer["unit"].split()
        tried = kind == "case" and words[-1] != "0"
        kernels += len(answer["kernels"])
        if "error" in answer and not tried:
            add("compile", f"{answer['unit']} for {target}", error=answer["error"])
        for made in [] if tried else answer["kernels"]:
            if made["shared"] > place.shared or made["spills"]:
                why = f"{made['shared']} bytes of shared memory, {made['spills']} spills"
                add("compile", f"{answer['unit']} for {target}", error=f"{made['kernel']}: {why}")
    done = {answer["unit"] for answer in found if "died" not in answer}
    left = [unit for unit in units if unit not in done]
    row = {"units": len(done), "kernels": kernels, "seconds": round(seconds, 1)}
    add("compile", target, **row, **({"skipped": f"no time left for {left}"[:500]} if left else {}))


def baselines() -> subprocess.Popen[bytes]:
    """A process that runs each of the benchmark's ``torch.compile`` baselines on the GPU once."""
    command = [sys.executable, "-m", "benchmarks.gpu_compile"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _baselines() -> None:
    from benchmarks.gpu import CASES
    from benchmarks.gpu_cases import Size

    for cases in CASES.values():
        for case in cases(Size(), torch.device("cuda")):
            for label, call in case.baselines.items():
                if label.startswith("torch.compile"):
                    call(0)


if __name__ == "__main__":
    _baselines()
