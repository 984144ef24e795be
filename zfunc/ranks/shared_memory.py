"""Shared memory between the ranks of one host, for payloads that need not go through a socket.

What goes through a socket is copied into the kernel and out of it, page by page, and gloo wakes a
thread on either side for it. Here the sender copies a payload into memory of its own, once for all
peers, and tells each of them over a socket where it is. A peer copies it to where it belongs.
Nobody waits: there is memory for all that has not been read yet.

The memory has no name (``memfd_create``), so nothing is left behind however a process ends, and a
peer that has mapped it can read it even then. Peers open it through ``/proc``, which the kernel
allows to processes of the same user, in the same container, and with the same capabilities. For
other peers payloads go through the socket. ``ZFUNC_SHARED_MEMORY=0`` turns shared memory off.

A peer maps the memory for words, marks and small payloads. It reads large ones as a file: their
pages are in the memory of the sender alone, and other threads run while they are copied.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zfunc.ranks.adjacency import DIRECT

__all__ = ["NOWHERE", "WORD_BYTES", "Inbox", "Outbox", "Posted", "is_open_to", "spread", "unfilled"]

ASKED = "ZFUNC_SHARED_MEMORY"
NAME = "zfunc"
NOWHERE = "-"  # the address of an outbox where there can be none
WORD_BYTES = 16  # of the word that tells whose memory it is
READERS = DIRECT  # in a larger group nothing goes with a header
SLOTS = 2**14  # payloads that may wait for readers
BEGIN = 2**19  # of the payloads, behind the word and a row of marks for nobody's and each slot
ROOM = 2**30  # bytes of addresses; the system finds memory for those that are written
FILED = 2**17  # bytes from which a payload is read as a file
KEPT = 2**22  # bytes of memory that stay when all has been read: fresh ones cost as much as a copy
# Processors on which nobody sees a later write, that of a mark, before an earlier read is done.
ORDERED = "x86_64", "AMD64"
assert WORD_BYTES + READERS * (SLOTS + 1) <= BEGIN


@dataclass(frozen=True)
class Posted:
    """Where a payload is in the memory, and the slot in which readers mark that they have it."""

    start: int
    size: int
    slot: int


class Outbox:
    """The payloads that one rank sends.

    The memory begins with a word that identifies its owner. Then there is a mark for each reader,
    which is 1 as soon as it has mapped the memory. For each slot a row of such marks follows; a
    mark is 1 once its reader has read the payload.

    Args:
        word: ``WORD_BYTES`` long.

    Attributes:
        address: where peers of the same host find it, and who may read it.
    """

    def __init__(self, word: bytes) -> None:
        self.address = NOWHERE
        self._memory: mmap.mmap | None = None
        self._unread: list[tuple[Posted, set[int]]] = []  # by start, with their readers
        self._used = BEGIN  # up to which there is memory
        self._last: tuple[weakref.ref[memoryview], Posted, set[int]] | None = None
        if os.environ.get(ASKED) != "0" and platform.machine() in ORDERED:
            with suppress(AttributeError, OSError):  # not Linux, or not allowed
                self._open(word)

    def _open(self, word: bytes) -> None:
        process, rights = os.readlink("/proc/self"), _rights()
        self._file = os.memfd_create(NAME)
        try:
            os.truncate(self._file, BEGIN + ROOM)
            self._memory = mmap.mmap(self._file, BEGIN + ROOM)
        except OSError:
            os.close(self._file)
            raise
        self._memory[:WORD_BYTES] = word
        self.address = f"{process} {self._file} {rights}"

    def put(self, payload: memoryview, reader: int) -> Posted | None:
        """Put a payload there for a reader; ``None`` if it has to go through the socket.

        The same object, put for another reader right after, is not copied again.
        """
        if self._memory is None or reader >= READERS or not self._memory[WORD_BYTES + reader]:
            return None
        if self._last is not None:
            known, place, readers = self._last
            if known() is payload and readers and reader not in readers:
                self._memory[_marks(place.slot) + reader] = 0  # it may have read it before
                readers.add(reader)
                return place
        posted = self._new([payload], reader)
        if posted is not None:
            self._last = weakref.ref(payload), *posted
            return posted[0]
        return None

    def put_together(self, parts: Sequence[bytes | memoryview], reader: int) -> Posted | None:
        """Put a payload there that has several parts, one behind the other."""
        if self._memory is None or reader >= READERS or not self._memory[WORD_BYTES + reader]:
            return None
        posted = self._new(parts, reader)
        return None if posted is None else posted[0]

    def _new(
        self, parts: Sequence[bytes | memoryview], reader: int
    ) -> tuple[Posted, set[int]] | None:
        assert self._memory is not None
        self._sweep()
        place = self._room_for(sum(map(len, parts)))
        if place is None:
            return None
        marks = _marks(place.slot)
        self._memory[marks : marks + READERS] = bytes(READERS)
        start = place.start
        for part in parts:
            self._memory[start : start + len(part)] = part
            start += len(part)
        self._used = max(self._used, start)
        readers = {reader}
        self._unread.append((place, readers))
        self._unread.sort(key=lambda row: row[0].start)
        return place, readers

    def _sweep(self) -> None:
        """Free what all its readers have read, and return memory beyond ``KEPT`` to the system."""
        assert self._memory is not None
        left = []
        for place, readers in self._unread:
            marks = _marks(place.slot)
            readers -= {reader for reader in readers if self._memory[marks + reader]}
            if readers:
                left.append((place, readers))
        self._unread = left
        top = max([BEGIN + KEPT, *(place.start + place.size for place, _ in left)])
        top = -(-top // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used > top:
            with suppress(OSError):  # some systems cannot
                self._memory.madvise(mmap.MADV_REMOVE, top, self._used - top)
            self._used = top

    def _room_for(self, size: int) -> Posted | None:
        """The first gap that is large enough: it is likely to be in the cache."""
        taken = {place.slot for place, _ in self._unread}
        slot = next((k for k in range(len(taken) + 1) if k not in taken), SLOTS)
        start = BEGIN
        for place, _ in self._unread:
            if start + size <= place.start:
                break
            start = max(start, place.start + place.size)
        fits = slot < SLOTS and start + size <= BEGIN + ROOM
        return Posted(start, size, slot) if fits else None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            os.close(self._file)
            self._memory = None


class Inbox:
    """The outbox of a peer, as one of its readers.

    Args:
        address: the outbox's.
        reader: this rank.
        word: as the outbox has it.

    Raises:
        OSError: it cannot be read from here.
    """

    def __init__(self, address: str, reader: int, word: bytes) -> None:
        if reader >= READERS:
            raise OSError("it has no mark for this rank")
        process, file, _ = address.split(" ", 2)
        path = f"/proc/{process}/fd/{file}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise FileNotFoundError("it is gone")
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._forget = weakref.finalize(self, os.close, self._file)
        try:
            self._memory = mmap.mmap(self._file, BEGIN + ROOM)
        except ValueError as error:  # it is shorter
            self._forget()
            raise FileNotFoundError("it is gone") from error
        if self._memory[:WORD_BYTES] != word:
            self._memory.close()
            self._forget()
            raise FileNotFoundError("it is gone")
        self._bytes = memoryview(self._memory)
        self._reader = reader
        self._memory[WORD_BYTES + reader] = 1

    def take(self, place: Posted, *into: memoryview) -> None:
        """Copy a payload, which fills these one after the other; mark that its memory is free."""
        if place.size < FILED:
            spread(self._bytes[place.start : place.start + place.size], into)
        else:
            self._read(place, into)
        self._memory[_marks(place.slot) + self._reader] = 1

    def _read(self, place: Posted, into: Sequence[memoryview]) -> None:
        """``spread`` without a look at the memory: its pages stay out of this process."""
        if (room := sum(map(len, into))) != place.size:
            raise unfilled(place.size, room)
        start = place.start
        for part in into:
            while part:
                count = os.preadv(self._file, [part], start)
                if not count:
                    raise OSError("a payload ends before its end")
                part, start = part[count:], start + count

    def close(self) -> None:
        self._bytes.release()
        self._memory.close()
        self._forget()


def spread(payload: memoryview | bytearray | bytes, into: Sequence[memoryview]) -> None:
    """Copy a payload to these places, which it fills one after the other.

    >>> a, b = bytearray(1), bytearray(2)
    >>> spread(bytearray(b"xyz"), [memoryview(a), memoryview(b)])
    >>> a, b
    (bytearray(b'x'), bytearray(b'yz'))
    """
    if (room := sum(map(len, into))) != len(payload):
        raise unfilled(len(payload), room)
    start, whole = 0, memoryview(payload)
    for part in into:
        part[:] = whole[start : start + len(part)]
        start += len(part)


def unfilled(size: int, room: int) -> ValueError:
    """The error for a payload that does not fill its places."""
    return ValueError(f"a payload of {size} bytes, and places for {room}")


def is_open_to(address: str, other: str) -> bool:
    """Whether ranks with outboxes at these addresses of one host should be able to read them."""
    return NOWHERE not in (address, other) and address.split(" ")[2:] == other.split(" ")[2:]


def _marks(slot: int) -> int:
    return WORD_BYTES + READERS * (slot + 1)


def _rights() -> str:
    """What the kernel compares before a process may open the files of another one."""
    told = Path("/proc/self/status").read_text().splitlines()
    names = ("Uid:", "Gid:", "CapPrm:", "CapEff:")
    facts = [line.partition(":")[2].strip() for line in told if line.startswith(names)]
    return " ".join([os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/user"), *facts])
