"""Large payloads of messages: each direction has a socket of its own, and a thread at either end.

Neither rank's own thread is needed for it, and the threads hold Python's lock for moments only: one
call of the system moves a whole tensor. Gloo would do as much. But its first message waits until
the peer begins as well, for which ranks in a circle wait for ever, and nobody can call off what
waits in gloo: a process that ends meanwhile is aborted. A socket can be shut.

A payload comes with the number of its message, and goes to where the receiver wants it. If that was
meant to come another way, and has no place yet, it gets one.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from zfunc.ranks.listening import listening_socket

__all__ = ["Incoming", "Load", "Outgoing", "call_peer"]

TOKEN_BYTES = 16
PREFIX = struct.Struct("<qq")  # the number of the message, and bytes
CLOSED = "connection closed by the peer"
GREETING_SECONDS = 10.0  # for which a caller may be silent
ENDING_SECONDS = 1.0  # for a thread to end that nobody needs any more

Wake = Callable[[], None]


class Load:
    """The payload of one message on its way.

    Attributes:
        pieces: where it is, or belongs; ``None`` if it is not meant to come this way.
        over: whether it has left, or is there; or never will.
        error: why not.
    """

    def __init__(self, number: int, pieces: Sequence[memoryview] | None) -> None:
        self.number, self.pieces = number, pieces
        self.over = False
        self.error: Exception | None = None

    def end(self, wake: Wake, error: Exception | None = None) -> None:
        """Say that it is over."""
        if not self.over:
            self.error, self.over = error, True
            wake()


class Outgoing:
    """The payloads for one peer, which a thread sends in their order.

    Args:
        connect: waits for the peer, and returns a socket; nothing once this is closed.
        wake: called when a payload is over.
    """

    def __init__(self, connect: Callable[[Outgoing], socket.socket | None], wake: Wake) -> None:
        self._connect, self._wake = connect, wake
        self._loads: SimpleQueue[Load | None] = SimpleQueue()
        self._sock: socket.socket | None = None
        self.closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, load: Load) -> None:
        """Send a payload, behind those before."""
        self._loads.put(load)

    def _run(self) -> None:
        failure: Exception | None = None
        while (load := self._loads.get()) is not None:
            try:
                if failure is None:
                    self._send(load)
            except (OSError, RuntimeError) as error:  # of the store, too
                failure = error
            load.end(self._wake, failure)

    def _send(self, load: Load) -> None:
        if self._sock is None:
            self._sock = self._connect(self)
        if self._sock is None or self.closed:
            raise ConnectionAbortedError("this rank has hung up")
        pieces = load.pieces or ()
        self._sock.sendall(PREFIX.pack(load.number, sum(map(len, pieces))))
        for piece in pieces:
            self._sock.sendall(piece)

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self.closed = True
        self._loads.put(None)
        _shut(self._sock)
        self._thread.join(ENDING_SECONDS)
        if self._sock is not None:
            self._sock.close()


class Incoming:
    """The payloads from all peers, one thread for each.

    Args:
        wake: called when a payload is over.

    Attributes:
        address: the port and the word that peers need to call.
    """

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._loads: dict[tuple[int, int], Load] = {}
        self._ends: dict[int, Exception] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._server: socket.socket | None = None
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def open(self) -> str | None:
        """Listen, from the first time on; what callers have to know: that time only."""
        if self._server is not None:
            return None
        self._server = listening_socket()
        self._begin(self._listen, self._server)
        return f"{self._server.getsockname()[1]} {self._token.hex()}"

    def expect(self, peer: int, load: Load) -> None:
        """Say where the payload of the peer's next message belongs."""
        with self._changed:
            self._loads[peer, load.number] = load
            if peer in self._ends and load.pieces is not None:
                load.end(self._wake, self._ends[peer])
            self._changed.notify_all()

    def forget(self, peer: int, load: Load) -> None:
        """Its message is there."""
        with self._changed:
            self._loads.pop((peer, load.number), None)

    def _begin(self, run: Callable[[socket.socket], None], sock: socket.socket) -> None:
        self._socks.append(sock)
        self._threads.append(threading.Thread(target=run, args=(sock,), daemon=True))
        self._threads[-1].start()

    def _listen(self, server: socket.socket) -> None:
        with suppress(OSError):  # it was shut
            while not self._closed:
                sock, _ = server.accept()
                sock.settimeout(GREETING_SECONDS)
                self._begin(self._hear, sock)

    def _hear(self, sock: socket.socket) -> None:
        """Read what a caller sends, if it knows the word."""
        peer = -1
        try:
            said = _read(sock, TOKEN_BYTES + 8)
            if not secrets.compare_digest(said[:TOKEN_BYTES], self._token):
                return
            peer = int.from_bytes(said[TOKEN_BYTES:], "little")
            sock.settimeout(None)
            while True:
                self._take(sock, peer)
        except OSError as error:
            self._end(peer, error)
        finally:
            sock.close()

    def _take(self, sock: socket.socket, peer: int) -> None:
        number, size = PREFIX.unpack(_read(sock, PREFIX.size))
        with self._changed:
            while (peer, number) not in self._loads and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ConnectionAbortedError("this rank has hung up")
            load = self._loads[peer, number]
        if load.pieces is None:
            load.pieces = [memoryview(bytearray(size))]
        if sum(map(len, load.pieces)) != size:  # its header says what it is
            raise ConnectionAbortedError(f"{size} bytes came in the place of others")
        for piece in load.pieces:
            _fill(sock, piece)
        load.end(self._wake)

    def _end(self, peer: int, error: Exception) -> None:
        with self._changed:
            self._ends[peer] = error
            for (source, _), load in self._loads.items():
                if source == peer:
                    load.end(self._wake, error)

    def close(self) -> None:
        """End the threads, whatever they wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sock in tuple(self._socks):
            _shut(sock)
        for thread in tuple(self._threads):
            thread.join(ENDING_SECONDS)
        if self._server is not None:
            self._server.close()


def call_peer(host: str, address: str, rank: int, timeout: float) -> socket.socket:
    """Connect to a peer, which listens at this address of a host, and say who calls."""
    port, token = address.split()
    sock = socket.create_connection((host, int(port)), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(bytes.fromhex(token) + rank.to_bytes(8, "little"))
    sock.settimeout(None)
    return sock


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, into: memoryview) -> None:
    while into:
        size = sock.recv_into(into, len(into), socket.MSG_WAITALL)
        if size == 0:
            raise ConnectionResetError(CLOSED)
        into = into[size:]


def _shut(sock: socket.socket | None) -> None:
    """End what waits for a socket; what was sent before arrives."""
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
