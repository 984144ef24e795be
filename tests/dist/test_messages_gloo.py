"""Messages between processes: what simulated ranks get, on every way that a message may take."""

from __future__ import annotations

import sys
import time
from random import Random

import pytest
import torch

import zfunc.ranks.world
from tests.dist.counters import kernel_bytes_sent
from tests.unit.message_plans import Plan, carry_out, check, drawn
from zfunc.ranks import control_channel, shared_memory
from zfunc.ranks.axes import group
from zfunc.ranks.comm import ledger
from zfunc.ranks.launching import launch
from zfunc.ranks.point_to_point import message_bytes, receive, send
from zfunc.ranks.transfers import TensorSpec

# With the header, through shared memory, and over sockets.
NUMELS = [0, 1, 7, 3000, 40_000, 300_000]
LARGE = TensorSpec((5_000_000,), torch.float32)  # too large for the outbox


def plans(n: int) -> list[Plan]:
    return [drawn(Random(seed), n, 12, NUMELS) for seed in range(12)]


def carried_out(n: int, hosts: str = "", room: int = 0) -> int:
    """Every plan on one group after the other; the number of messages that came."""
    if hosts:
        control_channel._host = lambda: hosts[zfunc.ranks.world.rank()]
    if room:  # the outbox is soon full
        shared_memory.ROOM = room
    came = 0
    for plan in plans(n):
        found = carry_out(plan)
        check(plan, zfunc.ranks.world.rank(), found)
        came += len(found[0])
    return came


