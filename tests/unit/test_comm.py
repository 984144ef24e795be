"""Collectives, ledgers and meshes in simulated worlds and alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import zfunc as zf
from zfunc import optim
from zfunc.errors import DesyncError
from zfunc.ranks import simulation, world
from zfunc.ranks.axes import group
from zfunc.ranks.collectives import axis_index
from zfunc.ranks.comm import Group, ledger
from zfunc.ranks.simulation import Meeting, simulate

WORLDS = [1, 2, 3, 4]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
]


def everyone() -> Group:
    return group(None, "data")


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that differ by rank and survive every dtype."""
    return ((torch.arange(numel) * 3 + rank * 5) % 7).to(dtype)


cuts_of = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.integers(0, 9), min_size=n, max_size=n).map(
        lambda lengths: [sum(lengths[:k]) for k in range(n + 1)]
    )
)


@given(cuts_of, st.sampled_from(DTYPES))
@settings(max_examples=40)
def test_all_gather_puts_every_segment_in_place(cuts: list[int], dtype: torch.dtype) -> None:
    def body() -> Tensor:
        ranks = everyone()
        start, end = cuts[ranks.rank], cuts[ranks.rank + 1]
        full = torch.zeros(cuts[-1], dtype=dtype)
        handle = ranks.all_gather(full, values(0, cuts[-1], dtype)[start:end], cuts=cuts)
        assert handle.wait() is full
        return full

    for full in simulate(len(cuts) - 1)(body)():
        assert torch.equal(full, values(0, cuts[-1], dtype))


@given(cuts_of, st.booleans())
@settings(max_examples=40)
def test_reduce_scatter_sums_the_own_segment(cuts: list[int], into: bool) -> None:
    n = len(cuts) - 1
    total = torch.stack([values(rank, cuts[-1]) for rank in range(n)]).sum(0)

    def body() -> None:
        ranks = everyone()
        full, before = values(ranks.rank, cuts[-1]), values(ranks.rank, cuts[-1])
        start, end = cuts[ranks.rank], cuts[ranks.rank + 1]
        out = torch.empty(end - start, dtype=full.dtype) if into else None
        own = ranks.reduce_scatter(full, cuts=cuts, out=out).wait()
        assert torch.equal(own, total[start:end])
        assert own is out if into else own.untyped_storage().nbytes() == own.nbytes
        assert torch.equal(full, before)

    simulate(n)(body)()


