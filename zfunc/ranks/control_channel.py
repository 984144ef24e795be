"""The control channel of a group: headers that keep ranks in step, and small payloads.

It uses sockets. Headers could be messages of gloo, but gloo asks the receiver first and wakes a
thread on either side for each: 0.2 ms per collective, and over 1 ms where the cores are busy.
Writing to a socket takes 0.01 ms, and the kernel keeps the bytes until the peer reads them. A
closed socket also tells at once that a peer has died, and a read from it can be interrupted.

A rank listens from the beginning. It connects to a peer when it first has something to send, over a
socket of its own for each direction. So no rank waits for a connection, and a rank has sockets only
to the ranks that it talks to.

A rank that waits here, for room to write or for something to arrive, reads what any peer writes.
Otherwise two ranks could wait for each other for ever.
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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from zfunc.ranks import devices
from zfunc.ranks.accounting import HEADER_BYTES
from zfunc.ranks.listening import HERE, listening_socket, loopback_only
from zfunc.ranks.shared_memory import WORD_BYTES, Inbox, Outbox, Posted, is_open_to, spread

__all__ = ["NOTHING", "ControlChannel", "Payload"]

HEADER = struct.Struct("<qq")
assert HEADER.size == HEADER_BYTES
# In place of a digest: as many bytes of text follow, or a note, or a digest and what it is of.
TEXT, NOTE, NAME = -1, -2, -3
WITH = 1 << 62  # in a header's second number: a payload, and before it where it is and its bytes
ALONE = 1 << 61  # there, too: of a message, in which no other rank takes part
WHERE, FOLLOWS = struct.Struct("<qqq"), -1  # a slot of the sender's outbox, or this
NAMES = 2**12  # of digests that a peer has told, and is remembered to have been told
POSTED_BYTES = 2**12  # of a payload from which the outbox is quicker
READ_BYTES = 2**18
BRIEF_SECONDS = 0.002  # to wait for one peer alone, which takes a third less than to watch all
TOKEN_BYTES = WORD_BYTES
GREETING_BYTES = TOKEN_BYTES + 8  # the token, and the rank that calls
CLOSED = "connection closed by the peer"
LATE_SECONDS = 0.2  # for which a word may be on its way behind the end of another connection
ENDING_SECONDS = 3.0  # for which what a peer has begun goes on when it has hung up
ROUNDS = 3  # of reading in which a caller is let in: it calls, says who it is, and writes
GREETING_SECONDS = 10.0  # for which a caller may be silent
OUTSIDE = "192.0.2.1", "2001:db8::1"  # nobody's: RFC 5737 and 3849 keep them for documentation

V = TypeVar("V")

NOTHING = memoryview(bytearray())
Cards = Callable[[int], bytes]
Payload = bytes | bytearray | Posted  # or where it is in the sender's outbox
Closable = socket.socket | selectors.BaseSelector | Inbox | Outbox


class ControlChannel:
    """Headers in order, and the payloads that go with them, between the ranks of one group.

    Args:
        rank: this rank in the group.
        publish: receives this rank's card: where it listens, and the token that callers must send.
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
        self._early: dict[tuple[int, int], tuple[int, int, Payload]] = {}
        self._notes: dict[tuple[int, int], Payload] = {}
        self._texts: dict[int, str] = {}
        self._arrived: defaultdict[int, int] = defaultdict(int)
        self._messages: dict[tuple[int, int], tuple[int, Payload]] = {}
        self._told: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._names: defaultdict[int, OrderedDict[int, str]] = defaultdict(OrderedDict)
        self._host, self._cards = _host(), dict[int, bytes]()
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._reads: defaultdict[int, int] = defaultdict(int)
        self._ends: dict[int, str] = {}  # why nothing more comes from a peer
        self._hung_up: set[int] = set()  # peers that no longer read
        self._unread: defaultdict[int, bytearray] = defaultdict(bytearray)  # less than a message
        self._callers: dict[socket.socket, tuple[bytes, float]] = {}  # who have not said who
        self._server = listening_socket()
        self._watched = selectors.DefaultSelector()
        self._watched.register(self._server, selectors.EVENT_READ)
        self._wakes: tuple[socket.socket, socket.socket] | None = None
        # Held by the finaliser, so that they are closed before the garbage collector meets them.
        # The server is among them for as long as the channel is open.
        self._open: set[Closable] = {self._server, self._watched}
        self.close = weakref.finalize(self, _close, self._open)
        self.close.atexit = False
        # Whoever calls must know a word that only went through the store.
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._outbox = Outbox(self._token)
        self._inboxes: dict[int, Inbox] = {}
        self._sharing: dict[int, bool] = {}
        self._open.add(self._outbox)
        here = (self._host, _address(), str(self._server.getsockname()[1]), self._outbox.address)
        publish(self._token + "\n".join(here).encode())

    def shares_memory(self, peer: int) -> bool:
        """Whether payloads to and from a peer go through shared memory; both ranks say the same.

        A rank maps the memory of a peer when it first sends it something. What the peer sends
        before that goes through the socket. This waits until the peer has joined the group.

        Raises:
            TimeoutError: it did not join in time.
            OSError: it never will.
        """
        if peer not in self._sharing:
            host, _, _, address = self._told_by(peer)
            self._sharing[peer] = host == self._host and is_open_to(address, self._outbox.address)
        return self._sharing[peer]

    def send(self, peer: int, digest: int, length: int, payload: memoryview = NOTHING) -> int:
        """Send a header and its payload; returns its ticket, which counts the headers to this peer.

        It waits for the peer only if the kernel's buffer is full.

        Raises:
            TimeoutError: the peer did not read in time.
            OSError: the peer is gone.
        """
        self._write(peer, digest, length, payload)
        self._sent[peer] += 1
        return self._sent[peer]

    def receive(self, peer: int, ticket: int) -> tuple[int, int]:
        """The digest and the length in the peer's header with this ticket; kept until taken.

        Raises:
            TimeoutError: it did not come in time.
            OSError: the peer is gone, or out of step with another one.
        """
        while self._heard[peer] < ticket:
            self._read(peer, self._timeout)
        digest, length, _ = self._early[peer, ticket]
        return digest, length

    def take(self, peer: int, ticket: int, into: memoryview = NOTHING) -> None:
        """Copy the payload that came with a header into ``into``; both are dropped here."""
        self.fill(peer, self._early.pop((peer, ticket))[2], into)

    def send_note(self, peer: int, number: int, payload: memoryview = NOTHING) -> None:
        """Send a message outside the order of the headers; a number identifies it.

        Raises:
            TimeoutError: the peer did not read in time.
            OSError: the peer is gone.
        """
        self._write(peer, NOTE, number, payload)

    def take_note(self, peer: int, number: int, into: memoryview = NOTHING) -> None:
        """Copy the payload of the peer's note with this number into ``into``, and drop the note.

        Raises:
            TimeoutError: it did not come in time.
            OSError: the peer is gone, or out of step with another one.
        """
        while (peer, number) not in self._notes:
            self._read(peer, self._timeout)
        self.fill(peer, self._notes.pop((peer, number)), into)

    def expect(self, peer: int) -> None:
        """Connect to a peer from which messages come: it can be told, and its memory be read.

        One that has ended is no error here: what it sent before may have come.

        Raises:
            TimeoutError: it did not join the group in time.
        """
        if self._server not in self._open:
            raise _hung_up()
        if peer not in self._to and peer not in self._hung_up:
            try:
                self._call(peer)
            except TimeoutError:
                raise
            except OSError:
                self._hung_up.add(peer)

    def host_of(self, peer: int) -> str:
        """Where a peer can be called."""
        host, address, _, _ = self._told_by(peer)
        return HERE if host == self._host else address

    def send_message(
        self,
        peer: int,
        digest: int,
        name: Callable[[int], str],
        length: int,
        parts: Sequence[bytes | memoryview] = (),
    ) -> bool:
        """Send the header of a message to this peer alone; messages are in an order of their own.

        Args:
            name: of a digest, what that is of, for an error of the peer.
            length: bytes of the payload.
            parts: the payload, if it goes with the header.

        Returns:
            Whether it did. A large one does not where the outbox cannot take it.

        Raises:
            TimeoutError: the peer did not read in time.
            OSError: the peer is gone.
        """
        if self._server not in self._open:
            raise _hung_up()
        if peer not in self._to:
            self._call(peer)
        if digest not in self._told[peer]:
            _remember(self._told[peer], digest, None)
            text = digest.to_bytes(8, "little") + name(digest).encode()
            self._push(peer, memoryview(HEADER.pack(NAME, len(text)) + text))
        where, size = b"", length if parts else 0
        if size > POSTED_BYTES:
            if (place := self._outbox.put_together(parts, peer)) is not None:
                where = WHERE.pack(place.slot, place.size, place.start)
        elif size:
            where = WHERE.pack(FOLLOWS, size, 0) + b"".join(parts)
        kind = ALONE | WITH if where else ALONE
        self._push(peer, memoryview(HEADER.pack(digest, length | kind) + where))
        return bool(where)

    def take_message(self, peer: int, number: int) -> tuple[int, Payload]:
        """The digest of the peer's message with this number, and what came with it; once.

        Raises:
            TimeoutError: its header did not come in time.
            OSError: the peer is gone, or out of step with another one.
        """
        while self._arrived[peer] < number:
            self._read(peer, self._timeout)
        return self._messages.pop((peer, number))

    def has_message(self, peer: int, number: int) -> bool:
        """Whether the header of a message is there; this waits for nothing."""
        if self._arrived[peer] < number and self._server in self._open:
            self._sort_out(self._watched.select(0))
        return self._arrived[peer] >= number

    def name_of(self, peer: int, digest: int) -> str | None:
        """What a peer has said that this digest of a message is of."""
        return self._names[peer].get(digest)

    def waker(self) -> Callable[[], None]:
        """A function that another thread calls to end a wait in :meth:`wait_until`."""
        if self._wakes is None:
            if self._server not in self._open:
                raise _hung_up()
            self._wakes = socket.socketpair()
            for sock in self._wakes:
                sock.setblocking(False)
            self._open.update(self._wakes)
            self._watched.register(self._wakes[0], selectors.EVENT_READ)
        wake = self._wakes[1]

        def call() -> None:
            with suppress(OSError):  # full, so that it wakes anyway, or closed
                wake.send(b"!")

        return call

    def wait_until(self, peer: int, is_over: Callable[[], bool]) -> None:
        """Return when something is over that a peer has to do, and read what others write.

        Args:
            is_over: whoever changes what it returns calls the :meth:`waker`.

        Raises:
            TimeoutError: it is not in time.
            OSError: the peer is gone, or out of step.
        """
        deadline, gone = time.monotonic() + self._timeout, ""
        while not is_over():
            if self._server not in self._open:
                raise _hung_up()
            if peer in self._texts:
                raise ConnectionAbortedError(f"it stopped in {self._texts[peer]}")
            if not gone and (peer in self._ends or peer in self._hung_up):
                gone = self._ends.get(peer, CLOSED)  # what it did before may be on its way
                deadline = min(deadline, time.monotonic() + ENDING_SECONDS)
            try:
                self._serve(deadline)
            except TimeoutError:
                if gone and not is_over():
                    raise ConnectionResetError(gone) from None
                if not is_over():
                    raise

    def fill(self, peer: int, payload: Payload, *into: memoryview) -> None:
        """Copy a payload that came from a peer to these places."""
        if isinstance(payload, Posted):
            self._inboxes[peer].take(payload, *into)
        else:
            spread(payload, into)

    def tell(self, text: str) -> None:
        """Send a text to every peer with a connection either way; they get it with :meth:`ask`."""
        data = text.encode()
        for _ in range(ROUNDS):  # who has called, and not been heard
            if self._server in self._open and (ready := self._watched.select(0)):
                self._sort_out(ready)
        for peer in {*self._to, *self._from} - self._ends.keys():
            try:
                if peer not in self._to:
                    self._call(peer)
                self._push(peer, memoryview(HEADER.pack(TEXT, len(data)) + data))
            except OSError:
                continue  # gone, so it will not ask

    def ask(self, peer: int, timeout: float) -> str | None:
        """The text that a peer has sent with :meth:`tell`; ``None`` if it sends none in time."""
        seconds = min(timeout, self._timeout)
        try:
            while peer not in self._texts:
                self._read(peer, seconds)
        except OSError:
            return None
        return self._texts[peer]

    def why_stopped(self, peer: int) -> str | None:
        """What a peer that has stopped has said of it; this waits for nothing."""
        return self._texts.get(peer)

    def _write(self, peer: int, kind: int, number: int, payload: memoryview) -> None:
        if self._server not in self._open:
            raise _hung_up()
        if peer not in self._to:
            self._call(peer)
        data = HEADER.pack(kind, number | WITH if payload else number)
        large = len(payload) > POSTED_BYTES
        if large and (place := self._outbox.put(payload, peer)) is not None:
            data += WHERE.pack(place.slot, place.size, place.start)
        elif payload:
            data += WHERE.pack(FOLLOWS, len(payload), 0) + payload
        self._push(peer, memoryview(data))

    def _push(self, peer: int, data: memoryview) -> None:
        """Send all of ``data``; while the kernel's buffer is full, read what others write."""
        sock, deadline = self._to[peer], None
        while data:
            try:
                data = data[sock.send(data) :]
            except BlockingIOError:
                if peer in self._hung_up:
                    raise ConnectionResetError(CLOSED) from None
                deadline = deadline or time.monotonic() + self._timeout
                self._serve(deadline, pushing=peer)

    def _read(self, peer: int, seconds: float) -> None:
        """Wait for something from a peer, and read what the others write meanwhile.

        They may write more than the kernel holds before they send what this rank waits for.
        """
        if peer in self._texts:
            raise ConnectionAbortedError(f"it stopped in {self._texts[peer]}")
        if self._server not in self._open:
            raise _hung_up()
        before = self._reads[peer]
        self._take_in(peer)
        deadline, late = time.monotonic() + seconds, False
        while self._reads[peer] == before:
            if peer in self._ends:
                raise ConnectionResetError(self._ends[peer])
            if peer in self._hung_up and peer not in self._from and not late:
                late = True  # what it said before may be on its way
                deadline = min(deadline, time.monotonic() + LATE_SECONDS)
            try:
                self._serve(deadline)
            except TimeoutError:
                if late:
                    raise ConnectionResetError(CLOSED) from None
                raise

    def _take_in(self, peer: int) -> None:
        """Keep the messages that have arrived from a peer."""
        if peer not in self._from or peer in self._ends:
            return
        sock, why = self._from[peer], CLOSED
        try:
            part = sock.recv(READ_BYTES)
        except TimeoutError:
            return
        except OSError as error:
            part, why = b"", str(error)
        if part:
            self._reads[peer] += 1
            self._sort(peer, part)
        else:
            self._ends[peer] = why
            self._watched.unregister(sock)

    def _sort(self, peer: int, part: bytes) -> None:
        unread = self._unread[peer]
        data = unread or part  # mostly a message comes as a whole
        if unread:
            unread += part
        start, end = 0, len(data)
        while end >= start + HEADER_BYTES:
            kind, number = HEADER.unpack_from(data, start)
            begin, slot, size, at = start + HEADER_BYTES, FOLLOWS, 0, 0
            if kind in (TEXT, NAME):
                size = number
            elif number & WITH:
                number, begin = number ^ WITH, begin + WHERE.size
                if end < begin:
                    break
                slot, size, at = WHERE.unpack_from(data, begin - WHERE.size)
            stop = begin + (size if slot == FOLLOWS else 0)
            if end < stop:
                break
            payload: Payload = data[begin:stop] if slot == FOLLOWS else Posted(at, size, slot)
            if kind == TEXT:
                self._texts.setdefault(peer, data[begin:stop].decode())
            elif kind == NAME:
                digest = int.from_bytes(data[begin : begin + 8], "little")
                _remember(self._names[peer], digest, data[begin + 8 : stop].decode())
            elif kind == NOTE:
                self._notes[peer, number] = payload
            elif number & ALONE:
                self._arrived[peer] += 1
                self._messages[peer, self._arrived[peer]] = kind, payload
            else:
                self._heard[peer] += 1
                self._early[peer, self._heard[peer]] = kind, number, payload
            start = stop
        if data is unread:
            del unread[:start]
        else:
            unread += part[start:]

    def _serve(self, deadline: float, pushing: int | None = None) -> None:
        """Wait until something can be read, or the peer ``pushing`` takes more, and read it.

        Raises:
            TimeoutError: nothing can.
        """
        left = deadline - time.monotonic()
        if pushing is not None:
            self._watch(pushing, selectors.EVENT_READ | selectors.EVENT_WRITE)
        try:
            ready = self._watched.select(left) if left > 0 else []
        finally:
            if pushing is not None:
                self._watch(pushing, selectors.EVENT_READ)
        if not ready:
            raise TimeoutError("timed out")
        self._sort_out(ready)

    def _sort_out(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Read from each of what can be read from."""
        for key, events in ready:
            sock: socket.socket = key.fileobj  # type: ignore[assignment]
            if sock is self._server:
                self._welcome()
            elif self._wakes is not None and sock is self._wakes[0]:
                sock.recv(READ_BYTES)
            elif sock in self._callers:
                self._hear(sock)
            elif sock is self._from.get(key.data):
                self._take_in(key.data)
            elif events & selectors.EVENT_READ:  # nothing ever comes this way, but the end
                self._hung_up.add(key.data)
                self._watched.unregister(sock)

    def _watch(self, peer: int, events: int) -> None:
        self._watched.modify(self._to[peer], events, peer)

    def _card(self, peer: int) -> bytes:
        if peer not in self._cards:
            self._cards[peer] = self._card_of(peer)
        return self._cards[peer]

    def _told_by(self, peer: int) -> list[str]:
        """Its host, address, port, and the address of its outbox."""
        return self._card(peer)[TOKEN_BYTES:].decode().split("\n")

    def _call(self, peer: int) -> None:
        """Connect to a peer and say who calls."""
        port = int(self._told_by(peer)[2])
        sock = socket.create_connection((self.host_of(peer), port), self._timeout)
        self._open.add(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(self._card(peer)[:TOKEN_BYTES] + self._rank.to_bytes(8, "little"))
        sock.setblocking(False)
        self._watched.register(sock, selectors.EVENT_READ, peer)
        self._to[peer] = sock
        if self.shares_memory(peer):
            with suppress(OSError):  # then what the peer sends comes through its socket
                inbox = Inbox(self._told_by(peer)[3], self._rank, self._card(peer)[:TOKEN_BYTES])
                self._inboxes[peer] = inbox
                self._open.add(inbox)

    def _welcome(self) -> None:
        """Accept one more connection; close those that have not said who they are for long."""
        now = time.monotonic()
        for caller, (_, since) in list(self._callers.items()):
            if now - since > GREETING_SECONDS:
                self._dismiss(caller)
        sock, _ = self._server.accept()
        self._open.add(sock)
        sock.setblocking(False)
        self._callers[sock] = b"", now
        self._watched.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        """Read on in a caller's greeting, the token and its rank, without waiting for the rest."""
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
            self._let_in(sock, int.from_bytes(said[TOKEN_BYTES:], "little"))

    def _let_in(self, sock: socket.socket, peer: int) -> None:
        if peer in self._from:  # a rank calls once
            self._dismiss(sock)
            return
        del self._callers[sock]
        sock.settimeout(BRIEF_SECONDS)
        self._watched.modify(sock, selectors.EVENT_READ, peer)
        self._from[peer] = sock

    def _dismiss(self, sock: socket.socket) -> None:
        del self._callers[sock]
        self._watched.unregister(sock)
        self._open.discard(sock)
        sock.close()


def _remember(known: OrderedDict[int, V], digest: int, value: V) -> None:
    """Add what was not known to what is, of which the oldest is forgotten."""
    known.setdefault(digest, value)
    if len(known) > NAMES:
        known.popitem(last=False)


def _hung_up() -> ConnectionAbortedError:
    return ConnectionAbortedError("this rank has hung up")


def _close(opened: set[Closable]) -> None:
    held = tuple(opened)
    opened.clear()  # from now on the channel counts as closed
    for it in held:
        it.close()


def _host() -> str:
    """Identifies this machine; a container with a network of its own is another one."""
    try:
        return f"{devices.host()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return devices.host()


def _address() -> str:
    """This host's address for other hosts: the one that packets to rank 0's host come from.

    Rank 0's host may resolve its own name to a loopback address (Debian: 127.0.1.1). Then it is the
    one that packets to the internet come from.
    """
    if loopback_only():
        return HERE
    for target in (os.environ.get("MASTER_ADDR", socket.gethostname()), *OUTSIDE):
        found = _source(target)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return HERE


def _source(target: str) -> str | None:
    """This host's address on the route to another one; nothing is sent."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None
