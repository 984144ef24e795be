"""Rows of published tables, stand-ins for them on clocks, and constants tuned on some of them."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.foresight_mpt import (
    COLUMNS,
    FEW,
    Case,
    NotForeseen,
    case_of,
    continued,
    seconds_of,
    traced,
)
from benchmarks.foresight_tuned import is_tuning
from zfunc.errors import ZfuncError
from zfunc.foresight import links, operation_times
from zfunc.foresight.clocks import replay
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.presets import ALWAYS_GUESSED
from zfunc.foresight.rows import StepRow

__all__ = [
    "Published",
    "Traces",
    "chip",
    "cluster_of",
    "error",
    "guesses",
    "published",
    "tuned",
    "utilisations",
]

Constants = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Published:
    """A row of a table of step times.

    Attributes:
        row: as it stands there.
        case: what is foreseen in its place; ``None`` for the reason ``why``.
        seconds: of a step, as published; NaN if the row does not say it.
        tuning: whether constants were tuned on it.
    """

    row: Mapping[str, str]
    case: Case | None
    why: str
    seconds: float
    tuning: bool


def published(path: Path) -> list[Published]:
    """The rows of a table with the columns of ``mpt_measured.csv``, in any order.

    Raises:
        ValueError: it has no rows, or lacks columns.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        try:
            names = [name.strip() for name in table.fieldnames or ()]
            table.fieldnames = names
            rows = [(table.line_num, row) for row in table]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path}: this is no table in UTF-8 ({error})") from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(
            f"{path}: it lacks the columns {', '.join(missing)}; there are {', '.join(names)}"
        )
    if not rows:
        raise ValueError(f"{path}: it has no rows below its columns")
    return [_published(row, len(names), line) for line, row in rows]


def _published(found: Mapping[Any, Any], columns: int, line: int) -> Published:
    row = {name: (x or "").strip() for name, x in found.items() if isinstance(name, str)}
    case, why, seconds = None, "", math.nan
    try:
        if None in found or None in found.values():  # a comma too many or too few
            raise NotForeseen(f"line {line} has not {columns} fields, as many as there are columns")
        seconds = seconds_of(row)
        case = case_of(row)
    except NotForeseen as error:
        why = str(error)
    return Published(row, case, why, seconds, is_tuning(row))


