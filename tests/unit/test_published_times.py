"""``benchmarks.foresight``: rows that it takes, what was tuned, how few blocks are continued."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import foresight_cases, foresight_titan
from benchmarks.foresight import FOLDER, MPT, main
from benchmarks.foresight_cases import Traces, cluster_of, guesses, published
from benchmarks.foresight_claims import claims
from benchmarks.foresight_mpt import Case, NotForeseen, case_of, continued, traced
from benchmarks.foresight_tuned import TUNED
from zfunc.foresight import links, operation_times
from zfunc.foresight.clusters import Cluster

pytestmark = pytest.mark.usefixtures("thawed")


def test_four_constants_are_tuned_on_six_rows() -> None:
    rows = published(MPT)
    assert sum(len(constants) for constants in TUNED.values()) == 4
    assert sum(row.tuning for row in rows) == 6
    assert [row.why for row in rows if row.case is None] == [
        "products in fp8 and the scaling around them"
    ] * 2
    assert len(rows) == 59


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("GPU", "tpu", "no device 'tpu': known are a100-40"),
        ("Activation Checkpointing", "maybe", "is 'maybe', expected True or False"),
        ("MicroBatchSize", "0", "MicroBatchSize is '0', expected a number above 0"),
        ("# GPUs", "8.5", "# GPUs is '8.5', expected a whole number"),
        ("GradAccum", "2", "a batch of 8388608 tokens, and 512 GPUs with 2 x 8 sequences"),
        ("Sharding Strategy", "SOME", "no sharding strategy 'SOME': known are FULL_SHARD"),
        ("Activation CPUOffload", "True", "activations that are kept by the host"),
        ("MP Mode", "FULL", "parameters gathered in fp32"),
        ("Model", "4b", "no model '4b': known are 125m"),
        ("NumParams", "7", "7 parameters, and the stand-in has 64862437376"),
    ],
)
def test_a_row_that_is_not_foreseen_says_why(column: str, value: str, why: str) -> None:
    row = next(csv.DictReader(MPT.read_text().splitlines()))
    with pytest.raises(NotForeseen, match=why):
        case_of({**row, column: value})


def test_other_rows_are_cases(tmp_path: Path) -> None:
    """Another device, precision and strategy, none of which the table has."""
    row = next(csv.DictReader(MPT.read_text().splitlines()))
    case = case_of(
        {**row, "GPU": "a100_40gb", "MP Mode": "PURE", "Sharding Strategy": "HYBRID_SHARD"}
    )
    assert case.hybrid and case.reduce is case.compute
    assert cluster_of(case, TUNED).product == TUNED["a100-80"]["product"]


def written(path: Path, *rows: dict[str, str], columns: Any = None, **how: Any) -> Path:
    with path.open("w", newline="", **how) as file:
        table = csv.DictWriter(file, columns or list(rows[0]), extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return path


def first_row() -> dict[str, str]:
    return next(csv.DictReader(MPT.read_text().splitlines()))


def test_rows_may_be_written_otherwise(tmp_path: Path) -> None:
    """In another order, with a mark of the encoding, numbers as people write them; or lack some."""
    row = first_row()
    other = {**row, "Model": "MPT-70B", "# GPUs": "512.0", "Throughput (T/s)": "515,636"}
    other |= {"Activation Checkpointing": "TRUE", "section": 'a "quoted", part'}
    path = written(tmp_path / "a.csv", other, columns=[*row][::-1], encoding="utf-8-sig")
    (found,) = published(path)
    assert found.case == case_of(row) and found.seconds == 8388608 / 515636
    text = path.read_text(encoding="utf-8-sig").splitlines()
    path.write_text("\n".join([text[0], text[1] + ",more", text[1].partition(",")[2]]))
    assert [row.case for row in published(path)] == [None, None]
    assert all("has not 21 fields" in row.why for row in published(path))


@pytest.mark.parametrize("rate", ["0", "nan", "", "fast"])
def test_a_row_without_a_time_is_told(rate: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", {**first_row(), "Throughput (T/s)": rate})
    (found,) = published(path)
    assert found.case is None and found.why.startswith(f"Throughput (T/s) is {rate!r}, expected")


def test_a_file_that_is_no_such_table(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The program says what lacks."""
    path, row = tmp_path / "a.csv", first_row()
    for columns, rows, what in (
        (
            [x for x in row if x not in ("MP Mode", "NumParams")],
            [row],
            "columns MP Mode, NumParams",
        ),
        ([*row], [], "it has no rows"),
        ([""], [], "it lacks the columns Model"),
    ):
        written(path, *rows, columns=columns)
        monkeypatch.setattr("sys.argv", ["foresight", "--rows", str(path)])
        assert main() == 2
        assert what in capsys.readouterr().err
    path.write_bytes(b"\xff\x00")
    assert main() == 2 and "a.csv: this is no table in UTF-8" in capsys.readouterr().err


def test_devices_of_which_nothing_is_tuned_have_published_peaks() -> None:
    row = {**first_row(), "# GPUs": "64", "GlobalBatchSize (T)": str(64 * 8 * 2048)}
    for name, preset in (("v100", "v100"), ("MI300X", "mi300x"), ("h200", "h200")):
        case = case_of({**row, "GPU": name})
        assert cluster_of(case, TUNED) == Cluster.preset(preset, gpus=64)


def test_a_step_that_cannot_be_foreseen_is_a_row_that_says_why(tmp_path: Path) -> None:
    """Where few ranks and long sequences would merge blocks."""
    case, traces = Case("h100", 768, 12, 8, 1 << 17, 1, 1), Traces()
    traces.prepare([case], 1)
    row = replace(published(MPT)[0], case=case)
    assert traces.checked(row).case is None and "merged" in traces.checked(row).why


def test_few_blocks_say_what_all_of_them_take() -> None:
    case = Case("a100-80", 768, 6, 16, 128, 2, 1)
    traces = Traces()
    for depth in foresight_cases.FEW:
        seen = traced(case, depth, 1)
        traces._known[case.geometry, depth, 1] = seen.rows, seen.groups
    cluster, full = cluster_of(case, TUNED), traced(case, 6, 1)
    assert traces.seconds(case, cluster) == pytest.approx(float(full.time(cluster)), rel=1e-9)
    assert traces.flops(case) == full.flops.total


def test_blocks_and_microbatches_are_continued_together() -> None:
    case = Case("h100", 768, 12, 8, 2048, 1, 7)
    assert continued(case, lambda depth, count: 3 + count * (5 + 2 * depth)) == 3 + 7 * 29


def test_guesses_are_put_back() -> None:
    before = operation_times.TILES, links.LARGE
    cluster = cluster_of(Case("h100", 768, 12, 8, 2048, 1, 7), TUNED)
    changed = []
    for name, times in guesses():
        with times(2.0) as change:
            changed.append(
                (change(cluster), operation_times.TILES, links.LARGE) != (cluster, *before)
            )
        now = operation_times.TILES, links.LARGE
        assert now == before, name
    assert len(changed) == 8 and all(changed)


def test_every_published_row_is_predicted_or_says_why() -> None:
    found = list(claims(FOLDER))
    assert len(found) == 5 + 12 + 12 + 3
    assert all(claim.why for claim in found) and sum(claim.case is not None for claim in found) == 9


def test_memory_that_torchtitan_has_published_lies_between_what_is_foreseen() -> None:
    """Of selective recomputation: below all layers kept, above all of them recomputed."""
    pytest.importorskip("transformers")
    first = next(foresight_titan.rows())
    assert first.recomputed is not None and first.kept is not None
    assert first.recomputed < first.published == 82.4 < first.kept
