"""``benchmarks.foresight``: rows that it takes, what was tuned, how few blocks are continued."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import foresight_cases
from benchmarks.foresight import FOLDER, MPT
from benchmarks.foresight_cases import Traces, cluster_of, guesses, published
from benchmarks.foresight_claims import claims
from benchmarks.foresight_mpt import Case, NotForeseen, case_of, continued, traced
from benchmarks.foresight_tuned import TUNED
from zfunc.foresight import links, operation_times


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
        ("GPU", "tpu", "no device 'tpu': known are h100_80gb"),
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
