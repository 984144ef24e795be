"""The questions that a report answers, on rows written by hand; clocks; and covering."""

from __future__ import annotations

import pytest

from tests.gpu.clocks import Actor, Uses
from tests.gpu.covering import covering, uncovered
from tests.gpu.record import Report, Row


def gather(number: int, nbytes: int = 8, label: str = "gather a") -> Row:
    return Row("collective", "all_gather", label=label, nbytes=nbytes, number=number)


def wait(number: int) -> Row:
    return Row("await", "all_gather", number=number)


MM = Row("launch", "mm")


def test_beside_is_more_than_three_launches_before_the_first_wait() -> None:
    rows = [gather(0), MM, MM, MM, wait(0), MM, gather(1), MM, MM, MM, MM, wait(1), wait(1)]
    flights = Report(rows).flights()
    assert [(f.launches, f.beside, f.awaited) for f in flights] == [
        (3, False, True),
        (4, True, True),
    ]
    assert [f.issued.number for f in Report(rows).exposed()] == [0]
    assert Report(rows).exposed(exempt=lambda row: row.number == 0) == []


def test_losses_norms_and_flags_are_not_counted() -> None:
    rows = [gather(0, label="loss"), wait(0), gather(1, label="sums of leaves"), wait(1)]
    assert Report(rows).flights() == []
    assert len(Report(rows).flights(small=())) == 2


def test_bytes_in_flight() -> None:
    rows = [gather(0, 8), gather(1, 16), wait(0), gather(2, 4), wait(1), wait(2)]
    assert Report(rows).in_flight() == 24
    assert Report(rows).in_flight(lambda row: row.number != 1) == 8


def test_a_collective_that_nothing_waits_for_is_told() -> None:
    assert [f.awaited for f in Report([gather(0), MM]).flights()] == [False]


def test_host_waits_can_be_allowed_by_their_line() -> None:
    rows = [
        Row("sync", "item", "optim/a.py:3 f < zfunc/b.py:1 g"),
        Row("pageable", "copy", "c.py:1 h"),
    ]
    assert len(Report(rows).host_waits()) == 2
    assert [row.site for row in Report(rows).host_waits(besides=["optim/a.py"])] == ["c.py:1 h"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([Row("launch", "add")], "what is 'mm', then 'add'"),
        ([Row("launch", "mm", arguments=(2.0,))], "0 arguments, then 1"),
        ([MM, MM], "1 rows, then 2"),
        ([Row("kernel", "mm")], "kind is 'launch'"),
        ([Row("launch", "mm", stream="side")], "stream"),
    ],
)
def test_the_first_difference_is_told(other: list[Row], told: str) -> None:
    assert told in Report([MM]).difference(Report(other))
    assert Report([MM]).difference(Report([MM, Row("kept", "x")])) == ""


def test_a_graph_must_not_copy_from_memory_of_the_step() -> None:
    fresh, kept = (("gpu 1",), ("host new 3",)), (("gpu 1",), ("host 3",))
    rows = [Row("copy", "up", arguments=fresh), Row("copy", "up", arguments=kept)]
    assert Report(rows).host_temporaries() == rows[:1]


def test_a_write_hides_what_it_covers_and_no_more() -> None:
    a, b, uses = Actor("a"), Actor("b"), Uses()
    assert not list(uses.enter(a, a.step(), 0, 8, True, "1"))
    assert not list(uses.enter(a, a.step(), 0, 4, True, "2"))
    assert [use.where for use in uses.enter(b, b.step(), 2, 6, False, "3")] == ["1", "2"]
    b.learn(a.clock)
    assert not list(uses.enter(b, b.step(), 0, 8, True, "4"))
    assert [use.where for use in uses.unseen(a)] == ["4"]


def test_two_readers_do_not_race() -> None:
    a, b, uses = Actor("a"), Actor("b"), Uses()
    assert not list(uses.enter(a, a.step(), 0, 8, False, "1"))
    assert not list(uses.enter(b, b.step(), 0, 8, False, "2"))
    assert [use.where for use in uses.enter(b, b.step(), 0, 8, True, "3")] == ["1"]


@pytest.mark.parametrize("strength", [2, 3])
def test_every_allowed_combination_is_covered(strength: int) -> None:
    options = {name: tuple(range(n)) for name, n in zip("abcde", (2, 3, 4, 2, 3), strict=True)}

    def allowed(case: dict[str, int]) -> bool:
        return not (case.get("a") == 1 and case.get("c") == 2)

    found = covering(options, strength, allowed)
    assert not uncovered(found, options, strength, allowed)
    assert all(allowed(case) for case in found)
    assert len(found) < 2 * 3 * 4 * 2 * 3 / 2
