"""Schedules of pipelines: theory, any order that can run, and every way in which one cannot."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.imports import imports
from zfunc.errors import CompositionError, ScheduleError
from zfunc.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    balanced_cuts,
    checked_cuts,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule,
    zb,
    zb_lean,
    zbv,
)

NAMES = list(SCHEDULES)
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 9, 16, 32)]


def test_the_room_knows_errors_alone() -> None:
    for module, targets in imports().items():
        if module.startswith("schedules"):
            assert all(x == "errors" or x.startswith("schedules") for x in targets), module


# --- theory, with F = I = W = 1 and B = 2 ---


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_are_idle_as_long_as_theory_says(p: int, m: int) -> None:
    for made in (gpipe(p, m), one_f_one_b(p, m)):
        assert made.bubble() == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert gpipe(p, m).in_flight() == (m,) * p
    assert one_f_one_b(p, m).in_flight() == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize(("ranks", "m"), list(product((1, 2, 3, 4), (1, 3, 4, 8, 10))))
def test_1f1b_ends_at_the_tick_of_theory(ranks: int, m: int) -> None:
    assert one_f_one_b(ranks, m).makespan({"F": 1, "B": 1}) == 2 * (m + ranks - 1)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_interleaved_reaches_theory_where_ranks_divide_microbatches(p: int, v: int) -> None:
    for m in range(p, 33, p):
        made = interleaved(p, m, v)
        assert made.rank_of == tuple(range(p)) * v
        assert made.bubble() == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_interleaved_with_a_remainder_is_between_its_multiples(p: int, v: int) -> None:
    for m in range(1, 3 * p):
        made, above = interleaved(p, m, v).check(), interleaved(p, m + -m % p, v)
        assert 3 * (v * m + p - 1) <= made.makespan() <= above.makespan()
        for mine, theirs in zip(made.in_flight(), above.in_flight(), strict=True):
            assert mine <= theirs


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_is_optimal_with_the_memory_of_1f1b(p: int) -> None:
    for make, m in product((zb, zb_lean), range(1, 33)):
        made, spare = make(p, m).check(), make is zb_lean and p > 1
        assert max(made.in_flight()) == min(p + spare, m)
        assert max(one_f_one_b(p, m).in_flight()) == min(p, m)
        assert made.makespan() == max(3 * m + p - 1, 2 * m + 2 * p - 1)
        if m >= p:
            assert made.bubble() == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 8), (4, 8), (4, 3), (8, 32)])
def test_zb_lean_halves_what_other_ranks_wait_for(p: int, m: int) -> None:
    for r, row in enumerate(zb_lean(p, m).actions):
        halves = sum(action.kind == "I" for action in row)
        assert halves == (min(m, p + r - 1) if r else 0)


@pytest.mark.parametrize("m", [4, 8, 32])
def test_zb_lean_hides_messages_on_two_ranks(m: int) -> None:
    """They delay the first microbatch and the last, however many there are."""
    assert zb_lean(2, m).makespan(message=0.5) == zb_lean(2, m).makespan() + 1
    assert one_f_one_b(2, m).makespan(message=0.5) == one_f_one_b(2, m).makespan() + m / 2


@pytest.mark.parametrize("p", range(1, 9))
def test_zbv_is_optimal_with_the_memory_of_1f1b(p: int) -> None:
    for m in range(1, 33):
        made = zbv(p, m).check()
        assert made.rank_of == (*range(p), *reversed(range(p)))
        assert max(made.in_flight()) <= max(one_f_one_b(p, m).in_flight()) * 1.1
        if m >= p:
            assert made.makespan() == 6 * m + p - 1
    assert zbv(p, 32) is zbv(p, 32)


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_zbv_waits_for_messages_on_the_way_in_and_out_alone(p: int) -> None:
    delays = {m: zbv(p, m).makespan(message=0.1) - zbv(p, m).makespan() for m in (p + 1, 2 * p, 32)}
    assert delays[32] == pytest.approx(delays[2 * p]) and delays[32] <= 0.1 * 5 * p
    assert delays[p + 1] <= 0.1 * 5 * p


@pytest.mark.parametrize("cost", [(1, 1.2, 0.8), (1, 0.8, 1.2), (1, 1.5, 1), (0.5, 1, 0.7)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zbv_is_good_where_parts_differ(p: int, cost: tuple[float, float, float]) -> None:
    """Each rank has work for ``2 M (F + I + W)``, the last one after P - 1 forwards."""
    f, i, w = cost
    took = zbv(p, 32).makespan({"F": f, "I": i, "W": w})
    assert took <= (64 * (f + i + w) + (p - 1) * f) * 1.06


def test_zero_bubble_at_four_ranks_and_eight_microbatches() -> None:
    assert zbv(4, 8).bubble() <= 0.06
    assert zb(4, 8).bubble() == pytest.approx(1 / 9, abs=1e-12)
    assert zbv(4, 8).makespan() / 2 < zb(4, 8).makespan() < one_f_one_b(4, 8).makespan()


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_microbatches(name: str) -> None:
    for ranks, m, chunks in product((1, 2, 3, 5), range(1, 12), (1, 2, 3)):
        made = schedule(name, ranks, m, chunks)
        assert (made.ranks, made.microbatches) == (ranks, m)
        own = {"interleaved": chunks, "zbv": 2}.get(name, 1)
        assert made.chunks == ranks * own


# --- schedules drawn by chance ---


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any owners, any mixture of B with I and W, in any order that can run."""
    ranks, chunks, m = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=chunks, max_size=chunks))
    chance = random.Random(draw(st.integers(0, 2**32)))
    halves = chance.random()
    left: dict[Action, set[Action]] = {}
    for i in range(m):
        above: set[Action] = set()
        for k in reversed(range(chunks)):
            split = chance.random() < halves
            left[Action("F", i, k)] = {Action("F", i, k - 1)} if k else set()
            back = Action("I" if split else "B", i, k)
            left[back] = {Action("F", i, k), *above}
            if split:
                left[Action("W", i, k)] = {back}
            above = {back}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while left:
        action = chance.choice([x for x, needs in left.items() if needs <= done])
        del left[action]
        done.add(action)
        rows[owners[action.chunk]].append(action)
    return Schedule(tuple(owners), m, tuple(map(tuple, rows)))


