"""Step times that others have published, beside what ``Foreseen.time`` says of them.

    python -m benchmarks.foresight                # the tables in benchmarks/published
    python -m benchmarks.foresight --rows FILE    # any rows with the columns of mpt_measured.csv
    python -m benchmarks.foresight --full         # all blocks of a model, beside few of them
    python -m benchmarks.foresight --tune         # the tuned constants anew, on their rows alone

Four constants are tuned on six rows (``foresight_tuned.py``). All others are published
(``zfunc/foresight/presets.py``) or guessed; each guess is halved and doubled, and the table says
what that does to the mean error. The yardstick is one constant utilisation of each device, tuned on
the same rows. What is timed is a stand-in (``foresight_mpt.py``). Behind the tables of times stands
the memory that torchtitan has published (``foresight_titan.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import foresight_mpt, foresight_titan
from benchmarks.foresight_cases import (
    Published,
    Traces,
    chip,
    cluster_of,
    error,
    guesses,
    published,
    tuned,
    utilisations,
)
from benchmarks.foresight_claims import claims
from benchmarks.foresight_mpt import traced
from benchmarks.foresight_tuned import TUNED
from benchmarks.meters import hardware, versions

FOLDER = Path(__file__).parent / "published"
MPT = FOLDER / "mpt_measured.csv"
MOST, WITHIN, SHARE, OF_YARDSTICK = 0.08, 0.15, 0.8, 0.55  # promised of rows that are held out


def main() -> int:
    """The program; 1 if the promise for the published table is not kept."""
    found = _arguments()
    console, begun, traces = Console(width=110), time.perf_counter(), Traces()
    if found.full:
        return _full(console)
    anchors = [row for row in published(MPT) if row.tuning]
    try:
        rows = published(found.rows or MPT)
    except (OSError, ValueError) as error:
        print(f"--rows: {error}", file=sys.stderr)
        return 2
    others = [] if found.rows or found.tune else list(claims(FOLDER))
    wanted = [row.case for row in (anchors if found.tune else [*anchors, *rows]) if row.case]
    traces.prepare([*wanted, *(claim.case for claim in others if claim.case)], found.processes)
    if found.tune:
        console.print(f"tuned on {len(anchors)} rows: {tuned(anchors, traces)}; committed: {TUNED}")
        return 0
    rates, rows = utilisations(anchors, traces), [traces.checked(row) for row in rows]
    told = [_told(row, traces, rates) for row in rows]
    _print_rows(console, rows, told)
    report = _summary(rows, told)
    report["untuned"] = _untuned(anchors, traces)
    if held := [row for row in rows if row.case and not row.tuning and chip(row.case) in TUNED]:
        report["guesses"] = _sensitivity(held, traces)
    _print_summary(console, report, rates)
    report["claims"] = [_claimed(console, claim, traces) for claim in others]
    if others:
        titan = list(foresight_titan.rows())
        console.print(foresight_titan.table(titan))
        report["memory"] = [asdict(row) for row in titan]
    report |= {"rows": [{**row.row, **x} for row, x in zip(rows, told, strict=True)]}
    report |= {"tuned": TUNED, "hardware": hardware(), "versions": versions()}
    report["seconds"] = time.perf_counter() - begun
    console.print(f"{report['seconds']:.0f} s, {found.processes} processes")
    if found.json:
        found.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if found.rows or report["kept"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option("--rows", type=Path, metavar="FILE", help="a table with the columns of MPT's")
    option("--tune", action="store_true", help="find the tuned constants, on their rows")
    option("--full", action="store_true", help="compare few blocks with all of them")
    option("--processes", type=int, default=2, help="that foresee (%(default)s)")
    day = datetime.now(UTC).strftime("%Y%m%d")
    where = Path(__file__).parent / "results" / f"foresight-{day}.json"
    option("--json", type=Path, nargs="?", const=where, metavar="FILE", help="write all figures")
    return parser.parse_args()


def _told(row: Published, traces: Traces, rates: dict[str, float]) -> dict[str, Any]:
    """What is foreseen of a row."""
    if row.case is None:
        known = None if math.isnan(row.seconds) else row.seconds
        return {"published_s": known, "not_foreseen": row.why}
    seconds, rate = traces.seconds(row.case, cluster_of(row.case, TUNED)), rates.get(chip(row.case))
    return {
        "tuning": row.tuning,
        "untuned": rate is None,
        "published_s": row.seconds,
        "predicted_s": seconds,
        "error": error(seconds, row.seconds),
        "yardstick_error": rate and error(traces.flops(row.case) / rate, row.seconds),
    }


def _print_rows(
    console: Console, rows: Sequence[Published], told: Sequence[dict[str, Any]]
) -> None:
    table = Table(
        title="Step times; * tuned on; ~ of this device nothing is tuned: published peaks, which "
        "are optimistic; errors above 0: predicted too slow"
    )
    for name in (
        "GPU",
        "model",
        "seq",
        "GPUs",
        "micro",
        "published",
        "predicted",
        "error",
        "yardstick",
    ):
        table.add_column(name, justify="left" if name in ("GPU", "model") else "right")
    for row, x in zip(rows, told, strict=True):
        at = row.row
        micro = f"{at['MicroBatchSize']} x {at['GradAccum']}"
        head = [escape(at[name]) for name in ("GPU", "Model", "SeqLen (T)", "# GPUs")]
        head.append(escape(micro))
        if row.case is None:
            known = "" if math.isnan(row.seconds) else f"{row.seconds:.3f} s"
            table.add_row(*head, known, "not foreseen:", escape(row.why), "")
            continue
        errors = [_percent(x[name]) for name in ("error", "yardstick_error")]
        star = "*" if row.tuning else "~" if x["untuned"] else ""
        table.add_row(*head, f"{row.seconds:.3f} s", f"{x['predicted_s']:.3f} s{star}", *errors)
    console.print(table)


def _percent(missed: float | None) -> str:
    return "" if missed is None else f"{100 * missed:+.1f} %"


def _summary(rows: Sequence[Published], told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors by group of rows, and whether the promise is kept on those held out."""
    groups: dict[str, list[dict[str, Any]]] = {"tuned on": [], "held out": []}
    for row, x in zip(rows, told, strict=True):
        if row.case is not None:
            group = "nothing tuned" if x["untuned"] else "held out"
            names = ["tuned on"] if row.tuning else [group, f"{group}, {row.row['GPU']}"]
            for name in names:
                groups.setdefault(name, []).append(x)
    report = {name: _figures(found) for name, found in groups.items() if found}
    held = report.get("held out")
    kept = held is not None and (
        held["mean"] <= MOST
        and held["within 15 %"] >= SHARE * held["rows"]
        and held["mean"] <= OF_YARDSTICK * held["yardstick mean"]
    )
    left_out = sum(row.case is None for row in rows)
    return {"groups": report, "not foreseen": left_out, "kept": kept}