class Traces:
    """Rows of stand-ins, by geometry: devices and microbatches beyond the third share them."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[StepRow, ...], Mapping[str, tuple[int, ...]]]] = {}
        self._refused: dict[Any, str] = {}  # why no step of a geometry is foreseen

    def prepare(self, cases: Iterable[Case], processes: int) -> None:
        """Foresee what these cases need."""
        wanted = {
            (case.geometry, depth, count): (case, depth, count)
            for case in cases
            for depth in FEW
            for count in ((1,) if case.count == 1 else (2, 3))
        }
        missing = {key: args for key, args in wanted.items() if key not in self._known}
        with ProcessPoolExecutor(processes) as pool:
            for key, found in zip(missing, pool.map(_trace, missing.values()), strict=True):
                if isinstance(found, str):
                    self._refused[key[0]] = found
                else:
                    self._known[key] = found

    def checked(self, row: Published) -> Published:
        """The row; without a case where that could not be foreseen."""
        why = "" if row.case is None else self._refused.get(row.case.geometry, "")
        return replace(row, case=None, why=why) if why else row

    def seconds(self, case: Case, cluster: Cluster) -> float:
        """Of a step of all blocks and microbatches."""

        def of(depth: int, count: int) -> float:
            rows, groups = self._known[case.geometry, depth, count]
            return replay(rows, cluster, groups).seconds

        return continued(case, of)

    def flops(self, case: Case) -> float:
        """Of such a step, as ``zf.foresee`` counts them: attention whole, recomputation too."""

        def of(depth: int, count: int) -> float:
            return float(sum(row.flops for row in self._known[case.geometry, depth, count][0]))

        return continued(case, of)


def _trace(args: tuple[Case, int, int]) -> Any:
    """The rows of a step and its groups; or why there are none."""
    try:
        seen = traced(*args)
    except (NotForeseen, ZfuncError, ValueError) as error:
        return str(error) or type(error).__name__
    return seen.rows, seen.groups


def chip(case: Case) -> str:
    """The device that constants are of."""
    return "a100-80" if case.device == "a100-40" else case.device


def cluster_of(case: Case, constants: Constants) -> Cluster:
    """Where a case runs: published numbers, but for those constants."""
    return Cluster.preset(case.device, gpus=case.gpus, **constants.get(chip(case), {}))


def error(predicted: float, measured: float) -> float:
    """Relative; above 0 if the prediction is too slow."""
    return predicted / measured - 1


def _by_device(rows: Iterable[Published]) -> dict[str, list[tuple[Case, float]]]:
    found: defaultdict[str, list[tuple[Case, float]]] = defaultdict(list)
    for row in rows:
        if row.case is not None:
            found[row.case.device].append((row.case, row.seconds))
    return found


def tuned(rows: Iterable[Published], traces: Traces) -> dict[str, dict[str, float]]:
    """The two constants of each device that have the least mean error on its rows."""
    return {
        device: _narrowed(
            lambda tried, mine=mine, device=device: _missed(mine, traces, {device: tried})
        )
        for device, mine in _by_device(rows).items()
    }


def _missed(rows: Sequence[tuple[Case, float]], traces: Traces, constants: Constants) -> float:
    errors = (
        error(traces.seconds(case, cluster_of(case, constants)), seconds) for case, seconds in rows
    )
    return fmean(map(abs, errors))


def _narrowed(missed: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """The best of a grid around the best so far, which narrows."""
    best, width = {"product": 0.5, "attention": 0.5}, 0.45
    while width > 0.002:
        steps = [width * x for x in (-1, -0.5, 0, 0.5, 1)]
        tries = [
            {"product": _share(best["product"] + i), "attention": _share(best["attention"] + j)}
            for i in steps
            for j in steps
        ]
        best = min(tries, key=missed)
        width /= 1.6
    return {name: round(x, 3) for name, x in best.items()}


def _share(x: float) -> float:
    return min(1.0, max(0.02, x))


def utilisations(rows: Iterable[Published], traces: Traces) -> dict[str, float]:
    """FLOP/s that each device reaches, as one constant with the least mean error on its rows."""
    found = {}
    for device, mine in _by_device(rows).items():
        rates = [traces.flops(case) / seconds for case, seconds in mine]
        tries = [r / n for r in rates for n in (0.9, 0.95, 1.0, 1.05, 1.1)]
        tries += [min(rates) + (max(rates) - min(rates)) * i / 400 for i in range(401)]

        def missed(rate: float, mine: Any = mine) -> float:
            return fmean(abs(error(traces.flops(case) / rate, s)) for case, s in mine)

        found[device] = min(tries, key=missed)
    return found


def guesses() -> Iterator[tuple[str, Callable[[float], Any]]]:
    """Constants that nobody has published: a name, and a block in which one is that much larger.

    Shares stay at or below 1.
    """
    for name in ALWAYS_GUESSED:
        yield name, lambda factor, name=name: _field_times(name, factor)
    yield "small tiles", _tiles_times
    yield "size of large messages", _large_times


@contextmanager
def _field_times(name: str, factor: float) -> Iterator[Callable[[Cluster], Cluster]]:
    most = 1.0 if name in ("stream", "link_share") else float("inf")
    yield lambda cluster: replace(cluster, **{name: min(most, factor * getattr(cluster, name))})


@contextmanager
def _tiles_times(factor: float) -> Iterator[Callable[[Cluster], Cluster]]:
    """What small tiles reach of large ones."""
    before = operation_times.TILES
    operation_times.TILES = tuple(
        (rows, columns, reached if reached == 1 else min(1.0, factor * reached))
        for rows, columns, reached in before
    )
    try:
        yield lambda cluster: cluster
    finally:
        operation_times.TILES = before


@contextmanager
def _large_times(factor: float) -> Iterator[Callable[[Cluster], Cluster]]:
    before = links.LARGE
    links.LARGE = int(factor * before)
    try:
        yield lambda cluster: cluster
    finally:
        links.LARGE = before
