"""Sockets to the neighbours, for the headers that keep ranks in step.

Headers could travel as messages of the backend, but gloo asks the receiver first and wakes a
thread on either side for each: some 0.2 ms per collective, more where the cores are busy. Sixteen
bytes written to a socket wait in the kernel until somebody looks. A closed socket also tells at
once that a peer has died, and a read from it can be interrupted.

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
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from zfunc.worlds import devices
from zfunc.worlds.transport import HEADER_BYTES

__all__ = ["Wires"]

HEADER = struct.Struct("<qq")
assert HEADER.size == HEADER_BYTES
TEXT = -1  # in place of a digest: that many bytes of text follow
TOKEN_BYTES = 16
GREETING_SECONDS = 10.0
OUTSIDE = "192.0.2.1", "2001:db8::1"  # nobody's: RFC 5737 and 3849 keep them for documentation
BACKLOG = 4096  # callers that nobody has listened to yet; the system may allow fewer

Cards = Callable[[int], bytes]


class Wires:
    """Ordered headers between ranks of one group.

    Args:
        rank: this rank in the group.
        publish: receives this rank's card: where it listens, and the word that callers must know.
        card_of: returns the card of a rank, once that has published it.
        timeout: seconds to wait for a peer.
    """

    def __init__(
        self, rank: int, publish: Callable[[bytes], None], card_of: Cards, timeout: float
    ) -> None:
        self._rank, self._card_of, self._timeout = rank, card_of, timeout
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._heard: defaultdict[int, int] = defaultdict(int)
        self._early: dict[tuple[int, int], tuple[int, int]] = {}
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._server = _listening()
        # Whoever calls must know a word that only went through the store.
        self._token = secrets.token_bytes(TOKEN_BYTES)
        here = (_host(), _address(), str(self._server.getsockname()[1]))
        publish(self._token + "\n".join(here).encode())

    @property
    def sockets(self) -> int:
        """How many are open, the listening one among them."""
        return 1 + len(self._to) + len(self._from)

    def send(self, peer: int, digest: int, length: int) -> int:
        """Send a header; returns its ticket: how many have gone to this peer.

        Raises:
            OSError: the peer is gone.
        """
        sock = self._to.get(peer) or self._call(peer)
        sock.sendall(HEADER.pack(digest, length))
        self._sent[peer] += 1
        return self._sent[peer]

    def receive(self, peer: int, ticket: int) -> tuple[int, int]:
        """The peer's header with this ticket: a digest and a length; kept until forgotten.

        Raises:
            TimeoutError: it did not come in time.
            OSError: the peer is gone, or out of step with another one.
        """
        while self._heard[peer] < ticket:
            digest, length = HEADER.unpack(self._read(peer, HEADER_BYTES))
            if digest == TEXT:
                raise ConnectionAbortedError(f"it stopped in {self._read(peer, length).decode()}")
            self._heard[peer] += 1
            self._early[peer, self._heard[peer]] = digest, length
        return self._early[peer, ticket]

    def forget(self, peer: int, ticket: int) -> None:
        """Keep this header no longer."""
        self._early.pop((peer, ticket), None)

    def tell(self, text: str) -> None:
        """Send every peer that was called a text, for whoever asks with :meth:`ask`."""
        data = text.encode()
        for sock in self._to.values():
            try:
                sock.sendall(HEADER.pack(TEXT, len(data)) + data)
            except OSError:
                continue  # gone, so it will not ask

    def ask(self, peer: int, timeout: float) -> str | None:
        """The text that the peer tells, behind the headers it has sent; ``None`` if it does not."""
        seconds = min(timeout, self._timeout)
        try:
            sock = self._from.get(peer) or self._answer(peer, seconds)
            sock.settimeout(seconds)
            while True:
                digest, length = HEADER.unpack(_read(sock, HEADER_BYTES))
                if digest == TEXT:
                    return _read(sock, length).decode()
        except OSError:
            return None

    def _read(self, peer: int, length: int) -> bytes:
        return _read(self._from.get(peer) or self._answer(peer, self._timeout), length)

    def _call(self, peer: int) -> socket.socket:
        """Connect to a peer and say who calls."""
        card = self._card_of(peer)
        host, address, port = card[TOKEN_BYTES:].decode().split("\n")
        target = "127.0.0.1" if host == _host() else address
        sock = socket.create_connection((target, int(port)), self._timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(card[:TOKEN_BYTES] + self._rank.to_bytes(8, "little"))
        self._to[peer] = sock
        return sock

    def _answer(self, peer: int, seconds: float) -> socket.socket:
        """Let callers in until ``peer`` is among them."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as watched:
            watched.register(self._server, selectors.EVENT_READ)
            if peer in self._to:  # nothing ever comes this way, but the end
                watched.register(self._to[peer], selectors.EVENT_READ)
            while peer not in self._from:
                left = deadline - time.monotonic()
                ready = [key.fileobj for key, _ in watched.select(left)] if left > 0 else []
                if self._server in ready:
                    self._welcome()
                elif ready:
                    raise ConnectionResetError("connection closed by the peer")
                else:
                    raise TimeoutError("timed out")
        return self._from[peer]

    def _welcome(self) -> None:
        sock, _ = self._server.accept()
        caller = _greeted(sock, self._token)
        if caller is not None:
            sock.settimeout(self._timeout)
            self._from[caller] = sock

    def close(self) -> None:
        """Hang up."""
        for sock in (self._server, *self._to.values(), *self._from.values()):
            sock.close()

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self.close()


def _greeted(sock: socket.socket, token: bytes) -> int | None:
    """The rank that has connected, or ``None`` for a stranger."""
    sock.settimeout(GREETING_SECONDS)
    try:
        greeting = _read(sock, TOKEN_BYTES + 8)
        if secrets.compare_digest(greeting[:TOKEN_BYTES], token):
            return int.from_bytes(greeting[TOKEN_BYTES:], "little")
    except OSError:
        pass
    sock.close()
    return None


def _read(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = sock.recv(length - len(data))
        if not part:
            raise ConnectionResetError("connection closed by the peer")
        data += part
    return data


def _listening() -> socket.socket:
    """A socket that hears callers of either kind of address, where the system has both."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=BACKLOG)


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
    for target in (os.environ.get("MASTER_ADDR", socket.gethostname()), *OUTSIDE):
        found = _source(target)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return "127.0.0.1"


def _source(target: str) -> str | None:
    """The own address of the way to a host, by its routes; nothing is sent."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
