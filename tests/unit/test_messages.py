"""Messages from rank to rank, in simulated worlds and alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import zfunc as zf
from tests.unit.message_plans import DTYPES, carry_out, check, drawn
from zfunc.errors import DesyncError
from zfunc.ranks.axes import alone, group
from zfunc.ranks.comm import Group, ledger
from zfunc.ranks.point_to_point import connect, message_bytes, receive, send
from zfunc.ranks.simulation import simulate
from zfunc.ranks.transfers import TensorSpec

PAIR = TensorSpec((2,), torch.float32)


def everyone() -> Group:
    return group(None, "data")


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_valid_programs_end_and_every_bit_arrives(random: Random, ranks: int, packets: int) -> None:
    plan = drawn(random, ranks, packets, [0, 1, 5, 300])
    for rank, found in enumerate(simulate(ranks, timeout=20)(carry_out)(plan)):
        check(plan, rank, found)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_ring_sends_before_anybody_receives(n: int) -> None:
    def body() -> None:
        ranks = everyone()
        after, before = (ranks.rank + 1) % n, (ranks.rank - 1) % n
        xs = [(torch.arange(6).view(2, 3).t() + ranks.rank).to(dtype) for dtype in DTYPES]
        for x in xs:  # not contiguous
            send(ranks, x, after, label=str(x.dtype)).wait()
        handles = [receive(ranks, x, before, label=str(x.dtype)) for x in xs]
        for x, handle in reversed(list(zip(xs, handles, strict=True))):
            [got] = handle.wait()
            expected = (torch.arange(6).view(2, 3).t() + before).to(x.dtype)
            assert got.is_contiguous() and torch.equal(got, expected) and got.dtype == x.dtype

    simulate(n)(body)()


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_shared_with_the_sender(n: int) -> None:
    def body() -> None:
        ranks = everyone()
        peer = (ranks.rank + 1) % n
        given = torch.ones(4, requires_grad=True)
        first = receive(ranks, [given, given[1:]], peer)
        send(ranks, [given, given[1:]], peer)
        with torch.no_grad():
            given.zero_()
        a, b = first.wait()
        assert a.sum() == 4 and b.sum() == 3 and not a.requires_grad
        places = {x.untyped_storage().data_ptr() for x in (a, b, given)}
        assert len(places) == 3
        send(ranks, given, peer)
        if ranks.rank == 0 and n > 1:
            assert receive(ranks, given, peer).wait()[0].untyped_storage().nbytes() == 16

    simulate(n)(body)()


def test_ranks_in_a_scope_of_random_numbers_wait_for_each_other() -> None:
    """The scope's lock is one for the threads of the process."""

    def body() -> Tensor:
        ranks = everyone()
        with zf.random.scope(zf.random.key(ranks.rank)):
            first = torch.rand(2)
            coming = receive(ranks, first, 1 - ranks.rank)
            if ranks.rank == 0:
                send(ranks, torch.rand(2), 1)
                return coming.wait()[0]
            [theirs] = coming.wait()
            send(ranks, torch.rand(2), 0)
            return theirs

    found = simulate(2, timeout=20)(body)()
    for rank in range(2):
        with zf.random.scope(zf.random.key(1 - rank)):
            torch.rand(2)
            assert torch.equal(found[rank], torch.rand(2))


