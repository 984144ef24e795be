"""Step times that others have published, beside what ``Foreseen.time`` says of them.

    python -m benchmarks.foresight                    # the tables in benchmarks/published
    python -m benchmarks.foresight --rows FILE.csv    # any rows with the columns of mpt_measured.csv
    python -m benchmarks.foresight --full             # a model with all its blocks, beside few
    python -m benchmarks.foresight --tune             # the tuned constants anew, on their rows alone

Four constants are tuned on six rows (``foresight_tuned.py``). All others are published
(``zfunc/foresight/presets.py``) or guessed; each guess is halved and doubled, and the table says
what that does to the mean error. The yardstick is one constant utilisation of each device's peak,
tuned on the same rows. What is timed is a stand-in (``foresight_mpt.py``).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import zfunc as zf
from benchmarks.foresight_mpt import FEW, Case, NotForeseen, case_of, continued, traced
from benchmarks.foresight_tuned import TUNED, is_tuning
from benchmarks.meters import hardware, versions
from zfunc.foresight.clocks import replay
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.rows import StepRow

PUBLISHED = Path(__file__).parent / "published"
MPT = PUBLISHED / "mpt_measured.csv"
GRID = 41  # values of a constant that are tried, of a range that then narrows
GUESSES = ("product_ramp", "attention_ramp", "stream", "link_share", "gap", "dispatch")


@dataclass
class Published:
    """A row of a table.

    Attributes:
        row: as it stands there.
        case: what is foreseen in its place, or why nothing is.
        seconds: of a step, as published.
    """

    row: Mapping[str, str]
    case: Case | None
    why: str
    seconds: float
    tuning: bool


class Traces:
    """Rows of stand-ins, by geometry: what devices and accumulated microbatches share."""

    def __init__(self, processes: int) -> None:
        self._known: dict[Any, tuple[tuple[StepRow, ...], Mapping[str, tuple[int, ...]]]] = {}
        self._processes = processes

    def prepare(self, cases: Iterable[Case]) -> None:
        """Foresee what these cases need, in several processes."""
        wanted = {
            (case.geometry, depth, count): (case, depth, count)
            for case in cases
            for depth in FEW
            for count in ((1,) if case.count == 1 else (2, 3))
        }
        missing = [args for key, args in wanted.items() if key not in self._known]
        with ProcessPoolExecutor(self._processes) as pool:
            for args, found in zip(missing, pool.map(_trace, missing), strict=True):
                self._known[args[0].geometry, args[1], args[2]] = found

    def seconds(self, case: Case, cluster: Cluster) -> float:
        """Of a step of all blocks and microbatches."""
        return continued(case, lambda *few: replay(*self._on(case, few, cluster)).seconds)

    def flops(self, case: Case) -> float:
        """Of such a step, as ``zf.foresee`` counts them."""
        return continued(case, lambda *few: sum(row.flops for row in self._of(case, few)[0]))

    def _on(self, case: Case, few: tuple[int, int], cluster: Cluster) -> Any:
        rows, groups = self._of(case, few)
        return rows, cluster, groups

    def _of(self, case: Case, few: tuple[int, int]) -> Any:
        return self._known[case.geometry, *few]


def _trace(args: tuple[Case, int, int]) -> Any:
    seen = traced(*args)
    return seen.rows, seen.groups


def published(path: Path) -> list[Published]:
    """The rows of a table."""
    found = []
    for row in csv.DictReader(path.read_text().splitlines()):
        case, why = None, ""
        try:
            case = case_of(row)
        except NotForeseen as error:
            why = str(error)
        seconds = float(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"])
        found.append(Published(row, case, why, seconds, is_tuning(row)))
    return found


def cluster_of(case: Case, constants: Mapping[str, Mapping[str, float]]) -> Cluster:
    """Where a case runs: published numbers, but for the tuned ones."""
    name = "a100-80" if case.device == "a100-40" else case.device
    return Cluster.preset(case.device, gpus=case.gpus, **constants.get(name, {}))


def error(predicted: float, measured: float) -> float:
    """Relative, above 0 if the prediction is too slow."""
    return predicted / measured - 1


def tuned(rows: Sequence[Published], traces: Traces) -> dict[str, dict[str, float]]:
    """The two constants of each device with the least mean error on its rows."""
    by_device: defaultdict[str, list[Published]] = defaultdict(list)
    for row in rows:
        if row.case is not None:
            by_device[row.case.device].append(row)
    return {device: _tuned(mine, traces) for device, mine in by_device.items()}


def _tuned(rows: Sequence[Published], traces: Traces) -> dict[str, float]:
    def missed(constants: dict[str, float]) -> float:
        return fmean(
            abs(
                error(
                    traces.seconds(row.case, cluster_of(row.case, {row.case.device: constants})),
                    row.seconds,
                )
            )
            for row in rows
            if row.case is not None
        )

    best = {"product": 0.5, "attention": 0.5}
    width = 0.45
    while width > 0.002:
        tries = [
            {
                name: min(1.0, max(0.02, best[name] + width * step))
                for name, step in zip(best, (i, j), strict=True)
            }
            for i in (-1, -0.5, 0, 0.5, 1)
            for j in (-1, -0.5, 0, 0.5, 1)
        ]
        best = min(tries, key=missed)
        width /= 1.6
    return {name: round(x, 3) for name, x in best.items()}
