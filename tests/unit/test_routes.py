"""Who talks to whom in a large group: what is computed, and what the real code does."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from zfunc.errors import DesyncError
from zfunc.ranks import adjacency, routes
from zfunc.ranks.accounting import Ledger
from zfunc.ranks.comm import Group, even_cuts
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.control_channel import NOTHING, ControlChannel
from zfunc.ranks.gloo import Place, PointToPoint
from zfunc.ranks.halving import Halving
from zfunc.ranks.world import World

MANY = 1024


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 31, 100, 1000, 1023, MANY])
def test_partners_and_neighbours_are_mutual_and_few(size: int) -> None:
    few = size - 1 if adjacency.is_direct(size) else 1 + size.bit_length()
    for rank in range(size):
        near = adjacency.neighbours(rank, size)
        assert rank not in near and len(near) == len(set(near)) <= few
        assert all(rank in adjacency.neighbours(peer, size) for peer in near)
        if not adjacency.is_direct(size):
            partners = routes.Cube(rank, size).partners()
            assert len(partners) <= few
            assert all(rank in routes.Cube(peer, size).partners() for peer in partners)


@pytest.mark.parametrize("size", [2, 16, 17, 20, 100, MANY])
def test_a_broadcast_reaches_everybody_once(size: int) -> None:
    for src in (0, size // 3, size - 1):
        reached = Counter(p for r in range(size) for p in routes.children(r, size, src))
        assert reached == Counter(r for r in range(size) if r != src)
        for rank in range(size):
            for peer in routes.children(rank, size, src):
                assert routes.parent(peer, size, src) == rank


@pytest.mark.parametrize("size", [17, 24, 100])
def test_sums_add_every_rank_once(size: int) -> None:
    words = routes.summed([Counter([rank]) for rank in range(size)])
    assert words == Counter(range(size))


# Real groups: every rank a thread with a gloo context and channel of its own.


def over_gloo(place: Place, timeout: float) -> PointToPoint:
    small = adjacency.is_direct(len(place.members))
    return (PointToPoint if small else Halving)(place, timeout)


def among(size: int, body: Callable[[ConnectedGroup], Any], timeout: float = 60.0) -> list[Any]:
    """Run ``body`` on the ranks of a group over real connections."""
    store, hold = HashStore(), threading.Barrier(size)
    members = tuple(range(size))

    def run(rank: int) -> Any:
        place = Place(rank, members, PrefixStore("group", store))
        transport = over_gloo(place, timeout)
        try:
            world = World(rank, size, timeout)
            return body(ConnectedGroup("data", world, members, lambda: transport))
        finally:
            hold.wait()
            transport.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def values(rank: int, numel: int) -> Tensor:
    return torch.sin(torch.arange(numel, dtype=torch.float64) * (rank + 1)) * 3.0 ** (rank % 7)


@pytest.mark.parametrize("size", [17, 19, 24])
def test_a_large_group_computes_what_a_simulated_one_does(size: int) -> None:
    numel = 5 * size + 3
    uneven = routes.offsets([(7 * r) % 11 for r in range(size)])

    def body(ranks: ConnectedGroup) -> list[Any]:
        book = Ledger()
        ranks.world.ledgers.append(book)
        x = values(ranks.rank, numel)
        low, high = uneven[ranks.rank], uneven[ranks.rank + 1]
        whole = torch.zeros(uneven[-1], dtype=torch.float64)
        handles: list[Any] = [
            ranks.all_reduce(values(ranks.rank, 5)),  # small: whole
            ranks.all_reduce(x.clone()),  # by segments
            ranks.reduce_scatter(values(ranks.rank, uneven[-1]), cuts=uneven),
            ranks.all_gather(whole, values(ranks.rank, high - low), cuts=uneven),
            ranks.broadcast(x.clone(), size - 2),
            ranks.all_to_all([x[:2] + peer for peer in range(size)]),
        ]
        if ranks.rank % 2:
            handles[-1].wait()  # those issued before are finished first, in their order
        results = [handle.wait() for handle in handles]
        results.append(ranks.exchange("x" * (ranks.rank % 3)))
        ranks.barrier()
        peers = {*ranks._transport._channel._to}  # type: ignore[attr-defined]
        assert peers == set(adjacency.neighbours(ranks.rank, size))
        return [results, book.total_bytes]

    outcomes = among(size, body)
    parts = [values(r, numel) for r in range(size)]
    pieces = [values(r, uneven[-1]) for r in range(size)]
    total, pieces_total = routes.summed(parts), routes.summed(pieces)
    for rank, ((small, large, own, whole, sent, chunks, texts), nbytes) in enumerate(outcomes):
        assert torch.equal(small, routes.summed([values(r, 5) for r in range(size)]))
        assert torch.equal(large, total)
        assert torch.equal(own, pieces_total[uneven[rank] : uneven[rank + 1]])
        lengths = [(7 * r) % 11 for r in range(size)]
        gathered = [values(r, length) for r, length in enumerate(lengths)]
        assert torch.equal(whole, torch.cat(gathered))
        assert torch.equal(sent, parts[size - 2])
        assert all(torch.equal(c, parts[r][:2] + rank) for r, c in enumerate(chunks))
        assert texts == ["x" * (r % 3) for r in range(size)]
        assert nbytes > 0


def test_small_payloads_go_with_headers() -> None:
    """Those of a second round, too; waited for in any order."""
    size, numel, many = 3, 4096, 40

    def body(ranks: ConnectedGroup) -> tuple[int, int]:
        transport: Any = ranks._transport
        counted = transport._gloo = Counted(transport._gloo)
        weighed = transport._channel = Weighed(transport._channel)
        mine = [torch.full((numel,), 100.0 * ranks.rank + k) for k in range(many)]
        handles = [ranks.all_gather(torch.zeros(size * numel), x) for x in mine]
        sums = [ranks.all_reduce(x) for x in mine]
        for k in (*range(1, many, 2), *reversed(range(0, many, 2))):
            expected = torch.tensor([100.0 * r + k for r in range(size)]).repeat_interleave(numel)
            assert torch.equal(handles[k].wait(), expected)
            assert torch.equal(sums[k].wait(), torch.full((numel,), 300.0 + 3 * k))
        return weighed.sent, counted.sent

    cuts = even_cuts(numel, size)
    for rank, (weighed, counted) in enumerate(among(size, body)):
        own = cuts[rank + 1] - cuts[rank]
        assert counted == 0
        assert weighed == many * 4 * (2 * numel + (numel - own) + 2 * own)


@pytest.mark.parametrize("numel", [100, 4096, 50_000])
@pytest.mark.parametrize("beyond", [False, True])
def test_ranks_may_wait_in_any_order(numel: int, beyond: bool) -> None:
    """Rank 1 asks for the last first; the others issue more than the kernel holds, and then ask."""
    size, many = 3, 40
    room = torch.zeros(size * 8000)

    def body(ranks: ConnectedGroup) -> list[Tensor]:
        x = values(ranks.rank, numel)
        handles: list[Any] = []
        for k in range(many):
            full = torch.zeros(size * numel, dtype=x.dtype)
            handles += [
                ranks.all_gather(full, x + k),
                ranks.reduce_scatter(x * k),
                ranks.all_reduce(x - k),
                ranks.all_to_all([x + k + peer for peer in range(size)]),
                ranks.broadcast(x * (k + 1), k % size),
            ]
        if ranks.rank == 1:
            [handle.wait() for handle in reversed(handles)]
        flood = [
            ranks.all_gather(room.clone(), torch.ones(8000)) for _ in range(400 if beyond else 0)
        ]
        return [handle.wait() for handle in (*handles, *flood)][2 : 5 * many : 5]

    parts = [values(rank, numel) for rank in range(size)]
    for sums in among(size, body):
        for k, total in enumerate(sums):
            assert torch.equal(total, routes.summed([part - k for part in parts]))


class Counted:
    """A backend of gloo that counts what it is asked to send."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.sent = backend, 0
        self.peers: set[int] = set()
        self.recv = backend.recv

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.sent += sum(x.nbytes for x in tensors)
        self.peers.add(peer)
        return self.backend.send(tensors, peer, tag)