def crossings_of(chance: random.Random, chunks: int) -> list[tuple[int, int]]:
    """Some pairs of chunks, neighbours among them or not."""
    return [pair for pair in combinations(range(chunks), 2) if chance.random() < 0.6]


def random_cost(seed: int) -> Callable[[str, int, int], float]:
    """By action, zero at times; the same whenever it is asked."""

    def cost(kind: str, microbatch: int, chunk: int) -> float:
        return max(0.0, random.Random(f"{seed} {kind} {microbatch} {chunk}").uniform(-0.5, 2))

    return cost


def neighbours(made: Schedule) -> list[tuple[int, int]]:
    return list(pairwise(range(made.chunks)))


def graph_of(made: Schedule, crossings: Iterable[tuple[int, int]]) -> dict[Action, set[Action]]:
    """What must be over before each action: what stands before it, and what it uses."""
    crossings = list(crossings)
    whole = {(x.microbatch, x.chunk) for row in made.actions for x in row if x.kind == "B"}
    found: dict[Action, set[Action]] = {}
    for row in made.actions:
        for n, (kind, i, k) in enumerate(row):
            needs = found[Action(kind, i, k)] = set(row[n - 1 : n] if n else ())
            if kind == "F":
                needs |= {Action("F", i, a) for a, b in crossings if b == k}
            elif kind == "W":
                needs.add(Action("I", i, k))
            else:
                needs.add(Action("F", i, k))
                after = [b for a, b in crossings if a == k]
                needs |= {Action("B" if (i, b) in whole else "I", i, b) for b in after}
    return found


def is_circular(graph: dict[Action, set[Action]]) -> bool:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