@pytest.mark.parametrize("n", WORLDS)
def test_reductions_give_every_rank_the_same_bits(n: int) -> None:
    parts = [torch.randn(1001) * 10.0**rank for rank in range(n)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part  # in rank order: floating-point addition is not associative

    def body() -> tuple[Tensor, Tensor]:
        ranks = everyone()
        whole = parts[ranks.rank].clone()
        own = ranks.reduce_scatter(parts[ranks.rank]).wait()
        return ranks.all_reduce(whole).wait(), own

    results = simulate(n)(body)()
    assert all(torch.equal(whole, expected) for whole, _ in results)
    assert torch.equal(torch.cat([own for _, own in results]), expected)


@pytest.mark.parametrize("n", WORLDS)
def test_all_to_all_transposes(n: int) -> None:
    def body() -> None:
        ranks = everyone()
        chunks = [torch.tensor([[ranks.rank, peer]]) for peer in range(n)]
        received = ranks.all_to_all(chunks).wait()
        for peer in range(n):
            assert received[peer].tolist() == [[peer, ranks.rank]]

    simulate(n)(body)()


def test_all_to_all_of_uneven_chunks() -> None:
    def body() -> list[list[int]]:
        rank = everyone().rank
        chunks = [torch.full((rank + 2 * peer,), rank) for peer in range(3)]
        received = everyone().all_to_all(chunks, sizes=[peer + 2 * rank for peer in range(3)])
        return [part.tolist() for part in received.wait()]

    for rank, received in enumerate(simulate(3)(body)()):
        assert received == [[peer] * (peer + 2 * rank) for peer in range(3)]


def test_all_to_all_of_unexpected_sizes_is_an_error() -> None:
    def body() -> None:
        rank = everyone().rank
        chunks = [torch.zeros(rank + peer) for peer in range(2)]
        with pytest.raises(DesyncError, match="sends 1 elements, this rank expects"):
            everyone().all_to_all(chunks, label="experts").wait()

    simulate(2)(body)()


@pytest.mark.parametrize("n", WORLDS)
def test_broadcast_and_exchange(n: int) -> None:
    def body() -> None:
        ranks = everyone()
        x = torch.full((2, 3), float(ranks.rank))
        assert ranks.broadcast(x, n - 1).wait() is x
        assert (x == n - 1).all()
        shared = ranks.exchange({"rank": [ranks.rank]})
        assert shared == [{"rank": [rank]} for rank in range(n)]
        ranks.barrier()

    simulate(n)(body)()


def test_handles_may_be_waited_in_any_order_again_or_never() -> None:
    def body() -> list[float]:
        ranks = everyone()
        xs = [torch.full((4,), float(ranks.rank + k)) for k in range(4)]
        handles = [ranks.all_reduce(x, label=f"x{k}") for k, x in enumerate(xs)]
        handles.pop(2)
        order = reversed(handles) if ranks.rank else handles
        for handle in order:
            assert handle.wait() is handle.wait()
        del handles, handle, order
        ranks.barrier()  # completes what was dropped
        return [x[0].item() for x in xs]

    assert simulate(2)(body)() == [[1.0, 3.0, 5.0, 7.0]] * 2


def test_who_goes_on_holds_alone_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()

    class Over(threading.Event):
        """The rank that ends a meeting goes on behind the others."""

        def set(self) -> None:
            super().set()
            looked.wait(10)

    monkeypatch.setattr(simulation, "Meeting", lambda members: Meeting(members, over=Over()))

    def rank() -> bool:
        full = torch.ones(8)
        storage = StorageWeakRef(full.untyped_storage())
        everyone().all_gather(full, torch.ones(4), cuts=[0, 4, 8]).wait()
        del full
        gone = storage.expired()
        looked.set()
        return bool(gone)

    assert simulate(2)(rank)() == [True, True]


def test_many_reductions_under_way_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.ranks.connected.INFLIGHT_BYTES", 3000)

    def body() -> tuple[list[bool], list[float]]:
        ranks = everyone()
        handles = [ranks.reduce_scatter(torch.full((250,), float(k))) for k in range(6)]
        done = [handle.done for handle in handles]
        return done, [handle.wait()[0].item() for handle in handles]

    for done, sums in simulate(2)(body)():
        assert done == [True, True, True, False, False, False]
        assert sums == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_gather(torch.zeros(2, 2), torch.zeros(2)), "1-D"),
        (lambda g: g.all_gather(torch.zeros(4), torch.zeros(1), label="u"), r"'u'.*shard"),
        (lambda g: g.all_gather(torch.zeros(4), torch.zeros(2).int()), "int32"),
        (lambda g: g.reduce_scatter(torch.zeros(4), cuts=[0, 3]), "expected 3 rising"),
        (lambda g: g.reduce_scatter(torch.zeros(4), cuts=[0, 3, 2]), "expected 3 rising"),
        (lambda g: g.reduce_scatter(torch.zeros(4), cuts=[0, 5, 4]), "expected 3 rising"),
        (lambda g: g.reduce_scatter(torch.zeros(4), out=torch.zeros(4)), "out is"),
        (lambda g: g.all_reduce(torch.zeros(3, 2).T, label="u"), r"'u'.*not contiguous"),
        (lambda g: g.all_to_all([torch.zeros(2)]), "expected 2 chunks"),
        (lambda g: g.all_to_all([torch.zeros(2), torch.zeros(2).int()]), "differ in dtype"),
        (
            lambda g: g.all_to_all([torch.zeros(1)] * 2, sizes=[3, 3], label="u"),
            r"'u'.*sizes\[[01]\] is 3, but .* has 1 elements",
        ),
        (lambda g: g.broadcast(torch.zeros(2), 2), "src=2"),
    ],
)
def test_bad_arguments_are_refused_at_once(call: Callable[[Group], Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=message):
            call(everyone())
        everyone().barrier()  # nothing was issued, so the ranks still agree

    simulate(2)(body)()


def test_the_ledger_counts_what_each_rank_sends() -> None:
    def body() -> tuple[dict[str, int], int, int, int]:
        ranks = everyone()
        ranks.barrier()
        with ledger() as outer:
            ranks.all_gather(torch.zeros(7), torch.zeros([3, 2, 2][ranks.rank])).wait()
            with ledger() as inner:
                ranks.reduce_scatter(torch.zeros(7), label="unit").wait()
            ranks.all_reduce(torch.zeros(10)).wait()  # small: everything to everyone
            ranks.all_reduce(torch.zeros(30_000)).wait()  # large: two rounds of segments
            ranks.broadcast(torch.zeros(5), 1).wait()
        ranks.barrier()
        assert inner.by_label["unit"] == inner.payload_bytes == outer.by_kind["reduce_scatter"]
        return dict(outer.by_kind), outer.total_bytes, outer.calls, inner.total_bytes

    for rank, (kinds, total, calls, inner) in enumerate(simulate(3)(body)()):
        own = [3, 2, 2][rank] * 4
        assert kinds == {
            "all_gather": 2 * own,
            "reduce_scatter": 28 - own,
            "all_reduce": 2 * 40 + 4 * 10_000 * 4,
            "broadcast": 2 * 20 if rank == 1 else 0,
            "header": 6 * 2 * 16,  # two for the large all-reduce
        }
        assert total == sum(kinds.values())
        assert calls == 5
        assert inner == 28 - own + 32


def test_the_ledger_counts_collectives_issued_from_another_thread() -> None:
    def body() -> int:
        ranks = everyone()
        with ledger() as led:
            thread = threading.Thread(target=lambda: ranks.all_reduce(torch.zeros(2)).wait())
            thread.start()
            thread.join()
        return led.by_kind["all_reduce"]

    assert simulate(2)(body)() == [8, 8]


def test_alone_nothing_is_sent() -> None:
    with ledger() as led:
        ranks = everyone()
        x = torch.ones(3)
        assert ranks.all_reduce(x).wait() is x
        assert torch.equal(ranks.all_gather(torch.zeros(3), x).wait(), x)
        own = ranks.reduce_scatter(x).wait()
        assert torch.equal(own, x) and own.data_ptr() != x.data_ptr()
        assert ranks.exchange("me") == ["me"]
        ranks.barrier()
    assert led.total_bytes == 0
    assert (world.rank(), world.world_size(), axis_index()) == (0, 1, 0)


def test_a_step_makes_no_group_each_time_it_is_called() -> None:
    tx = optim.sgd(0.1)

    def loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (params["w"] * batch).sum()

    def body() -> int:
        step = zf.shard(zf.train_step(loss, tx), stage=3)
        state = step.place(zf.TrainState.create({"w": torch.ones(8)}, tx))
        state, _ = step(state, torch.ones(8))
        before = len(world.current().groups)
        for _ in range(3):
            state, _ = step(state, torch.ones(8))
        return len(world.current().groups) - before

    assert zf.simulate(2)(body)() == [0, 0]
