"""Headers and payloads between ranks: in order, by ticket, and only from ranks."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from zfunc.ranks import control_channel as module
from zfunc.ranks.control_channel import TOKEN_BYTES, ControlChannel
from zfunc.ranks.shared_memory import NOWHERE, Outbox


def connected(
    n: int,
    body: Callable[[int, ControlChannel], Any],
    timeout: float = 30.0,
    strangers: bool = False,
) -> list[Any]:
    """Run ``body`` on n threads with channels between them."""
    barrier, cards = threading.Barrier(n), [b""] * n

    def run(rank: int) -> Any:
        def publish(card: bytes) -> None:
            cards[rank] = card
            barrier.wait()
            if strangers and rank == 1:
                intrude(cards[0])

        channel = ControlChannel(rank, publish, lambda peer: cards[peer], timeout)
        try:
            return body(rank, channel)
        finally:
            barrier.wait()  # nobody hangs up while others still listen

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def taken(channel: ControlChannel, peer: int, ticket: int, size: int) -> bytes:
    into = bytearray(size)
    channel.take(peer, ticket, memoryview(into))
    return bytes(into)


def intrude(card: bytes) -> None:
    """Connect as somebody who does not know the word."""
    port = int(card[TOKEN_BYTES:].decode().split("\n")[2])
    for greeting in (bytes(TOKEN_BYTES) + (2).to_bytes(8, "little"), b"GET /"):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(greeting)


@pytest.mark.parametrize("strangers", [False, True])
def test_headers_come_by_ticket(strangers: bool) -> None:
    def body(rank: int, channel: ControlChannel) -> list[tuple[int, int]]:
        peers = [peer for peer in range(3) if peer != rank]
        for k in range(3):
            assert [channel.send(peer, 100 * rank + k, 2**40 + k) for peer in peers] == [k + 1] * 2
        return [channel.receive(peer, ticket) for peer in peers for ticket in (2, 1, 3)]

    for rank, headers in enumerate(connected(3, body, strangers=strangers)):
        peers = [peer for peer in range(3) if peer != rank]
        assert headers == [(100 * p + k, 2**40 + k) for p in peers for k in (1, 0, 2)]


def test_payloads_come_with_their_headers() -> None:
    def body(rank: int, channel: ControlChannel) -> list[bytes]:
        for k, size in enumerate((5, 0, 70_000)):
            channel.send(1 - rank, k, 7, memoryview(bytes([rank]) * size))
        found = []
        for ticket in (3, 1, 2):
            assert channel.receive(1 - rank, ticket) == (ticket - 1, 7)
            found.append(taken(channel, 1 - rank, ticket, (5, 0, 70_000)[ticket - 1]))
        return found

    for rank, found in enumerate(connected(2, body)):
        peer = bytes([1 - rank])
        assert found == [peer * 70_000, peer * 5, b""]


def posted(channel: ControlChannel) -> int:
    """How many payloads the peers have not taken yet from where they share memory."""
    return len(channel._outbox._unread)


@pytest.mark.skipif(
    Outbox(bytes(TOKEN_BYTES)).address == NOWHERE,
    reason="this system shares no memory without a name",
)
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_large_payloads_are_in_memory_once_the_peer_has_mapped_it(
    hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, channel: ControlChannel) -> int:
        for ticket in (1, 2):  # with the first a rank maps its peer's
            channel.send(1 - rank, 1, 0, memoryview(bytes([ticket]) * 70_000))
            channel.receive(1 - rank, ticket)
            count = posted(channel) if ticket == 2 else 0
            assert taken(channel, 1 - rank, ticket, 70_000) == bytes([ticket]) * 70_000
            both.wait()
        return count

    both = threading.Barrier(2)
    monkeypatch.setattr(module, "_address", lambda: "127.0.0.1")
    hosts_of = iter(hosts)
    monkeypatch.setattr(module, "_host", lambda: next(hosts_of))
    found = connected(2, body)
    assert found == ([1, 1] if hosts == "aa" else [0, 0])


def test_messages_may_come_in_pieces() -> None:
    """A message ends anywhere in what the system hands over."""
    cards: list[bytes] = []
    channel = ControlChannel(0, cards.append, lambda peer: b"", 5.0)
    port = int(cards[0][TOKEN_BYTES:].decode().split("\n")[2])
    where = module.WHERE.pack(module.FOLLOWS, 5, 0)
    message = module.HEADER.pack(7, 9 | module.WITH) + where + b"12345"
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.sendall(cards[0][:TOKEN_BYTES] + (1).to_bytes(8, "little"))
        pieces = threading.Thread(target=lambda: [caller.sendall(bytes([x])) for x in 3 * message])
        pieces.start()
        for ticket in (1, 2, 3):
            assert channel.receive(1, ticket) == (7, 9)
            assert taken(channel, 1, ticket, 5) == b"12345"
        pieces.join()
    channel.close()


def test_ranks_that_write_more_than_fits_read_meanwhile() -> None:
    """None has read anything when all have written far more than the system keeps for them."""
    count, size = 600, 2**15

    def body(rank: int, channel: ControlChannel) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        for k in range(count):
            for peer in peers:
                channel.send(peer, k, rank, memoryview(k.to_bytes(4, "little") * (size // 4)))
        for peer in peers:
            for k in reversed(range(count)):
                assert channel.receive(peer, k + 1) == (k, peer)
                assert taken(channel, peer, k + 1, size) == k.to_bytes(4, "little") * (size // 4)

    connected(3, body)


def test_a_peer_that_reads_no_more_is_timed_out() -> None:
    def body(rank: int, channel: ControlChannel) -> None:
        if rank == 1:
            channel.send(0, 1, 0)
            assert channel.receive(0, 1) == (1, 0)  # connected; then this one reads no more
            done.wait(30)
            return
        channel.send(1, 1, 0)
        channel.receive(1, 1)
        with pytest.raises(TimeoutError):
            flood(channel)
        done.set()

    def flood(channel: ControlChannel) -> None:
        for _ in range(16_000):
            channel.send(1, 2, 0, memoryview(bytes(2**12)))

    done = threading.Event()
    connected(2, body, timeout=0.5)


def test_a_silent_peer_is_timed_out() -> None:
    def body(rank: int, channel: ControlChannel) -> None:
        if rank == 0:
            with pytest.raises(TimeoutError):
                channel.receive(1, 1)

    connected(2, body, timeout=0.2)


def test_who_has_hung_up_is_told_so() -> None:
    def body(rank: int, channel: ControlChannel) -> None:
        channel.send(1 - rank, 1, 0)
        channel.receive(1 - rank, 1)
        channel.close()
        for attempt in (lambda: channel.receive(1 - rank, 2), lambda: channel.send(1 - rank, 2, 0)):
            with pytest.raises(ConnectionAbortedError, match="hung up"):
                attempt()
        assert channel.ask(1 - rank, 1.0) is None

    connected(2, body)


def test_peers_that_disagree_tell_each_other_why() -> None:
    def body(rank: int, channel: ControlChannel) -> str | None:
        for peer in {0, 1, 2} - {rank}:
            channel.send(peer, rank, 0)
            channel.send(peer, rank, 0)  # nobody reads this one
        if rank == 2:
            assert channel.receive(0, 2) == (0, 0)
            with pytest.raises(ConnectionAbortedError, match="it stopped in unit 0"):
                channel.receive(0, 3)
            return None
        channel.receive(1 - rank, 1)
        channel.tell(f"unit {rank}")
        return channel.ask(1 - rank, 10.0)

    assert connected(3, body) == ["unit 1", "unit 0", None]


def test_a_peer_that_does_not_tell_is_not_waited_for() -> None:
    def body(rank: int, channel: ControlChannel) -> str | None:
        return channel.ask(1, 0.2) if rank == 0 else None

    assert connected(2, body) == [None, None]


def test_machines_of_one_name_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that were cloned share a name; the number of the first network is the same on all."""
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    named = []
    for machine in ("boot 1", "boot 2"):
        monkeypatch.setattr("zfunc.ranks.devices.host", lambda name=machine: name)
        named.append(module._host())
    assert named[0] != named[1]


