"""Communication has compute beside it: at stage 3 by layer, at stages 1 and 2 in the next step."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.record import Report, Row
from tests.gpu.training import gpt_model, trained
from zfunc import optim
from zfunc.engine import unit_runs

UNIT = 1 << 13  # a layer of width 32 is four units
LAYERS = (4, 12)


@dataclass
class Flown:
    """What was under way in the third step of a run, at stages 1 and 2 in the second as well.

    Attributes:
        flights: kind, label, launches until the first wait, whether anything waited.
        gathered, reduced: the most bytes under way of either.
        layer: bytes of one layer's gathers.
        queues: the communicators of gathers, and those of reductions.
    """

    flights: list[tuple[str, str, int, bool]]
    gathered: int
    reduced: int
    layer: int
    queues: tuple[set[str], set[str]]


def flown(stage: int, depth: int) -> Flown:
    def wrap(step: Any) -> Any:
        return zf.shard(zf.donate(step), stage=stage, unit_bytes=UNIT)

    _, before, report = trained(wrap, optim.adamw(1e-3), gpt_model(depth, 32)).reports
    assert not report.faults()
    if stage < 3:  # what one step starts the next one waits for
        report = Report(before.rows + report.rows)

    def gathers(row: Row) -> bool:
        return row.what == "all_gather"

    def reductions(row: Row) -> bool:
        return row.what == "reduce_scatter"

    rows = report.collectives()
    forward = {row.label: row.nbytes for row in rows if placed(row.label) == ("gather", 1)}
    return Flown(
        [(f.issued.what, f.label, f.launches, f.awaited) for f in report.flights()],
        report.in_flight(gathers),
        report.in_flight(reductions),
        sum(forward.values()),
        ({row.group for row in rows if gathers(row)}, {r.group for r in rows if reductions(r)}),
    )


def placed(label: str) -> tuple[str, int]:
    """``"gather blocks.3[1]"`` -> gather, 3; the root is -1."""
    found = re.search(r"blocks\.(\d+)", label)
    return label.split()[0], int(found.group(1)) if found else -1


def _runs() -> dict[Any, Flown]:
    found: dict[Any, Flown] = {(3, depth): flown(3, depth) for depth in LAYERS}
    found |= {(stage, 4): flown(stage, 4) for stage in (1, 2)}
    limit, unit_runs.BYTES_ON_A_GPU = unit_runs.BYTES_ON_A_GPU, 3 * found[3, 12].layer
    try:
        found["a device with less room"] = flown(3, 12)
    finally:
        unit_runs.BYTES_ON_A_GPU = limit
    return found


@functools.cache
def runs() -> dict[Any, Flown]:
    """All of them, in one launch; as rank 0 saw them."""
    return ranks.launch(_runs)[0]


@pytest.mark.parametrize("depth", LAYERS)
def test_stage_3_has_compute_beside_every_unit(depth: int) -> None:
    """But the root and the first layer in forward, and their reductions in backward."""
    flights = runs()[3, depth].flights
    assert len([label for _, label, _, _ in flights if placed(label) == ("gather", 1)]) >= 4
    seen: set[str] = set()
    exposed = []
    for what, label, launches, awaited in flights:
        kind, index = placed(label)
        forward = kind == "gather" and label not in seen
        seen.add(label)
        exempt = index in (-1, 0) and (forward or kind == "reduce")
        if awaited and not exempt and launches <= 3:
            exposed.append((what, label, launches))
    assert not exposed, f"{len(exposed)} of {len(flights)}: {exposed}"


def test_what_is_under_way_is_bounded() -> None:
    """Gathers by the layers ahead, whatever the depth; reductions by bytes of the device."""
    for depth in LAYERS:
        found = runs()[3, depth]
        assert 0 < found.gathered <= 2 * found.layer + UNIT, found
    tight = runs()["a device with less room"]
    assert 0 < tight.reduced <= 3 * tight.layer + UNIT * 4
    assert runs()[3, 12].reduced > tight.reduced


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_beside_the_next_forward(stage: int) -> None:
    """None is exposed but the first: the root, which is three pieces here and enters whole."""
    flights = runs()[stage, 4].flights
    gathers = [(label, n) for what, label, n, done in flights if what == "all_gather" and done]
    assert len(gathers) > 4
    assert {label for label, n in gathers if n <= 3} <= {f"join root[{i}]" for i in range(3)}


def test_gathers_and_reductions_do_not_share_a_queue() -> None:
    gathers, reductions = runs()[3, 4].queues
    assert gathers and reductions and not gathers & reductions
