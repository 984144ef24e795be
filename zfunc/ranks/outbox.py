"""Memory of a rank that others on its host read: payloads that need not go through a socket.

What goes through a socket is copied into the kernel and out of it, page by page, and gloo wakes a
thread on either side for it. Here the sender copies a payload into memory of its own, once for all
peers, and tells each of them over a socket where it lies; a peer copies it to where it belongs.
Nobody waits: the memory is as large as what has not been read yet.

It has no name (``memfd_create``), so nothing is left behind however a process ends. Peers open it
through ``/proc``, which the kernel allows to processes of the same user, in the same container, and
with the same capabilities. ``ZFUNC_SHARED_MEMORY=0`` does without.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path

from zfunc.ranks.routes import DIRECT

__all__ = ["NOWHERE", "WORD_BYTES", "Inbox", "Outbox", "is_open_to"]

ASKED = "ZFUNC_SHARED_MEMORY"
NAME = "zfunc"
NOWHERE = "-"  # the address of an outbox where there can be none
WORD_BYTES = 16  # of the word that tells whose memory it is
READERS = DIRECT  # in a larger group nothing goes with a header
BEGIN = WORD_BYTES + 8 * READERS  # of the payloads, behind the word and the readers' counts
ROOM = 2**34  # of addresses; the system finds memory for those that are written
KEPT = 2**24  # bytes that stay when all has been read: fresh ones cost as much as the copy
# Processors on which nobody sees a later write, that of the count, before an earlier read is done.
ORDERED = "x86_64", "AMD64"


class Outbox:
    """Payloads of one rank.

    The memory begins with a word that tells whose it is, and a count for each reader: the position
    up to which it has read. Positions only rise; the place of one is its remainder.

    Args:
        word: ``WORD_BYTES`` long.

    Attributes:
        address: tells peers of the same host where it is, and who may read it.
    """

    def __init__(self, word: bytes) -> None:
        self.address = NOWHERE
        self._memory: mmap.mmap | None = None
        self._written = self._used = 0  # a position, and a place up to which there is memory
        self._unread: deque[tuple[int, int, int]] = deque()  # start, stop, reader
        self._last: tuple[weakref.ref[memoryview], int] | None = None
        if os.environ.get(ASKED) != "0" and platform.machine() in ORDERED:
            with suppress(AttributeError, OSError):  # not Linux, or not allowed
                self._open(word)

    def _open(self, word: bytes) -> None:
        rights = _rights()
        self._file = os.memfd_create(NAME)
        os.truncate(self._file, BEGIN + ROOM)
        self._memory = mmap.mmap(self._file, BEGIN + ROOM)
        self._memory[:WORD_BYTES] = word
        self._counts = memoryview(self._memory)[WORD_BYTES:BEGIN].cast("Q")
        self.address = f"{os.getpid()} {self._file} {rights}"

    def put(self, payload: memoryview, reader: int) -> int:
        """The position of a payload; the same object for another reader is not copied again."""
        assert self._memory is not None
        if self._last is None or self._last[0]() is not payload:
            start = self._room_for(len(payload))
            place = BEGIN + start % ROOM
            self._memory[place : place + len(payload)] = payload
            self._last, self._written = (weakref.ref(payload), start), start + len(payload)
            self._used = max(self._used, place + len(payload))
        start = self._last[1]
        self._unread.append((start, start + len(payload), reader))
        return start

    def _room_for(self, size: int) -> int:
        while self._unread and self._counts[self._unread[0][2]] >= self._unread[0][1]:
            self._unread.popleft()
        start = self._written
        if not self._unread or start % ROOM + size > ROOM:
            start += -start % ROOM  # the beginning, which is likely to be in the cache
        if not self._unread:
            self._trim()
        return start

    def _trim(self) -> None:
        """Give back what is beyond what one keeps."""
        kept = -(-(BEGIN + KEPT) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._memory is not None and self._used > kept:
            self._memory.madvise(mmap.MADV_REMOVE, kept, self._used - kept)
            self._used = kept

    def close(self) -> None:
        if self._memory is not None:
            self._counts.release()
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
        process, file, _ = address.split(" ", 2)
        path = f"/proc/{process}/fd/{file}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                raise FileNotFoundError("it is gone")
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._memory = mmap.mmap(opened, BEGIN + ROOM)
            finally:
                os.close(opened)
        except OSError as error:
            raise OSError(
                f"its memory cannot be read ({error}). {ASKED}=0 on all ranks does without"
            ) from error
        if self._memory[:WORD_BYTES] != word:
            self._memory.close()
            raise ConnectionResetError("it is gone, and another process has its number")
        self._counts = memoryview(self._memory)[WORD_BYTES:BEGIN].cast("Q")
        self._bytes = memoryview(self._memory)
        self._kept: dict[int, int] = {}  # start -> stop, in the order in which they came
        self._reader, self._end = reader, 0

    def expect(self, start: int, size: int) -> None:
        """Keep the payload at a position until it is taken."""
        self._kept[start] = self._end = start + size

    def take(self, start: int, into: memoryview) -> None:
        """Copy the payload at a position; its room is free when all before have been taken."""
        place = BEGIN + start % ROOM
        stop = self._kept.pop(start)
        into[:] = self._bytes[place : place + stop - start]
        self._counts[self._reader] = next(iter(self._kept), self._end)

    def close(self) -> None:
        self._counts.release()
        self._bytes.release()
        self._memory.close()


def is_open_to(address: str, other: str) -> bool:
    """Whether ranks with outboxes at these addresses of one host can read each other's."""
    return NOWHERE not in (address, other) and address.split(" ")[2:] == other.split(" ")[2:]


def _rights() -> str:
    """What the kernel compares before a process may open the files of another one."""
    told = Path("/proc/self/status").read_text().splitlines()
    facts = [line.partition(":")[2].strip() for line in told if line.startswith(("Uid", "CapPrm"))]
    return " ".join([os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/user"), *facts])