@pytest.mark.parametrize(
    ("n", "shared", "hosts", "room"),
    [
        (2, "1", "", 0),
        (2, "0", "", 0),
        (3, "1", "", 2**21),
        (3, "1", "aba", 0),
        (4, "1", "", 0),
        (4, "0", "", 0),
    ],
)
def test_valid_programs_end_and_every_bit_arrives(
    n: int, shared: str, hosts: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    found = launch(carried_out, n, hosts, room, nprocs=n, timeout=60)
    waited = sum(kind == "wait" for plan in plans(n) for kind, _ in plan.events)
    assert sum(found) == waited > 100


def circle() -> float:
    """All send much before anybody receives, with nothing connected yet."""
    ranks = group(None, "data")
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    given = [torch.full(LARGE.shape, float(ranks.rank)), torch.ones(3), torch.ones(100_000)]
    handles = [send(ranks, given, after, label=f"part {k}") for k in range(3)]
    coming = [receive(ranks, given, before, label=f"part {k}") for k in range(3)]
    total = sum(handle.wait()[0][::1_000_000].sum().item() for handle in reversed(coming))
    for handle in handles:
        handle.wait()
    return total


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_circle_of_large_messages_ends(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    assert launch(circle, nprocs=3, timeout=60) == [2 * 15.0, 0.0, 15.0]


def while_it_computes() -> tuple[bool, float]:
    """Rank 1 does nothing but compute while a message comes, and then asks."""
    ranks = group(None, "data")
    if ranks.rank == 0:
        ranks.barrier()
        send(ranks, torch.ones(LARGE.shape), 1)
        ranks.barrier()
        return True, 0.0
    coming = receive(ranks, LARGE, 0)
    ranks.barrier()
    assert not coming.done
    began, found = time.monotonic(), 0
    while time.monotonic() - began < 3:  # in Python, with its lock, as little as any rank yields
        found += 1
    done = coming.done
    ranks.barrier()
    return done, coming.wait()[0].sum().item()


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_posted_receive_goes_on_while_the_rank_computes(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    assert launch(while_it_computes, nprocs=2, timeout=60)[1] == (True, 5e6)


def sent_at_the_end() -> float:
    """Rank 0 returns as soon as it has sent, without waiting; rank 1 asks late."""
    ranks = group(None, "data")
    if ranks.rank == 0:
        for k in range(3):
            send(ranks, torch.full((2_000_000 if k else 10,), float(k)), 1, label=f"part {k}")
        return 0.0
    time.sleep(1)
    like = [TensorSpec((2_000_000 if k else 10,), torch.float32) for k in range(3)]
    handles = [receive(ranks, x, 0, label=f"part {k}") for k, x in enumerate(like)]
    return sum(handle.wait()[0].sum().item() for handle in handles)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_what_a_rank_sends_before_it_returns_arrives(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    assert launch(sent_at_the_end, nprocs=2, timeout=60)[1] == 6e6


def passed_on() -> float:
    """Rank 0 has returned long before rank 1 first thinks of it."""
    ranks = group(None, "data")
    if ranks.rank == 0:
        send(ranks, torch.ones(10), 1)
        return 0.0
    time.sleep(1.5)
    return receive(ranks, torch.ones(10), 0).wait()[0].sum().item()


def test_a_message_of_a_rank_that_has_gone_is_there() -> None:
    assert launch(passed_on, nprocs=2, timeout=60)[1] == 10


def traffic() -> tuple[int, int, int]:
    ranks = group(None, "data")
    peer, given = 1 - ranks.rank, [torch.ones(3_000_000), torch.ones(10)]
    for x in (given, given[1]):  # connects, and tells the names
        coming = receive(ranks, x, peer, label="act")
        send(ranks, x, peer, label="act").wait()
        coming.wait()
    ranks.barrier()
    before = kernel_bytes_sent()
    with ledger() as led:
        for x in (given, given[1], given[1]):
            coming = receive(ranks, x, peer, label="act")
            send(ranks, x, peer, label="act").wait()
            coming.wait()
    assert led.payload_bytes == message_bytes(given) + 80
    assert led.by_kind["header"] == 3 * 16
    sent = kernel_bytes_sent() - before
    ranks.barrier()
    return led.total_bytes, sent, led.calls


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's TCP counters")
def test_the_ledger_agrees_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")  # through which no socket is needed
    for counted, sent, calls in launch(traffic, nprocs=2, timeout=60):
        assert calls == 3
        assert sent == pytest.approx(counted, rel=0.001)


def beside_collectives() -> list[float]:
    """Messages under way while the same ranks add up; rank 1 waits for them in another order."""
    ranks = group(None, "data")
    peer, sums = 1 - ranks.rank, []
    coming = [receive(ranks, LARGE, peer, label=f"part {k}") for k in range(2)]
    adding = [ranks.all_reduce(torch.full((200_000,), float(k)), label=f"{k}") for k in range(3)]
    sent = [
        send(ranks, torch.full(LARGE.shape, 1.0 + k), peer, label=f"part {k}") for k in range(2)
    ]
    if ranks.rank:
        sums += [handle.wait()[0].mean().item() for handle in coming]
    sums += [handle.wait().mean().item() for handle in adding]
    if not ranks.rank:
        sums += [handle.wait()[0].mean().item() for handle in coming]
    for handle in sent:
        handle.wait()
    return sorted(sums)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_messages_and_collectives_do_not_mix(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    assert launch(beside_collectives, nprocs=2, timeout=60) == [[0.0, 1.0, 2.0, 2.0, 4.0]] * 2


def of_every_kind() -> None:
    """Small tensors whose memory is not what they say: it is made before its bytes are copied."""
    ranks, z = group(None, "data"), torch.tensor([[1 + 2j, 3 - 4j]])
    given = [
        z.conj(),
        z.conj().imag,
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, requires_grad=True),
        torch.tensor(7),
    ]
    if ranks.rank:
        for came, x in zip(got := receive(ranks, given, 0).wait(), given, strict=True):
            assert came.is_contiguous() and not came.requires_grad and came.data_ptr() % 64 == 0
            assert not came.is_conj() and not came.is_neg() and torch.equal(came, x)
        assert len({x.untyped_storage().data_ptr() for x in got}) == len(given)
        return
    send(ranks, given, 1).wait()
    with pytest.raises(RuntimeError, match="ZeroTensor"):
        send(ranks, torch._efficientzerotensor((3,)), 1)


def test_what_is_small_arrives_whatever_its_memory_is_like() -> None:
    launch(of_every_kind, nprocs=2, timeout=60)
