"""This checkout against another one of the project: has a step become slower or faster?

Both race DDP in turn, each in ranks of its own, round after round and one right behind the other,
so that what the machine does meanwhile falls on both. What is compared is their ratios to DDP.

    git worktree add ../before SOME_COMMIT
    python -m benchmarks.train_step --mode turns --large-pages --against ../before --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import report

__all__ = ["compare"]

HERE = Path(__file__).resolve().parents[1]


def one_round(root: Path, peers: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """What ``--mode turns`` of the checkout at ``root`` writes of one round.

    Raises:
        RuntimeError: it failed; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as out:
        flags = {"size": args.size, "warmup": args.warmup, "steps": args.steps, "ranks": args.ranks}
        given = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "benchmarks.train_step", "--mode", "turns", *given]
        command += ["--rounds", "1", "--out", out, "--peers", *peers]
        command += ["--large-pages"] if args.large_pages else []
        env = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        written = list(Path(out).glob("*.json"))
        if not written:
            raise RuntimeError(f"{root}: {' '.join(command)} failed\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(written[0].read_text())
    return found


def commit_of(root: Path) -> str:
    """The commit that is checked out there, with a + if files have been changed."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=7"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or str(root)


def compare(args: argparse.Namespace, peers: list[str], console: Console) -> int:
    """All rounds of both checkouts, the table, the JSON; 1 if losses disagree."""
    roots = {"now": HERE, "before": args.against.resolve()}
    commits = {which: commit_of(root) for which, root in roots.items()}
    rounds: list[dict[str, Any]] = []
    agree = True
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=args.rounds * (len(peers) - 1) * 2)
        for turn in range(args.rounds):
            for name in peers[1:]:
                order = ("now", "before") if turn % 2 == 0 else ("before", "now")
                row: dict[str, Any] = {"name": name}
                for which in order:
                    found = one_round(roots[which], [peers[0], name], args)
                    row[which] = found["contestants"][name]
                    agree &= found["losses_agree"]
                    progress.advance(task)
                rounds.append(row)
    rows = {name: summarise([r for r in rounds if r["name"] == name]) for name in peers[1:]}
    print_table(rows, peers[0], commits, console)
    facts = {key: value for key, value in vars(args).items() if key not in ("out", "peers")}
    facts["against"] = commits["before"]
    record = report.record("against", facts, peers)
    record |= {"commits": commits, "contestants": rows, "rounds": rounds, "losses_agree": agree}
    console.print(f"written: {report.write(record, args.out)}")
    return 0 if agree else 1


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one contestant."""
    ratios = {which: [row[which]["ratio_median"] for row in rounds] for which in ("now", "before")}
    change = [a / b for a, b in zip(ratios["now"], ratios["before"], strict=True)]
    return {
        **{which: median(values) for which, values in ratios.items()},
        "change": median(change),
        "change_range": [min(change), max(change)],
    }


def print_table(
    rows: dict[str, Any], yardstick: str, commits: dict[str, str], console: Console
) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in (
        f"{commits['now']} / {yardstick}",
        f"{commits['before']} / {yardstick}",
        "now / before",
        "range",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows.items():
        low, high = row["change_range"]
        table.add_row(
            name,
            f"{row['now']:.3f}",
            f"{row['before']:.3f}",
            f"{row['change']:.3f}",
            f"{low:.3f}-{high:.3f}",
        )
    console.print(table)
