"""A lock on a folder of checkpoints: one run at a time writes there.

The process of rank 0 holds the lock until it ends, so that no other run saves between two saves
of this one. The system releases the lock however the process ends. Processes that it started may
save there, too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

from zfunc.errors import CheckpointError

__all__ = ["hold"]

NAME = ".lock"
INHERITED = "ZFUNC_CHECKPOINT_LOCKS"  # folders that a process' ancestors hold
_inherited = frozenset(os.environ.get(INHERITED, "").split(os.pathsep))
_held: dict[Path, int] = {}
_guard = threading.Lock()


def hold(folder: Path) -> bool:
    """Lock ``folder`` for this process, unless one that started it has done so.

    Returns:
        Whether this process holds the lock itself.

    Raises:
        CheckpointError: another run has it; the message names its process and host.
        OSError: no permission.
    """
    folder = folder.resolve()
    with _guard:
        for other, fd in list(_held.items()):
            if not _is(other / NAME, fd):  # the folder has been deleted
                os.close(_held.pop(other))
        if folder in _held:
            return True
        try:
            _held[folder] = _take(folder / NAME)
        except CheckpointError:
            if str(folder) in _inherited:
                return False
            raise
        os.environ[INHERITED] = os.pathsep.join({*_inherited, *map(str, _held)} - {""})
        return True


def _is(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _take(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise CheckpointError(
            f"{path.parent} is locked by another run: {holder} saves there. Let that run end, or "
            "give this one a folder of its own."
        ) from None
    except OSError:
        os.close(fd)
        raise
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd
