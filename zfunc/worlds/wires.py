"""Sockets to the neighbours, for the headers that keep ranks in step and for small payloads.

They could travel as messages of the backend, but gloo asks the receiver first and wakes a thread
on either side for each: 0.2 ms per collective, and over 1 ms where the cores are busy. What is
written to a socket, 0.01 ms, waits in the kernel until somebody looks. A closed socket also tells
at once that a peer has died, and a read from it can be interrupted.

A rank listens from the beginning and calls a peer when it first has something to tell it, over a
socket of its own for each direction: so nobody waits to be called, and a rank has sockets to those
ranks only that it really talks to.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from zfunc.worlds import devices
from zfunc.worlds.hearing import HERE, listening, loopback_only
from zfunc.worlds.transport import HEADER_BYTES

__all__ = ["Wires"]

HEADER = struct.Struct("<qq")
assert HEADER.size == HEADER_BYTES
TEXT = -1  # in place of a digest: that many bytes of text follow
LENGTH_BITS = 44  # of a header's second number; how many bytes of payload follow is above them
READ_BYTES = 2**18
TOKEN_BYTES = 16
GREETING_BYTES = TOKEN_BYTES + 8  # the token, and the rank that calls
CLOSED = "connection closed by the peer"
LATE_SECONDS = 0.2  # for which a word may be on its way behind the end of another connection
GREETING_SECONDS = 10.0  # for which a caller may be silent
OUTSIDE = "192.0.2.1", "2001:db8::1"  # nobody's: RFC 5737 and 3849 keep them for documentation

Cards = Callable[[int], bytes]


class Wires:
    """Ordered headers, and the payloads that go with them, between ranks of one group.

    Args:
        rank: this rank in the group.
        publish: receives this rank's card: where it listens, and the word that callers must know.
        card_of: returns the card of a rank, once that has published it.
        timeout: seconds to wait for a peer.

    Attributes:
        close: call it to hang up.
    """

    def __init__(
        self, rank: int, publish: Callable[[bytes], None], card_of: Cards, timeout: float
    ) -> None:
        self._rank, self._card_of, self._timeout = rank, card_of, timeout
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._heard: defaultdict[int, int] = defaultdict(int)
        self._early: dict[tuple[int, int], tuple[int, int, bytearray]] = {}
        self._texts: dict[int, str] = {}
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._unread: defaultdict[int, bytearray] = defaultdict(bytearray)  # less than a message
        self._callers: dict[socket.socket, tuple[bytes, float]] = {}  # who have not said who
        self._server = listening()
        # Held by the finaliser, so that they are closed before the garbage collector meets them.
        self._open = {self._server}
        self.close = weakref.finalize(self, _close, self._open)
        self.close.atexit = False
        # Whoever calls must know a word that only went through the store.
        self._token = secrets.token_bytes(TOKEN_BYTES)
        here = (_host(), _address(), str(self._server.getsockname()[1]))
        publish(self._token + "\n".join(here).encode())

    @property
    def sockets(self) -> int:
        """How many are open, the listening one among them."""
        return 1 + len(self._to) + len(self._from)

    def send(self, peer: int, digest: int, length: int, payload: bytes = b"") -> int:
        """Send a header and what goes with it; returns its ticket: how many this peer got.

        It waits for the peer only where the kernel holds no more, and reads meanwhile what peers
        write: they may be waiting likewise.

        Raises:
            TimeoutError: the peer did not read in time.
            OSError: the peer is gone.
        """
        sock = self._to.get(peer) or self._call(peer)
        data = HEADER.pack(digest, length | len(payload) << LENGTH_BITS) + payload
        try:
            done = sock.send(data)
        except BlockingIOError:
            done = 0
        if done < len(data):
            self._push(sock, memoryview(data)[done:])
        self._sent[peer] += 1
        return self._sent[peer]

    def receive(self, peer: int, ticket: int) -> tuple[int, int]:
        """The peer's header with this ticket: a digest and a length; kept until taken.

        Raises:
            TimeoutError: it did not come in time.
            OSError: the peer is gone, or out of step with another one.
        """
        while self._heard[peer] < ticket:
            if peer in self._texts:
                raise ConnectionAbortedError(f"it stopped in {self._texts[peer]}")
            self._read(peer, self._timeout)
        digest, length, _ = self._early[peer, ticket]
        return digest, length

    def take(self, peer: int, ticket: int) -> bytearray:
        """The payload that came with a header, empty if none did; neither is kept any longer."""
        return self._early.pop((peer, ticket))[2]

    def tell(self, text: str) -> None:
        """Send every peer that was called a text, for whoever asks with :meth:`ask`."""
        data = text.encode()
        for sock in self._to.values():
            try:
                self._push(sock, memoryview(HEADER.pack(TEXT, len(data)) + data))
            except OSError:
                continue  # gone, so it will not ask

    def ask(self, peer: int, timeout: float) -> str | None:
        """The text that the peer tells, behind the headers it has sent; ``None`` if it does not."""
        seconds = min(timeout, self._timeout)
        try:
            while peer not in self._texts:
                self._read(peer, seconds)
        except OSError:
            return None
        return self._texts[peer]

    def _read(self, peer: int, seconds: float) -> None:
        """Wait for something from a peer, and keep the messages that are complete."""
        sock = self._from.get(peer) or self._answer(peer, seconds)
        if sock.gettimeout() != seconds:
            sock.settimeout(seconds)
        part = sock.recv(READ_BYTES)
        if not part:
            raise ConnectionResetError(CLOSED)
        data = self._unread[peer]
        data += part
        start = 0
        while len(data) >= start + HEADER_BYTES:
            digest, length = HEADER.unpack_from(data, start)
            size = length if digest == TEXT else length >> LENGTH_BITS
            stop = start + HEADER_BYTES + size
            if len(data) < stop:
                break
            payload = data[stop - size : stop]
            if digest == TEXT:
                self._texts.setdefault(peer, payload.decode())
            else:
                self._heard[peer] += 1
                length &= (1 << LENGTH_BITS) - 1
                self._early[peer, self._heard[peer]] = digest, length, payload
            start = stop
        del data[:start]

    def _push(self, sock: socket.socket, data: memoryview) -> None:
        """Send all of ``data``, and read what arrives until that is possible."""
        deadline = time.monotonic() + self._timeout
        ended: set[int] = set()
        while True:
            with suppress(BlockingIOError):
                data = data[sock.send(data) :]
            if not data:
                return
            peers = {other: peer for peer, other in self._from.items() if peer not in ended}
            watched = [self._server, *self._callers, *peers]
            ready = _ready(watched, deadline - time.monotonic(), until=sock)
            if not ready:
                raise TimeoutError("timed out")
            for other in ready:
                if other in self._callers:
                    self._hear(other)
                elif other is self._server:
                    self._welcome()
                elif other is not sock:
                    try:
                        self._read(peers[other], self._timeout)
                    except OSError:  # whoever reads from it next is told
                        ended.add(peers[other])

    def _call(self, peer: int) -> socket.socket:
        """Connect to a peer and say who calls."""
        card = self._card_of(peer)
        host, address, port = card[TOKEN_BYTES:].decode().split("\n")
        target = HERE if host == _host() else address
        sock = socket.create_connection((target, int(port)), self._timeout)
        self._open.add(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(card[:TOKEN_BYTES] + self._rank.to_bytes(8, "little"))
        sock.setblocking(False)
        self._to[peer] = sock
        return sock

    def _answer(self, peer: int, seconds: float) -> socket.socket:
        """Let callers in until ``peer`` is among them."""
        deadline = time.monotonic() + seconds
        end, ended = self._to.get(peer), False  # nothing ever comes this way, but the end
        while peer not in self._from:
            watched = [self._server, *self._callers]
            if end is not None and not ended:
                watched.append(end)
            ready = _ready(watched, deadline - time.monotonic())
            if not ready:
                raise ConnectionResetError(CLOSED) if ended else TimeoutError("timed out")
            for sock in ready:
                if sock in self._callers:
                    self._hear(sock)
            if self._server in ready:
                self._welcome()
            if end in ready:  # what it said before may be on its way
                ended, deadline = True, min(deadline, time.monotonic() + LATE_SECONDS)
        return self._from[peer]

    def _welcome(self) -> None:
        """Let one more caller in; those that are silent for long go."""
        now = time.monotonic()
        for caller, (_, since) in list(self._callers.items()):
            if now - since > GREETING_SECONDS:
                self._dismiss(caller)
        sock, _ = self._server.accept()
        self._open.add(sock)
        sock.setblocking(False)
        self._callers[sock] = b"", now

    def _hear(self, sock: socket.socket) -> None:
        """Read on in a caller's greeting: the token, and then who calls. Nobody waits for it."""
        said, since = self._callers[sock]
        try:
            part = sock.recv(GREETING_BYTES - len(said))
        except OSError:
            part = b""
        said += part
        if not part or not secrets.compare_digest(said[:TOKEN_BYTES], self._token[: len(said)]):
            self._dismiss(sock)
        elif len(said) < GREETING_BYTES:
            self._callers[sock] = said, since
        else:
            del self._callers[sock]
            sock.settimeout(self._timeout)
            self._from[int.from_bytes(said[TOKEN_BYTES:], "little")] = sock

    def _dismiss(self, sock: socket.socket) -> None:
        del self._callers[sock]
        self._open.discard(sock)
        sock.close()


def _close(sockets: set[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _ready(
    sockets: list[socket.socket], seconds: float, until: socket.socket | None = None
) -> list[socket.socket]:
    """Those from which something can be read, as soon as there is one, or ``until`` is writable."""
    if seconds <= 0:
        return []
    with selectors.DefaultSelector() as watched:
        for sock in sockets:
            watched.register(sock, selectors.EVENT_READ)
        if until is not None:
            watched.register(until, selectors.EVENT_WRITE)
        return [key.fileobj for key, _ in watched.select(seconds)]  # type: ignore[misc]


def _host() -> str:
    """Tells this machine from others, containers with a network of their own included."""
    try:
        return f"{devices.host()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return devices.host()


def _address() -> str:
    """The address under which the other hosts see this one: that of the way to rank 0's host.

    Rank 0's host may know its own name as an address that leads nowhere else (Debian: 127.0.1.1);
    then that of the way out.
    """
    if loopback_only():
        return HERE
    for target in (os.environ.get("MASTER_ADDR", socket.gethostname()), *OUTSIDE):
        found = _source(target)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return HERE


def _source(target: str) -> str | None:
    """The own address of the way to a host, by its routes; nothing is sent."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