def test_the_address_for_other_hosts_is_not_one_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {"node0": "127.0.1.1", module.OUTSIDE[0]: "10.0.0.5"}
    monkeypatch.setattr(module, "_source", routes.get)
    monkeypatch.setenv("MASTER_ADDR", "node0")  # rank 0's own name, as Debian resolves it
    assert module._address() == "10.0.0.5"
    routes["node0"] = "fd00::7"
    assert module._address() == "fd00::7"
    routes.clear()
    assert module._address() == "127.0.0.1"


def _has_address(address: str) -> bool:
    """Whether this machine has it, asked without the code under test."""
    try:
        socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        ).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param(
            "::1",
            marks=pytest.mark.skipif(
                not (socket.has_dualstack_ipv6() and _has_address("::1")),
                reason="this machine has no IPv6",
            ),
        ),
    ],
)
def test_callers_are_heard_under_either_kind_of_address(address: str) -> None:
    cards: list[bytes] = []
    channel = ControlChannel(0, cards.append, lambda peer: b"", 5.0)
    port = int(cards[0][TOKEN_BYTES:].decode().split("\n")[2])
    caller = socket.create_connection((address, port))  # refused where nobody listens
    with caller:
        caller.sendall(cards[0][:TOKEN_BYTES] + (1).to_bytes(8, "little"))
        caller.sendall(module.HEADER.pack(7, 9))
        assert channel.receive(1, 1) == (7, 9)
    channel.close()


def test_wires_that_nobody_holds_close_their_sockets():
    """Also those in a cycle, of which the collector may meet the sockets first."""
    cards: dict[int, bytes] = {}
    pair = [
        ControlChannel(k, partial(cards.__setitem__, k), cards.__getitem__, 5.0) for k in range(2)
    ]
    for mine, peer in ((pair[0], 1), (pair[1], 0)):
        mine.send(peer, 7, 0)
    pair[0].receive(1, 1)
    sockets = [it for it in pair[0]._open if isinstance(it, socket.socket)]
    assert len(sockets) == 3  # one listens, one calls, one answers
    pair[0].__dict__["itself"] = pair[0]
    pair.clear()
    gc.collect()
    assert all(sock.fileno() == -1 for sock in sockets)