def test_the_ledger_counts_what_is_sent_where_it_is_sent() -> None:
    like = [torch.empty(3, device="meta"), TensorSpec((2, 2), torch.float64), torch.tensor(True)]
    assert message_bytes(like) == 12 + 32 + 1
    assert message_bytes(like[0]) == 12

    def body() -> dict[str, int]:
        ranks = group(zf.mesh(data=1, pipe=3), "pipe")
        with ledger() as led:
            if ranks.rank:
                receive(ranks, like, ranks.rank - 1, label="act").wait()
            if ranks.rank < 2:
                given = [torch.zeros(x.shape, dtype=x.dtype) for x in like]
                send(ranks, given, ranks.rank + 1, label="act")
            send(ranks, torch.ones(5), ranks.rank)  # to itself: nothing goes anywhere
        sent = 45 if ranks.rank < 2 else 0
        assert led.payload_bytes == led.by_axis["pipe"] == led.by_label["act"] == sent
        assert led.headers_by_label["act"] == led.by_kind["header"] == 16 * (sent > 0)
        assert led.calls == led.calls_by_label["act"] == (sent > 0)
        return dict(led.by_kind)

    assert simulate(3)(body)() == [{"send": 45, "header": 16}] * 2 + [{}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: send(g, torch.ones(2), 2, label="u"), r"send\('u'\): to=2, expected 0 to 1"),
        (lambda g: send(g, torch.ones(2), -1), "to=-1"),
        (lambda g: receive(g, torch.ones(2), 2, label="u"), r"receive\('u'\): source=2"),
        (lambda g: send(g, torch.empty(2, device="meta"), 0, label="u"), r"'u'.*without data"),
        (lambda g: send(g, torch.ones(2, 2).to_sparse(), 0), "layout torch.sparse_coo"),
        (lambda g: send(g, [torch.ones(2), torch.empty(2, device="meta")], 0), "tensor 1"),
        (lambda g: connect(g, [(0, 2)]), "to=2"),
    ],
)
def test_bad_arguments_are_refused_at_once(call: Callable[[Group], Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=message):
            call(everyone())
        everyone().barrier()

    simulate(2)(body)()


def test_all_ranks_name_the_same_directions() -> None:
    def body() -> None:
        ranks = everyone()
        connect(ranks, [(0, 1), (1, 0)])
        connect(alone(), [(0, 0)])
        mine, theirs = (ranks.rank, 1 - ranks.rank), (1 - ranks.rank, ranks.rank)
        with pytest.raises(DesyncError) as caught:
            connect(ranks, [mine])
        assert f"gives the directions [{mine}], but rank" in str(caught.value)
        assert f"gives [{theirs}]" in str(caught.value)

    simulate(2)(body)()


def test_a_rank_alone_gets_what_it_sends_itself_in_order() -> None:
    ranks = alone()
    later = receive(ranks, PAIR, 0, label="a")
    with pytest.raises(DesyncError, match=r"receive\('a'\).*has not sent"):
        receive(Group("none", ranks.world), PAIR, 0, label="a").wait()
    send(ranks, torch.ones(2), 0, label="a")
    send(ranks, torch.zeros(2), 0, label="b")
    second = receive(ranks, PAIR, 0, label="b")
    assert second.wait()[0].tolist() == [0, 0] and later.wait()[0].tolist() == [1, 1]
    sent = send(ranks, torch.ones(2), 0, label="c")
    wrong = receive(ranks, PAIR, 0, label="d")
    for handle in (wrong, sent):
        with pytest.raises(DesyncError, match=r"'c'.*but expects message\('d'\)"):
            handle.wait()
    send(ranks, torch.ones(2), 0)
    assert receive(ranks, PAIR, 0).wait()[0].sum() == 2


MISMATCHES = [
    ("act 1", PAIR, "act 2", PAIR),
    ("act", PAIR, "act", TensorSpec((2, 1), torch.float32)),
    ("act", PAIR, "act", TensorSpec((2,), torch.int32)),
]


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize(("label", "spec", "other", "another"), MISMATCHES)
def test_a_message_that_was_not_expected_is_told_on_both_sides(
    label: str, spec: TensorSpec, other: str, another: TensorSpec, first: str
) -> None:
    """The third rank, which waits for one of them, hears of it as well."""

    def part(ranks: Group) -> None:
        if ranks.rank == 2:
            receive(ranks, PAIR, 1, label="next").wait()
        if (ranks.rank == 0) == (first == "receive"):
            time.sleep(0.1)
        if ranks.rank == 1:
            receive(ranks, another, 0, label=other).wait()
        handle = send(ranks, torch.zeros(spec.shape, dtype=spec.dtype), 1, label=label)
        for k in range(200):  # what was sent has left: the next one may find out
            handle.wait()
            time.sleep(0.01)
            handle = send(ranks, torch.zeros(2), 1, label=f"more {k}")

    def body() -> str:
        ranks = everyone()
        ranks.barrier()
        began = time.monotonic()
        with pytest.raises(DesyncError) as caught:
            part(ranks)
        with pytest.raises(DesyncError, match="failed before"):
            ranks.barrier()
        assert time.monotonic() - began < 10
        return str(caught.value)

    for rank, message in enumerate(simulate(3, timeout=30)(body)()):
        assert f"message({label!r}) of {spec}" in message, (rank, message)
        assert f"message({other!r}) of {another}" in message, (rank, message)


def test_who_waits_in_a_collective_hears_of_a_message_that_went_wrong() -> None:
    def part(ranks: Group) -> None:
        if ranks.rank == 0:
            send(ranks, torch.zeros(2), 1, label="act 1").wait()
        if ranks.rank == 1:
            receive(ranks, PAIR, 0, label="act 2").wait()
        ranks.barrier(label="end")

    def body() -> str:
        ranks = everyone()
        with pytest.raises(DesyncError) as caught:
            part(ranks)
        return str(caught.value)

    began = time.monotonic()
    assert all("'act 1'" in x and "'act 2'" in x for x in simulate(3, timeout=30)(body)())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["returns", "raises", "sleeps"])