@given(schedules(), st.integers(0, 999), st.floats(0, 2))
def test_a_timeline_is_the_earliest_that_keeps_every_order(
    made: Schedule, seed: int, message: float
) -> None:
    crossings = sorted({*crossings_of(random.Random(seed), made.chunks), *neighbours(made)})
    cost = random_cost(seed)
    when = made.timeline(cost, message, crossings)
    assert {*when} == {x for row in made.actions for x in row}
    graph, seen = graph_of(made, crossings), set()
    for action, (start, end) in when.items():
        assert graph[action] <= seen  # in an order in which nothing precedes what it needs
        seen.add(action)
        owner = made.rank_of[action.chunk]
        ends = [when[x][1] + message * (made.rank_of[x.chunk] != owner) for x in graph[action]]
        assert start == max(ends, default=0.0)
        assert end == start + cost(*action)


@given(schedules(), st.integers(0, 999))
def test_the_sums_of_a_timeline(made: Schedule, seed: int) -> None:
    cost = random_cost(seed)
    when = made.check().timeline(cost)
    end = max(x for _, x in when.values())
    assert made.makespan(cost) == end
    busy = [sum(cost(*x) for x in row) for row in made.actions]
    idle = 1 - sum(busy) / (end * made.ranks) if end else 0.0
    assert made.bubble(cost) == pytest.approx(idle, abs=1e-12)
    for held, row in zip(made.in_flight(), made.actions, strict=True):
        peak = 0
        for n in range(len(row) + 1):
            over = {(i, k) for kind, i, k in row[:n] if kind in "BW"}
            peak = max(peak, len({(i, k) for kind, i, k in row[:n] if kind == "F"} - over))
        assert held == pytest.approx(peak * made.ranks / made.chunks)


@given(schedules(), st.integers(0, 999))
def test_orders_are_refused_if_and_only_if_somebody_waits_for_ever(
    made: Schedule, seed: int
) -> None:
    chance = random.Random(seed)
    rows = [list(row) for row in made.actions]
    for _ in range(chance.randint(1, 3)):
        row = chance.choice([x for x in rows if x])
        a, b = chance.randrange(len(row)), chance.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    other = Schedule(made.rank_of, made.microbatches, tuple(map(tuple, rows)))
    graph = graph_of(other, neighbours(other))
    if not is_circular(graph):
        assert other.check() is other
        return
    with pytest.raises(ScheduleError, match="waits for ever") as caught:
        other.check()
    # Every rank that is named stands before something that has not what it needs.
    told, stuck = str(caught.value), []
    for rank, row in enumerate(rows):
        named = [x for x in row if f"rank {rank} stands before {x} and waits for" in told]
        assert len(named) == (f"rank {rank} stands" in told)
        stuck += named
    assert stuck
    behind = {
        x
        for row in rows
        for x in row
        if any(row.index(x) >= row.index(s) for s in stuck if s in row)
    }
    for action in stuck:
        needs = graph[action] & behind
        assert any(f"{action} and waits for rank" in told or str(x) in told for x in needs)


@given(schedules(), st.data())
def test_what_is_missing_or_there_twice_is_named(made: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([r for r, row in enumerate(made.actions) if row]))
    n = data.draw(st.integers(0, len(made.actions[rank]) - 1))
    action = made.actions[rank][n]

    def altered(row: Iterable[Action], at: int = rank) -> Schedule:
        rows = [tuple(row) if r == at else x for r, x in enumerate(made.actions)]
        return Schedule(made.rank_of, made.microbatches, tuple(rows))

    mine = made.actions[rank]
    with pytest.raises(ScheduleError, match="missing: ") as caught:
        altered([*mine[:n], *mine[n + 1 :]]).check()
    assert str(action) in str(caught.value) and f"on rank {rank}" in str(caught.value)
    again = data.draw(st.integers(0, len(mine)))
    with pytest.raises(ScheduleError, match="twice") as caught:
        altered([*mine[:again], action, *mine[again:]]).check()
    assert str(action) in str(caught.value)
    if made.ranks > 1:
        other = (rank + 1) % made.ranks
        with pytest.raises(ScheduleError, match="is owned by") as caught:
            altered([*made.actions[other], action], other).check()
        assert f"rank {other} has {action}" in str(caught.value)