def _figures(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(x["error"]) for x in found]
    return {
        "rows": len(errors),
        "mean": fmean(errors),
        "median": median(errors),
        "worst": max(errors),
        "bias": fmean(x["error"] for x in found),
        "within 10 %": sum(x <= 0.10 for x in errors),
        "within 15 %": sum(x <= WITHIN for x in errors),
        "yardstick mean": fmean(abs(x["yardstick_error"] or 0.0) for x in found),
    }


def _untuned(anchors: Iterable[Published], traces: Traces) -> list[float]:
    """The errors of published peaks alone, on the rows that constants are tuned on."""
    return [
        error(traces.seconds(row.case, cluster_of(row.case, {})), row.seconds)
        for row in anchors
        if row.case
    ]


def _sensitivity(rows: Iterable[Published], traces: Traces) -> dict[str, list[float]]:
    """The mean error on held-out rows with each guess halved and doubled; nothing is tuned anew."""
    held = [(row.case, row.seconds) for row in rows if row.case]
    found = {}
    for name, times in guesses():
        found[name] = []
        for factor in (0.5, 2.0):
            with times(factor) as changed:
                errors = [
                    error(traces.seconds(case, changed(cluster_of(case, TUNED))), seconds)
                    for case, seconds in held
                ]
            found[name].append(fmean(map(abs, errors)))
    return found


def _print_summary(console: Console, report: dict[str, Any], rates: dict[str, float]) -> None:
    for name, x in report["groups"].items():
        flat = (
            "" if name.startswith("nothing") else f"; yardstick {100 * x['yardstick mean']:.1f} %"
        )
        console.print(
            f"{name}: {x['rows']} rows, mean error {100 * x['mean']:.1f} %, median "
            f"{100 * x['median']:.1f} %, bias {100 * x['bias']:+.1f} %, worst "
            f"{100 * x['worst']:.1f} %, {x['within 10 %']} within 10 %, {x['within 15 %']} within "
            f"15 %{flat}"
        )
    shown = ", ".join(f"{device} {rate / 1e12:.0f} TFLOP/s" for device, rate in rates.items())
    console.print(f"yardstick: {shown}; tuned: {TUNED}; not foreseen: {report['not foreseen']}")
    least, most = min(report["untuned"]), max(report["untuned"])
    console.print(
        f"untuned, from published peaks, on the rows tuned on: {100 * least:+.0f} to "
        f"{100 * most:+.0f} %"
    )
    for name, (halved, doubled) in report.get("guesses", {}).items():
        console.print(
            f"guessed: {name}; halved the mean error is {100 * halved:.1f} %, doubled "
            f"{100 * doubled:.1f} %"
        )


def _claimed(console: Console, claim: Any, traces: Traces) -> dict[str, Any]:
    if claim.case is None:
        console.print(f"{claim.what}: not predicted ({claim.why})")
        return {"what": claim.what, "why": claim.why}
    seconds = traces.seconds(claim.case, cluster_of(claim.case, TUNED))
    missed = error(seconds, claim.seconds)
    console.print(
        f"{claim.what}: published {claim.seconds:.1f} s, predicted {seconds:.1f} s "
        f"({100 * missed:+.0f} %; not in it: {claim.why})"
    )
    return {"what": claim.what, "predicted_s": seconds, "error": missed, "why": claim.why}


def _full(console: Console) -> int:
    """MPT-125M with all 12 blocks and 4 microbatches, beside what few of them say."""
    case = foresight_mpt.Case("a100-80", 768, 12, 8, 2048, 8, 4)
    traces = Traces()
    traces.prepare([case], 2)
    cluster = cluster_of(case, TUNED)
    few, full = traces.seconds(case, cluster), float(traced(case, 12, 4).time(cluster))
    console.print(f"continued {few!r} s, in full {full!r} s: {error(few, full):+.1e}")
    return int(abs(error(few, full)) > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
