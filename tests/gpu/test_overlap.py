"""Communication has compute beside it: at stage 3 by layer, at stages 1 and 2 in the next step."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.record import Row
from tests.gpu.training import gpt_model, trained
from zfunc import optim

UNIT = 1 << 13  # a layer of width 32 is four units


def _flown(stage: int, depth: int) -> tuple[list[tuple[str, str, int, bool]], int, int]:
    """Of the third step: collectives with their launches until the first wait; bytes."""

    def wrap(step: Any) -> Any:
        return zf.shard(zf.donate(step), stage=stage, unit_bytes=UNIT)

    run = trained(wrap, optim.adamw(1e-3), gpt_model(depth, 32))
    report = run.reports[2]
    assert not report.faults()
    flights = [(f.issued.what, f.label, f.launches, f.awaited) for f in report.flights()]
    layer = sum(row.nbytes for row in report.collectives() if _place(row.label)[1] == 1) // 3
    return flights, report.in_flight(), layer


def _place(label: str) -> tuple[str, int]:
    """``"gather blocks.3[1]"`` -> gather, 3; the root is -1."""
    found = re.search(r"blocks\.(\d+)", label)
    return label.split()[0], int(found.group(1)) if found else -1


@pytest.mark.parametrize("depth", [4, 12])
def test_stage_3_has_compute_beside_every_unit(depth: int) -> None:
    flights, in_flight, layer = ranks.launch(_flown, 3, depth)[0]
    units = [label for _, label, _, _ in flights if _place(label) == ("gather", 1)]
    assert len(units) >= 4  # forward; some of them in backward again
    seen: set[str] = set()
    exposed = []
    for what, label, launches, awaited in flights:
        kind, index = _place(label)
        forward = kind == "gather" and label not in seen
        seen.add(label)
        exempt = index in (-1, 0) and (forward or kind == "reduce")
        if awaited and not exempt and launches <= 3:
            exposed.append((what, label, launches))
    assert not exposed, f"{len(exposed)} of {len(flights)}: {exposed}"
    assert 0 < in_flight <= 6 * max(layer, UNIT)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_beside_the_next_forward(stage: int) -> None:
    flights, _, _ = ranks.launch(_flown, stage, 4)[0]
    gathers = [(label, n) for what, label, n, _ in flights if what == "all_gather"]
    assert gathers
    assert [label for label, launches in gathers if launches <= 3][1:] == []


def _groups() -> set[tuple[str, str]]:
    run = trained(
        lambda f: zf.shard(zf.donate(f), stage=3, unit_bytes=UNIT),
        optim.adamw(1e-3),
        gpt_model(4, 32),
    )
    rows: list[Row] = run.reports[2].collectives()
    return {(row.what, row.group) for row in rows}


def test_gathers_and_reductions_do_not_share_a_queue() -> None:
    for found in ranks.launch(_groups):
        gathers = {group for what, group in found if what == "all_gather"}
        reductions = {group for what, group in found if what == "reduce_scatter"}
        assert gathers and reductions and not gathers & reductions