def one_rank(*rows: tuple[str, int, int]) -> Schedule:
    return Schedule((0,), 1, (rows,))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (one_rank(("F", 0, 0), ("B", 0, 0), ("W", 0, 0)), "either B, or I and W"),
        (one_rank(("F", 0, 0), ("I", 0, 0), ("B", 0, 0)), "either B, or I and W"),
        (one_rank(("F", 0, 0), ("I", 0, 0)), r"missing: W\(microbatch 0, chunk 0\) on rank 0"),
        (one_rank(("F", 0, 0), ("W", 0, 0)), r"missing: I\(microbatch 0, chunk 0\) on rank 0"),
        (one_rank(("F", 0, 0), ("B", 1, 0)), r"B\(microbatch 1, chunk 0\): microbatches are 0"),
        (one_rank(("F", 0, 0), ("B", 0, 1)), r"B\(microbatch 0, chunk 1\): chunks are 0"),
        (one_rank(("F", 0, 0), ("B", 0, -1)), "chunks are 0"),
        (one_rank(("F", 0, 0), ("X", 0, 0)), r"X\(microbatch 0, chunk 0\): kinds are F, B, I, W"),
        (one_rank(("F", 0, 0), ("", 0, 0)), "kinds are"),
        (one_rank(), r"missing: F\(microbatch 0, chunk 0\) on rank 0, B"),
        (Schedule((0, 2), 1, ((), ())), "chunk 1 is owned by rank 2"),
        (Schedule((0,), 9, ((),)), "and 15 more"),
    ],
)
def test_other_broken_schedules_are_named(made: Schedule, told: str) -> None:
    for refuse in (made.check, made.timeline, made.makespan, made.bubble, made.picture):
        with pytest.raises(ScheduleError, match=told):
            refuse()


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    first = [("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)]
    second = [("F", 1, 1), ("B", 1, 1), ("F", 0, 1), ("B", 0, 1)]
    with pytest.raises(ScheduleError) as caught:
        Schedule((0, 1), 2, (first, second)).check()
    assert str(caught.value) == (
        "this schedule waits for ever: rank 0 stands before B(microbatch 0, chunk 0) and waits "
        "for rank 1's B(microbatch 0, chunk 1); rank 1 stands before F(microbatch 1, chunk 1) and "
        "waits for rank 0's F(microbatch 1, chunk 0)"
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Schedule((0,), 0, ((),)), "microbatches is 0"),
        (lambda: Schedule((0,), 1.5, ((),)), "microbatches is 1.5"),
        (lambda: Schedule((), 1, ((),)), "rank_of is empty"),
        (lambda: Schedule(("a",), 1, ((),)), "rank_of is"),
        (lambda: one_rank(("F", 0)), "no action"),  # type: ignore[arg-type]
        (lambda: one_rank(("F", 0.5, 0)), "no action"),  # type: ignore[arg-type]
        (lambda: Schedule((0,), 1, 3), "actions is 3"),  # type: ignore[arg-type]
        (lambda: Schedule((0,), 1, (None,)), "actions is"),  # type: ignore[arg-type]
        (lambda: gpipe(0, 1), "ranks is 0"),
        (lambda: zb(2, 0), "microbatches is 0"),
        (lambda: zbv(2, -1), "microbatches is -1"),
        (lambda: interleaved(2, 2, 0), "chunks is 0"),
        (lambda: one_f_one_b(True, "2"), "microbatches is '2'"),  # type: ignore[arg-type]
        (lambda: gpipe(2, 2).timeline({"F": 1}), r"B\(microbatch 0, chunk 1\) has no cost"),
        (lambda: gpipe(2, 2).timeline({"F": -1, "B": 1}), "takes -1"),
        (lambda: gpipe(2, 2).timeline(lambda *x: float("nan")), "takes nan"),
        (lambda: gpipe(2, 2).timeline(message=-1.0), "message from chunk 0 to chunk 1 takes -1"),
        (lambda: gpipe(2, 2).check([(1, 0)]), r"crossing \(1, 0\)"),
        (lambda: gpipe(2, 2).check([(0, 2)]), r"crossing \(0, 2\)"),
        (lambda: schedule("2f2b", 2, 2), "gpipe, 1f1b, interleaved, zb, zb_lean, zbv"),
        (lambda: schedule(gpipe(2, 3), 2, 2), "for 2 ranks and 3 microbatches"),
        (lambda: schedule(gpipe(3, 2), 2, 2), "for 3 ranks and 2 microbatches"),
        (lambda: schedule(lambda p, m: "gpipe", 2, 2), "returns str, and not a Schedule"),
        (lambda: schedule(3, 2, 2), "3 is no schedule"),  # type: ignore[arg-type]
        (lambda: schedule(one_rank(("F", 0, 0)), 1, 1), "missing"),
        (lambda: schedule("zb", 0, 2), "ranks is 0"),
    ],
)
def test_bad_input_says_what_is_wrong(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        make()
    assert issubclass(ScheduleError, CompositionError) and issubclass(ScheduleError, ValueError)


# --- values and names ---


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_a_value(name: str) -> None:
    made = schedule(name, 3, 4)
    plain = [[tuple(x) for x in row] for row in made.actions]
    same = Schedule(list(made.rank_of), 4, plain)  # type: ignore[arg-type]
    assert same == made and hash(same) == hash(made) and {same: 1}[made] == 1
    assert pickle.loads(pickle.dumps(made)) == made
    assert isinstance(same.actions[0][0], Action)
    assert made != schedule(name, 3, 5)
    with pytest.raises(AttributeError):
        made.microbatches = 5  # type: ignore[misc]


def test_whatever_says_which_schedule_is_meant() -> None:
    given_chunks = []

    def mine(ranks: int, microbatches: int, *, chunks: int) -> Schedule:
        given_chunks.append(chunks)
        return interleaved(ranks, microbatches, chunks)

    assert schedule("interleaved", 2, 4, 3) == schedule(mine, 2, 4, 3) == interleaved(2, 4, 3)
    assert given_chunks == [3]
    assert schedule(lambda p, n, room=9: zb(p, n), 2, 4, 3) == zb(2, 4) == schedule(zb(2, 4), 2, 4)


def test_what_is_held_between_i_and_w() -> None:
    made = zb(2, 3)  # rank 0 has no halves, rank 1 has its second I before its first W
    assert made.in_flight() == (2.0, 2.0)
    assert made.in_flight(between=1.5) == (2.0, 3.0)
    assert made.in_flight(between=0.0) == (2.0, 1.0)
    assert gpipe(2, 3).in_flight(between=7.0) == (3.0, 3.0)
    with pytest.raises(TypeError, match="between='X': expected a number"):
        made.in_flight("X")  # type: ignore[arg-type]


# --- pictures ---


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_in_text_has_every_action_at_its_time(name: str) -> None:
    made = schedule(name, 3, 4)
    lines = made.picture().splitlines()
    assert len(lines) == 3 and len({*map(len, lines)}) == 1
    rows = [line.partition("|")[2] for line in lines]
    scale = len(rows[0]) / made.makespan()
    several = made.chunks > made.ranks
    for action, (start, _) in made.timeline().items():
        rank = made.rank_of[action.chunk]
        nth = [k for k, r in enumerate(made.rank_of) if r == rank].index(action.chunk)
        label = f"{action.kind}{action.microbatch}" + "ab"[nth] * several
        assert rows[rank][round(start * scale) :].startswith(label)
    busy = sum(len(row) - row.count(".") for row in rows)
    assert busy / (3 * len(rows[0])) == pytest.approx(1 - made.bubble())


def test_pictures_of_odd_times() -> None:
    assert "F0" in gpipe(2, 2).picture(lambda kind, i, k: 0.01 if i else 3.0)
    assert gpipe(2, 2).picture({"F": 0, "B": 0}) == "rank 0 |\nrank 1 |"
    assert len(gpipe(2, 2).picture(lambda kind, i, k: 1e-9 if i else 1.0)) < 10_000


def test_plots_are_files_that_do_not_change(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = zbv(2, 2)
    assert made.plot(tmp_path / "a.png") == tmp_path / "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    first = made.plot(str(tmp_path / "a.svg")).read_text()
    assert "<svg" in first and "rank 1" in first and "gradients of weights" in first
    assert made.plot(tmp_path / "b.svg").read_text() == first


def test_no_plot_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"zfunc-torch\[plot\]"):
        gpipe(2, 2).plot(tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


# --- partitions ---


@pytest.mark.parametrize(
    ("weights", "stages", "cuts"),
    [
        ([0, 1, 2, 3, 3, 3], 4, (0, 3, 4, 5, 6)),  # the tables that others publish
        ([0, 1.1, 1.9, 3, 30], 2, (0, 4, 5)),
        ([0, 1.1, 30, 3], 3, (0, 2, 3, 4)),
        ([1, 2, 1], 3, (0, 1, 2, 3)),
        ([5, 2, 9, 1], 3, (0, 2, 3, 4)),  # 5, 2 and 10 have less squares, and a heavier stage
        ([1] * 8 + [30], 3, (0, 4, 8, 9)),  # a heavy head leaves the others even
        ([0.1] * 10, 5, (0, 2, 4, 6, 8, 10)),  # sums of floats, exact
        ([0, 0, 0], 2, (0, 2, 3)),
        ([5], 1, (0, 1)),
    ],
)
def test_partitions(weights: list[float], stages: int, cuts: tuple[int, ...]) -> None:
    assert balanced_cuts(weights, stages) == cuts
    assert checked_cuts(cuts, len(weights), stages) == cuts
    assert checked_cuts(cuts[1:-1], len(weights), stages) == cuts


def test_stages_may_be_empty_if_that_is_said() -> None:
    assert balanced_cuts([1, 2, 1], 4, empty=True) == (0, 1, 2, 3, 3)
    assert balanced_cuts([], 2, empty=True) == (0, 0, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.booleans())
def test_partitions_are_optimal(weights: list[int], stages: int, empty: bool) -> None:
    n, least = len(weights), 0 if empty else 1
    every = (
        [
            sums
            for inner in product(range(n + 1), repeat=stages - 1)
            for cuts in [(0, *inner, n)]
            if all(b - a >= least for a, b in pairwise(cuts))
            for sums in [(*(sum(weights[a:b]) for a, b in pairwise(cuts)), cuts)]
        ]
        if stages <= 4
        else None
    )
    if stages > n and not empty:
        with pytest.raises(CompositionError, match=f"{n} layers cannot be cut into {stages}"):
            balanced_cuts(weights, stages)
        return
    cuts = balanced_cuts(weights, stages, empty=empty)
    assert cuts[0] == 0 and cuts[-1] == n and len(cuts) == stages + 1
    assert all(b - a >= least for a, b in pairwise(cuts))
    if every is not None:
        keys = [(max(x[:-1]), sum(w * w for w in x[:-1]), tuple(-c for c in x[-1])) for x in every]
        mine = [sum(weights[a:b]) for a, b in pairwise(cuts)]
        assert (max(mine), sum(w * w for w in mine), tuple(-c for c in cuts)) == min(keys)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: balanced_cuts([1, 1], 3), "2 layers cannot be cut into 3 stages"),
        (lambda: balanced_cuts([1, 1], 0), "into 0 stages"),
        (lambda: balanced_cuts([1, -1], 1), "layer 1 is -1"),
        (lambda: balanced_cuts([float("nan")], 1), "layer 0 is nan"),
        (lambda: balanced_cuts([float("inf")], 1), "layer 0 is inf"),
        (lambda: checked_cuts([2], 4, 3), "has 1 cuts: it takes 2, or 4 with 0 and 4"),
        (lambda: checked_cuts([3, 2], 4, 3), "stage 1, from 3 to 2, has no layer"),
        (lambda: checked_cuts([0, 2], 4, 3), "stage 0, from 0 to 0, has no layer"),
        (lambda: checked_cuts([2, 9], 4, 3), "stage 2, from 9 to 4, has no layer"),
        (lambda: checked_cuts([1, 2, 3, 4], 4, 3), "must go from 0 to 4"),
        (lambda: checked_cuts([0.5, 2], 4, 3), "cuts are whole numbers"),  # type: ignore[list-item]
        (lambda: checked_cuts([1, 2, 3], 3, 4), "3 layers cannot be cut into 4 stages"),
    ],
)
def test_bad_partitions_say_what_is_wrong(make: Callable[[], object], told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        make()