class Weighed:
    """ControlChannel that count the payloads that go with headers and notes."""

    def __init__(self, channel: ControlChannel) -> None:
        self.channel, self.sent = channel, 0

    def send(self, peer: int, digest: int, length: int, payload: bytes = b"") -> int:
        self.sent += len(payload)
        return self.channel.send(peer, digest, length, payload)

    def send_note(self, peer: int, number: int, payload: bytes = b"") -> None:
        self.sent += len(payload)
        self.channel.send_note(peer, number, payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


@pytest.mark.parametrize("size", [3, 17, 22])
def test_the_ledger_counts_what_goes_out(size: int) -> None:
    cuts = routes.offsets([(5 * r) % 7 for r in range(size)])
    calls: dict[str, Callable[[Group], Any]] = {
        "all_gather": lambda g: g.all_gather(
            torch.zeros(cuts[-1]), torch.ones(cuts[g.rank + 1] - cuts[g.rank]), cuts=cuts
        ).wait(),
        "reduce_scatter": lambda g: g.reduce_scatter(torch.ones(cuts[-1]), cuts=cuts).wait(),
        "much": lambda g: g.all_gather(torch.zeros(20_000 * size), torch.ones(20_000)).wait(),
        "small": lambda g: g.all_reduce(torch.ones(3)).wait(),
        "large": lambda g: g.all_reduce(torch.ones(1001)).wait(),
        "broadcast": lambda g: g.broadcast(torch.ones(9), 2).wait(),
        "exchange": lambda g: g.exchange("x" * g.rank),
        "barrier": lambda g: g.barrier(),
    }

    def body(ranks: ConnectedGroup) -> dict[str, tuple[int, int]]:
        transport: Any = ranks._transport
        counted = transport._gloo = Counted(transport._gloo)
        weighed = transport._channel = Weighed(transport._channel)
        out = {}
        for name, call in calls.items():
            book = Ledger()
            ranks.world.ledgers[:] = [book]
            before = counted.sent + weighed.sent
            call(ranks)
            out[name] = book.payload_bytes, counted.sent + weighed.sent - before
        return out

    for counted in among(size, body):
        for name, (ours, sent) in counted.items():
            assert ours == sent, name


def sockets() -> int:
    gc.collect()
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:
            continue  # closed meanwhile
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts Linux's descriptors")
def test_sockets_are_opened_to_partners_only() -> None:
    size, counts = 20, []
    meet = threading.Barrier(size)

    def count(at: str) -> None:
        if meet.wait() == 0:
            counts.append(sockets() - before)
        meet.wait()

    def body(ranks: ConnectedGroup) -> None:
        count("made")
        ranks.all_reduce(torch.ones(3)).wait()
        count("reduced")
        ranks.all_reduce(torch.ones(3000)).wait()
        ranks.exchange(ranks.rank)
        count("again")

    before = sockets()
    among(size, body)
    edges = sum(len(routes.Cube(r, size).partners()) for r in range(size))
    assert counts[0] == 2 * size  # that listen: gloo's and the channel'
    assert counts[1] == counts[2] == 2 * size + edges + 2 * 2 * size
    assert counts[1] < size * (size - 1)  # what gloo alone would have to everybody


# A thousand ranks.


class Counting(Store):
    """A store that counts the messages to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.messages = HashStore(), Counter[str]()

    def set(self, key: str, value: str) -> None:
        self.messages["set"] += 1
        self.base.set(key, value)

    def get(self, key: str) -> bytes:
        self.messages["get"] += 1
        return self.base.get(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.messages["wait"] += 1

    def add(self, key: str, value: int) -> int:
        self.messages["add"] += 1
        return self.base.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self.messages["check"] += 1
        return self.base.check(keys)


class Silent:
    """Messages that are complete at once; remembers to whom."""

    def __init__(self) -> None:
        self.peers: set[int] = set()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.peers.add(peer)
        return self

    recv = send

    def wait(self, timeout: Any) -> None:
        return


class Agreeing:  # in place of ControlChannel
    """ControlChannel on which every peer agrees; remembers who they are."""

    def __init__(self) -> None:
        self.peers: dict[int, tuple[int, int]] = {}

    def send(self, peer: int, digest: int, length: int, payload: bytes = b"") -> int:
        assert not payload
        self.peers[peer] = digest, length
        return 1

    def receive(self, peer: int, ticket: int) -> tuple[int, int]:
        return self.peers[peer]

    def take(self, peer: int, ticket: int, into: memoryview = NOTHING) -> None:
        assert not into

    def tell(self, text: str) -> None:
        return

    def close(self) -> None:
        return


@pytest.mark.parametrize("size", [1000, MANY])
@pytest.mark.parametrize("rank", [0, 1, 511, 999])
def test_a_rank_of_a_thousand_talks_to_a_few(rank: int, size: int) -> None:
    store = Counting()
    transport = over_gloo(Place(rank, tuple(range(size)), store), 5.0)
    # Made by this rank alone: it says where it listens, twice, and asks for nobody.
    assert store.messages == Counter({"set": 2})
    store.base.add("met", size - 1)  # all others have said that their headers agree
    backend, channel = Silent(), Agreeing()
    transport._gloo, transport._channel = backend, channel  # type: ignore[assignment]
    group = ConnectedGroup("data", World(rank, size, 5.0), (), lambda: transport)
    full = torch.ones(4 * size)
    group.all_gather(full, full[4 * rank : 4 * rank + 4]).wait()
    group.reduce_scatter(full).wait()
    group.all_reduce(full).wait()
    group.all_reduce(torch.ones(2)).wait()
    group.barrier()
    bound = 1 + (size - 1).bit_length()
    assert len(backend.peers) <= bound
    assert channel.peers.keys() == set(adjacency.neighbours(rank, size))
    for src in (0, size // 2):
        group.broadcast(torch.ones(2), src).wait()
    # Gloo: a socket to each partner; channel: one for each direction; and two that listen.
    assert len(backend.peers) <= 4 * bound
    assert len(backend.peers) + 2 * len(channel.peers) + 2 <= 60
    transport.close()


def test_the_headers_of_a_thousand_ranks_need_five_sockets_each() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 6 * MANY + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"at most {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    try:
        asked: Counter[int] = Counter()
        cards: dict[int, bytes] = {}

        def made(rank: int) -> ControlChannel:
            def card_of(peer: int) -> bytes:
                asked[rank] += 1
                return cards[peer]

            return ControlChannel(rank, lambda card: cards.__setitem__(rank, card), card_of, 30.0)

        channel = [made(rank) for rank in range(MANY)]
        for rank, mine in enumerate(channel):
            for peer in adjacency.neighbours(rank, MANY):
                mine.send(peer, rank, 0)
        for rank, mine in enumerate(channel):
            for peer in adjacency.neighbours(rank, MANY):
                assert mine.receive(peer, 1) == (peer, 0)
        assert {len(mine._to) + len(mine._from) for mine in channel} == {4}  # and one that listens
        assert set(asked.values()) == {2}
        for mine in channel:
            mine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_bytes_of_a_thousand_ranks_are_no_more_than_directly() -> None:
    cuts = even_cuts(MANY * 7, MANY)
    for rank in (0, 3, MANY - 1):
        assert routes.all_gather_bytes(cuts, 4, rank, MANY) == 7 * 4 * (MANY - 1)
        assert routes.reduce_scatter_bytes(cuts, 4, rank, MANY) == 7 * 4 * (MANY - 1)
        assert routes.all_reduce_bytes(2, 4, rank, MANY) == 8 * 10


@pytest.mark.parametrize("size", [2, 3, 5])
def test_nobody_connects_in_vain_to_a_rank_that_has_left(size: int) -> None:
    """The first message with data connects, for as long as the timeout where nobody answers."""
    start = time.monotonic()

    def body(ranks: ConnectedGroup) -> str:
        ranks.barrier()  # of so few sends no data
        if ranks.rank == 1:
            ranks._transport.close()  # type: ignore[attr-defined]
            return ""
        with pytest.raises(DesyncError) as caught:
            ranks.all_gather(torch.ones(9 * size), torch.ones(9), label="first").wait()
        return str(caught.value)

    for rank, message in enumerate(among(size, body)):
        assert rank == 1 or "rank 1 is gone" in message, (rank, message)
    assert time.monotonic() - start < 30


def test_a_peer_in_another_collective_is_told_before_anyone_connects() -> None:
    start = time.monotonic()

    def body(ranks: ConnectedGroup) -> str:
        if ranks.rank == 1:
            with pytest.raises(DesyncError):
                ranks.barrier(label="more")
            return ""
        with pytest.raises(DesyncError) as caught:
            ranks.all_gather(torch.ones(27), torch.ones(9), label="first").wait()
        return str(caught.value)

    for rank, message in enumerate(among(3, body)):
        assert rank == 1 or "rank 1 is in barrier('more')" in message, (rank, message)
    assert time.monotonic() - start < 30


def test_a_rank_that_never_comes_is_missed_whatever_the_store_waits_for() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    transport = PointToPoint(Place(0, (0, 1), store), 0.3)
    start = time.monotonic()
    with pytest.raises(DesyncError, match=r"rank 1 did not take part within 0\.3 s"):
        ConnectedGroup("data", World(0, 2, 0.3), (), lambda: transport).barrier()
    assert time.monotonic() - start < 30
    transport.close()


def test_a_rank_that_fails_alone_and_lives_tells_the_others() -> None:
    """What rank 1 sends is too long for rank 0 only; the rest would wait for rank 0 in vain."""
    start = time.monotonic()

    def body(ranks: ConnectedGroup) -> str:
        lengths = {(1, 0): 5}  # from, to
        chunks = [torch.ones(lengths.get((ranks.rank, peer), 3)) for peer in range(3)]
        handle = ranks.all_to_all(chunks, sizes=[3, 3, 3], label="experts")

        def go_on() -> None:
            if ranks.rank != 1:  # whose message nobody takes
                handle.wait()
            ranks.barrier()

        with pytest.raises(DesyncError) as caught:
            go_on()
        return str(caught.value)

    messages = among(3, body)
    assert "rank 1 sends 5 elements, this rank expects 3" in messages[0]
    for message in messages[1:]:
        assert "rank 0 is gone: it stopped in all_to_all('experts'): rank 1 sends 5" in message
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("size", [3, 17])
@pytest.mark.parametrize("cycle", [False, True])
def test_what_one_rank_drops_is_finished_in_its_turn(size: int, cycle: bool) -> None:
    """The others wait for what comes after it first; a cycle is what an error leaves behind."""

    def body(ranks: ConnectedGroup) -> list[float]:
        before, dropped = (ranks.all_reduce(torch.ones(3000)) for _ in range(2))
        if ranks.rank == 0:
            box: list[Any] = [dropped]
            if cycle:
                box.append(box)
            del dropped, box
            gc.collect()
            assert len(ranks._dropped) == 1
        after = ranks.all_gather(torch.zeros(size), torch.ones(1))
        sums = [before.wait().sum().item(), after.wait().sum().item()]
        if ranks.rank:
            assert dropped.wait().sum() == 3000 * size
        ranks.barrier()
        assert not ranks._under_way
        return sums

    assert among(size, body, timeout=20) == [[3000.0 * size, 1.0 * size]] * size


class Deserted(HashStore):
    """A store whose process has ended, as soon as ``key`` is waited for."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.base, self.key = HashStore(), key

    def set(self, key: str, value: str) -> None:
        self.base.set(key, value)

    def get(self, key: str) -> bytes:
        return self.base.get(key)

    def add(self, key: str, value: int) -> int:
        return self.base.add(key, value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._end(keys)

    def check(self, keys: list[str]) -> bool:
        self._end(keys)
        return self.base.check(keys)

    def _end(self, keys: list[str]) -> None:
        if self.key in keys:
            raise torch.distributed.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(("size", "key"), [(3, "card/1"), (17, "all met")])
def test_a_store_that_is_gone_is_named_and_no_rank(size: int, key: str) -> None:
    transport = over_gloo(Place(0, tuple(range(size)), Deserted(key)), 5.0)
    if size == 17:
        transport._channel = Agreeing()  # type: ignore[assignment]
    group = ConnectedGroup("data", World(0, size, 5.0), (), lambda: transport)
    with pytest.raises(DesyncError, match="the store through which ranks find each other is gone"):
        group.all_reduce(torch.ones(9)).wait()
    with pytest.raises(DesyncError, match="failed before"):
        group.barrier()