def test_a_rank_that_does_not_send_is_missed_all_along_the_line(how: str) -> None:
    heard: list[tuple[int, str]] = []

    def body() -> None:
        ranks = everyone()
        last = ranks.size - 1
        if ranks.rank == last:
            send(ranks, torch.ones(2), last - 1, label="grad 0")
            if how == "raises":
                raise ZeroDivisionError("on purpose")
            if how == "sleeps":
                time.sleep(20)
            return
        for k in range(2):
            try:
                [x] = receive(ranks, PAIR, ranks.rank + 1, label=f"grad {k}").wait()
            except DesyncError as error:
                heard.append((ranks.rank, str(error)))
                raise
            assert x.tolist() == [1, 1] and k == 0, "what was sent before arrives"
            if ranks.rank:
                send(ranks, x, ranks.rank - 1, label="grad 0")

    began = time.monotonic()
    cause: Any = {
        "returns": (DesyncError, r"'grad 1'.*rank 3 has returned"),
        "raises": (ZeroDivisionError, "on purpose"),
        "sleeps": (DesyncError, r"'grad 1'.*did not take part within 0.5 s"),
    }[how]
    with pytest.raises(cause[0], match=cause[1]):
        simulate(4, timeout=0.5 if how == "sleeps" else 30)(body)()
    assert time.monotonic() - began < 10
    assert {rank for rank, _ in heard} == {0, 1, 2}


def test_a_message_to_a_rank_that_has_gone_is_an_error() -> None:
    def body() -> None:
        ranks = everyone()
        if ranks.rank == 0:
            for k in range(500):
                send(ranks, torch.ones(2), 1, label=f"act {k}").wait()
                time.sleep(0.01)

    with pytest.raises(DesyncError, match=r"send\('act \d+'\): rank 1 has returned"):
        simulate(2)(body)()


def test_messages_begin_anew_in_a_world_that_has_recovered() -> None:
    def body() -> list[float]:
        ranks = everyone()
        peer = 1 - ranks.rank
        old = receive(ranks, PAIR, peer, label="never")
        try:
            send(ranks, torch.ones(2), peer, label=f"of {ranks.rank}")
            send(ranks, torch.ones(2), ranks.rank, label="lost")
            old.wait()
        except DesyncError:
            zf.recover_world()
        with pytest.raises(DesyncError):
            old.wait()
        send(ranks, torch.full((2,), float(ranks.rank)), peer, label="anew")
        send(ranks, torch.full((2,), 7.0), ranks.rank, label="mine")
        [mine] = receive(ranks, PAIR, ranks.rank, label="mine").wait()
        assert mine.tolist() == [7, 7]
        return receive(ranks, PAIR, peer, label="anew").wait()[0].tolist()

    assert simulate(2, timeout=20)(body)() == [[1.0, 1.0], [0.0, 0.0]]
