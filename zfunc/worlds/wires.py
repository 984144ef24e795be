"""A socket to each peer, for the headers that keep ranks in step.

Headers could travel as messages of the backend, but gloo asks the receiver first and wakes a
thread on either side for each: some 0.2 ms per collective, more where the cores are busy. Sixteen
bytes written to a socket wait in the kernel until somebody looks. A closed socket also tells at
once that a peer has died, and a read from it can be interrupted.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections import defaultdict
from collections.abc import Callable

from zfunc.worlds.transport import HEADER_BYTES

__all__ = ["Wires"]

HEADER = struct.Struct("<qq")
assert HEADER.size == HEADER_BYTES
TEXT = -1  # in place of a digest: that many bytes of text follow
TOKEN_BYTES = 16
GREETING_SECONDS = 10.0

Exchange = Callable[[bytes], list[bytes]]


class Wires:
    """Ordered headers between all ranks of one group.

    Args:
        rank: this rank in the group.
        size: the number of ranks.
        exchange: returns the bytes that every rank passes to it, by rank.
        timeout: seconds to wait for a peer.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange, timeout: float) -> None:
        self._timeout = timeout
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._heard: defaultdict[int, int] = defaultdict(int)
        self._early: dict[tuple[int, int], tuple[int, int]] = {}
        self._sockets = _connect(rank, size, exchange, timeout)

    def send(self, peer: int, digest: int, length: int) -> int:
        """Send a header; returns its ticket: how many have gone to this peer.

        Raises:
            OSError: the peer is gone.
        """
        self._sockets[peer].sendall(HEADER.pack(digest, length))
        self._sent[peer] += 1
        return self._sent[peer]

    def receive(self, peer: int, ticket: int) -> tuple[int, int]:
        """The peer's header with this ticket: a digest and a length.

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
        return self._early.pop((peer, ticket))

    def tell(self, text: str) -> None:
        """Send every peer a text, for whoever asks with :meth:`ask`."""
        data = text.encode()
        for sock in self._sockets.values():
            try:
                sock.sendall(HEADER.pack(TEXT, len(data)) + data)
            except OSError:
                continue  # gone, so it will not ask

    def ask(self, peer: int, timeout: float) -> str | None:
        """The text that the peer tells, behind the headers it has sent; ``None`` if it does not."""
        self._sockets[peer].settimeout(min(timeout, self._timeout))
        try:
            while True:
                digest, length = HEADER.unpack(self._read(peer, HEADER_BYTES))
                if digest == TEXT:
                    return self._read(peer, length).decode()
        except OSError:
            return None

    def _read(self, peer: int, length: int) -> bytes:
        return _read(self._sockets[peer], length)

    def __del__(self) -> None:
        for sock in getattr(self, "_sockets", {}).values():
            sock.close()


def _connect(rank: int, size: int, exchange: Exchange, timeout: float) -> dict[int, socket.socket]:
    """Every rank listens, tells the others where, calls the lower ones and answers the higher."""
    with socket.create_server(("", 0), backlog=size) as server:
        server.settimeout(timeout)
        # Whoever connects must know a word that only went through the process group.
        token = secrets.token_bytes(TOKEN_BYTES)
        here = (_host(), _address(), str(server.getsockname()[1]))
        cards = exchange(token + "\n".join(here).encode())
        sockets = {}
        for peer in range(rank):
            host, address, port = cards[peer][TOKEN_BYTES:].decode().split("\n")
            target = "127.0.0.1" if host == here[0] else address
            sockets[peer] = socket.create_connection((target, int(port)), timeout)
            sockets[peer].sendall(cards[peer][:TOKEN_BYTES] + rank.to_bytes(8, "little"))
        while len(sockets) < size - 1:
            sock, _ = server.accept()
            caller = _greeted(sock, token)
            if caller is not None:
                sockets[caller] = sock
    for sock in sockets.values():
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


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


def _host() -> str:
    """Tells this machine from others, containers with a network of their own included."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _address() -> str:
    """The address under which the other hosts see this one: that of the way to rank 0's host."""
    master = os.environ.get("MASTER_ADDR", socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
