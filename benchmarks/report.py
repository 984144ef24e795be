"""From what the ranks saw to one table and one JSON file.

Ratios are taken against the yardstick's run nearest in time, and the median of those is reported:
on a machine with neighbours, single seconds are worth little and ratios of adjacent runs much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.meters import MIB, hardware, versions

CAPTION = """\
step s: median of the runs' median steps; / yardstick: median over runs, each beside one of its own
peak: resident memory over that after imports, worst rank, while stepping, and with set-up
sent: bytes per step and rank by the kernel's count on lo; ledger: the library's own count over it
loss gap: largest relative difference from the yardstick's losses"""
LOSS_TOLERANCE = 2e-6  # relative, fp32: the order of additions may differ, nothing else


@dataclass(frozen=True)
class Run:
    """One run of one contestant: what each rank saw (the fields of ``rank.Seen``)."""

    name: str
    ranks: list[dict[str, Any]]

    @property
    def median(self) -> float:
        """Seconds per step as rank 0 timed them (ranks meet in every step)."""
        return median(self.ranks[0]["seconds"])

    @property
    def losses(self) -> list[float]:
        """The mean over ranks, step by step."""
        return [fmean(step) for step in zip(*(rank["losses"] for rank in self.ranks), strict=True)]

    def worst(self, field: str) -> float:
        return max(rank[field] for rank in self.ranks)


def nearest_yardstick(at: int, runs: list[Run], yardstick: str) -> float:
    """Median step of the yardstick's run nearest to run ``at``, or the mean of two equally near."""
    distance = {i: abs(i - at) for i, each in enumerate(runs) if each.name == yardstick}
    least = min(distance.values())
    return fmean(runs[i].median for i, far in distance.items() if far == least)


def loss_gap(mine: Run, reference: Run) -> float:
    """The largest relative difference of two loss curves."""
    pairs = zip(mine.losses, reference.losses, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def summarise_one(name: str, runs: list[Run], yardstick: str, tokens: int) -> dict[str, Any]:
    """One row: seconds, ratios, bytes and memory of one contestant over all of its runs."""
    own = [each for each in runs if each.name == name]
    ratios = [
        each.median / nearest_yardstick(i, runs, yardstick)
        for i, each in enumerate(runs)
        if each.name == name
    ]
    seconds = median(each.median for each in own)
    params, world = own[0].ranks[0]["params"], len(own[0].ranks)
    # Whatever else used the loopback meanwhile can only have added: the least is the truest.
    sent = min(each.ranks[0]["lo_bytes"] for each in own) / world
    ledger = own[0].ranks[0]["ledger_bytes"]
    reference = next(each for each in runs if each.name == yardstick)
    return {
        "runs": len(own),
        "step_seconds_median": seconds,
        "step_seconds_min": min(min(each.ranks[0]["seconds"]) for each in own),
        "cpu_seconds": median(each.worst("cpu_seconds") for each in own),
        "tokens_per_second": tokens / seconds,
        "ratio_median": 1.0 if name == yardstick else median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "sent_bytes": sent,
        "sent_bytes_per_param": sent / params,
        "ledger_bytes": ledger,
        "ledger_over_kernel": None if ledger is None else ledger / sent,
        "peak_bytes": median(each.worst("peak") for each in own),
        "peak_with_setup_bytes": median(each.worst("peak_with_setup") for each in own),
        "loss_gap": max(loss_gap(each, reference) for each in own),
    }


def summarise(runs: list[Run], yardstick: str, tokens: int) -> dict[str, Any]:
    """All rows, in order of appearance; ``tokens`` is per step, of all ranks together."""
    names = dict.fromkeys(each.name for each in runs)
    rows = {name: summarise_one(name, runs, yardstick, tokens) for name in names}
    return {
        "params": runs[0].ranks[0]["params"],
        "yardstick": yardstick,
        "contestants": rows,
        "first_losses": {name: first(runs, name).losses[:5] for name in names},
        "losses_agree": all(row["loss_gap"] <= LOSS_TOLERANCE for row in rows.values()),
    }


def first(runs: list[Run], name: str) -> Run:
    return next(each for each in runs if each.name == name)


def record(benchmark: str, settings: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """What makes a number repeatable: when, where, with what, in which order."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "settings": settings,
        "order": list(order),
    }


def headline(found: dict[str, Any]) -> str:
    """One paragraph above the table: the machine, the versions, the settings that matter."""
    machine, settings = found["hardware"], found["settings"]
    pinned = settings["environment"].get("MALLOC_MMAP_THRESHOLD_", "as each comes")
    pages = "all" if settings.get("large_pages") else "zfunc (zf.init asks for them)"
    return (
        f"{found['date']} · {machine['cpu']}, {machine['cores']} cores · "
        f"torch {found['versions']['torch']}\n"
        f"{found['params'] / 1e6:.1f}M parameters, {settings['ranks']} gloo ranks, 1 thread each, "
        f"MALLOC_MMAP_THRESHOLD_={pinned}, large pages for {pages}, "
        f"{settings['rounds']} rounds of {settings['steps']} steps"
    )


def print_table(found: dict[str, Any], console: Console) -> None:
    """The rows of :func:`summarise` as a table for people."""
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    table = Table(caption=CAPTION, caption_justify="left", **layout)
    table.add_column("", no_wrap=True)
    titles = ("step s", "min s", f"/ {found['yardstick']}", "least-most", "CPU s", "tok/s")
    for title in (*titles, "peak MiB", "+ set-up", "sent MiB", "B/param", "ledger", "loss gap"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in found["contestants"].items():
        table.add_row(name, *cells(row))
    console.print(headline(found))
    console.print(table)
    if not found["losses_agree"]:
        console.print(f"[bold red]losses differ by more than {LOSS_TOLERANCE:g} relative[/]")


def cells(row: dict[str, Any]) -> list[str]:
    share = row["ledger_over_kernel"]
    return [
        f"{row['step_seconds_median']:.3f}",
        f"{row['step_seconds_min']:.3f}",
        f"{row['ratio_median']:.2f}",
        f"{row['ratio_least']:.2f}-{row['ratio_most']:.2f}",
        f"{row['cpu_seconds']:.3f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['peak_bytes'] / MIB:.0f}",
        f"{row['peak_with_setup_bytes'] / MIB:.0f}",
        f"{row['sent_bytes'] / MIB:.1f}",
        f"{row['sent_bytes_per_param']:.2f}",
        "" if share is None else f"{share:.1%}",
        f"{row['loss_gap']:.0e}",
    ]


def write(found: dict[str, Any], folder: Path) -> Path:
    """Store a record as ``<benchmark>-<size, if there is one>-<date>.json`` and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.fromisoformat(found["date"]).strftime("%Y%m%d-%H%M%S")
    size = [found["settings"]["size"]] if "size" in found["settings"] else []
    path = folder / f"{'-'.join([found['benchmark'], *size, stamp])}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path
