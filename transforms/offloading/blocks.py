"""Files on disk, read and written block by block past the page cache, with checksums.

A *region* holds the bytes of one unit. It consists of blocks. With several folders (on several
devices) block j lies in folder ``j % n``, in the file of that name. A block is what one system call
moves and what one checksum covers (xxh3, 64 bits).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from zfunc.buffers.moves import MOVES
from zfunc.buffers.pages import PAGE as ALIGN
from zfunc.buffers.pages import aligned
from zfunc.errors import CheckpointError, PlacementError

__all__ = [
    "ALIGN",
    "BLOCK",
    "FileRegion",
    "Files",
    "NoFiles",
    "aligned",
    "descriptor",
    "digest",
    "finished",
]

T = TypeVar("T")

BLOCK = 1 << 22


def digest(data: memoryview) -> int:
    """The checksum of a block; the interpreter runs on meanwhile."""
    return xxhash.xxh3_64_intdigest(data)


def finished(work: Future[T]) -> T:
    """What some work gives, when it is done.

    What it raises is raised as a copy: an exception keeps all frames that it passes through, and a
    future, which may be kept, would keep with its own the state and the gradients in them.
    """
    error = work.exception()
    if error is not None:
        raise copy(error) from error.__cause__
    return work.result()


@dataclass(frozen=True)
class FileRegion:
    """``nbytes`` (whole pages) from ``offset`` on, in the file ``name`` of every folder."""

    name: str
    offset: int
    nbytes: int

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // BLOCK)

    def bounds(self, block: int) -> tuple[int, int]:
        """First and last byte of a block within the region."""
        return block * BLOCK, min((block + 1) * BLOCK, self.nbytes)

    def span(self, folders: int) -> int:
        """Bytes that the region takes in each folder's file."""
        return self.nbytes if folders == 1 else -(-self.blocks // folders) * BLOCK


class Files:
    """Files of the same names in several folders, read and written block by block.

    Each call opens the file anew: that costs little beside a block, a deleted file is noticed,
    and nothing is open between steps.

    Args:
        folders: one folder, or several on different devices.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.direct = tuple(_takes_direct(folder) for folder in folders)

    def reserve(self, name: str, nbytes: int) -> None:
        """Make a file of ``nbytes`` zeros in every folder.

        Raises:
            PlacementError: a folder has not the room, or cannot be written.
        """
        for folder in self.folders:
            with _opened(folder / name, os.O_RDWR | os.O_CREAT, "reserve", nbytes) as fd:
                if nbytes:
                    os.posix_fallocate(fd, 0, nbytes)

    def write(self, region: FileRegion, block: int, data: memoryview) -> int:
        """Write one block; returns its checksum.

        Raises:
            PlacementError: the device is full, or refuses.
        """
        path, at, direct = self._place(region, block)
        with _opened(path, os.O_WRONLY | direct, "write", len(data)) as fd:
            _all(lambda rest, offset: os.pwritev(fd, [rest], offset), data, at)
            if not direct:
                os.posix_fadvise(fd, at, len(data), os.POSIX_FADV_DONTNEED)
        return digest(data)

    def read(self, region: FileRegion, block: int, into: memoryview) -> int:
        """Read one block; returns the checksum of what was read.

        Raises:
            CheckpointError: the file is missing or too short, or cannot be read.
        """
        path, at, direct = self._place(region, block)
        try:
            with descriptor(path, os.O_RDONLY | direct) as fd:
                got = _all(lambda rest, offset: os.preadv(fd, [rest], offset), into, at)
                if not direct:
                    os.posix_fadvise(fd, at, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}), though a state is kept in it. "
                "Restore a checkpoint."
            ) from error
        if got < len(into):
            raise CheckpointError(
                f"{path} is truncated: it ends {len(into) - got} bytes early in the block at "
                f"{at}. The state kept in it is lost: restore a checkpoint."
            )
        return digest(into)

    def patch(self, region: FileRegion, at: int, data: memoryview) -> None:
        """Write bytes at any offset, through the page cache; without a checksum."""
        while len(data):
            block = at // BLOCK
            room = min(len(data), (block + 1) * BLOCK - at)
            path, start, _ = self._place(region, block)
            offset = start + at - block * BLOCK
            with _opened(path, os.O_WRONLY, "write", len(data)) as fd:
                _all(lambda rest, o, fd=fd: os.pwritev(fd, [rest], o), data[:room], offset)  # type: ignore[misc]
            at, data = at + room, data[room:]

    def sync(self, name: str) -> None:
        """Return when what was written to a file is on the device."""
        for folder in self.folders:
            with _opened(folder / name, os.O_RDONLY, "sync", 0) as fd:
                os.fdatasync(fd)

    def _place(self, region: FileRegion, block: int) -> tuple[Path, int, int]:
        """The file of a block, where it begins there, and the flag of direct access."""
        n = len(self.folders)
        where = region.offset + block // n * BLOCK
        direct = os.O_DIRECT if self.direct[block % n] else 0
        return self.folders[block % n] / region.name, where, direct


class NoFiles(Files):
    """Files of a step that is foreseen: nothing is written, and all blocks are alike.

    Attributes:
        last: the number of what was read or written last.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders, self.last = tuple(folders), 0

    def reserve(self, name: str, nbytes: int) -> None:
        return

    def write(self, region: FileRegion, block: int, data: memoryview) -> int:
        return self._moved("write", len(data))

    def read(self, region: FileRegion, block: int, into: memoryview) -> int:
        return self._moved("read", len(into))

    def _moved(self, way: str, nbytes: int) -> int:
        if (told := MOVES.get()) is not None:
            self.last = told.moved(way, nbytes)
        return 0

    def patch(self, region: FileRegion, at: int, data: memoryview) -> None:
        return

    def sync(self, name: str) -> None:
        return


@contextmanager
def descriptor(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened(path: Path, flags: int, what: str, nbytes: int) -> Iterator[int]:
    """A descriptor of a file; what the system refuses to do with it is a ``PlacementError``."""
    try:
        with descriptor(path, flags) as fd:
            yield fd
    except OSError as error:
        raise refused(path, what, nbytes, error) from error


def _all(call: Callable[[memoryview, int], int], data: memoryview, at: int) -> int:
    """Repeat a system call until all of ``data`` is through, or nothing more comes."""
    done = 0
    while done < len(data):
        n = call(data[done:], at + done)
        if n <= 0:
            break
        done += n
    return done


def _takes_direct(folder: Path) -> bool:
    """Whether the file system takes O_DIRECT (tmpfs and some overlays do not)."""
    if not hasattr(os, "O_DIRECT"):
        return False
    trial = folder / f".direct-{os.getpid()}"
    try:
        with descriptor(trial, os.O_RDWR | os.O_CREAT | os.O_DIRECT):
            return True
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise refused(trial, "open", 0, error) from error
    finally:
        trial.unlink(missing_ok=True)


def refused(path: Path, what: str, nbytes: int, error: OSError) -> PlacementError:
    """What to say of a system call that failed: where, how much, and the room there is."""
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stat = os.statvfs(path.parent)
        room = (
            f": the device is full ({nbytes} bytes wanted, {stat.f_bavail * stat.f_frsize} free). "
            "Free some, or give `offload` another path"
        )
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        room = f": this user (uid {os.getuid()}) may not write there. Choose another path"
    return PlacementError(
        f"cannot {what} {path} ({error.strerror}){room}. A state that "
        "was there before is as it was."
    )
