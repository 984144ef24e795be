"""The folders where a step keeps state on disk: their lock, their threads and their buffers.

``path/rank-00003`` belongs to one rank. A lock file in it names the process that uses it. Each
``place`` makes a folder of its own in it:

    rank-00003/lock
    rank-00003/place-0001/index.json          which slot of which tree is the state
    rank-00003/place-0001/0-00002-blocks.2.bin  one unit of all trees
    rank-00003/spill-0.bin                    gradients of the running step

The next ``place`` deletes what another process left there. Until then :func:`zfunc.recover` opens
it.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from zfunc.buffers.copies import Leaving
from zfunc.buffers.moves import MOVES, Moves
from zfunc.buffers.pages import FLIGHTS
from zfunc.buffers.ring import Buffer, Ring
from zfunc.errors import PlacementError
from zfunc.ranks import world
from zfunc.transforms.offloading.blocks import (
    FileRegion,
    Files,
    NoFiles,
    aligned,
    descriptor,
    finished,
    refused,
)
from zfunc.trees.kinds import FORESEEN

__all__ = ["Disk", "open_disk"]

THREADS = 4
PATIENCE = 10.0  # seconds for the collections of other threads to end
_DISKS: weakref.WeakValueDictionary[Any, Disk] = weakref.WeakValueDictionary()  # of all worlds
_TAKING = threading.Lock()


class Disk:
    """The folders of one rank, open for one step.

    Args:
        owner: the step, as a value; another step may not use the same folders.
        paths: the folders that the user named.
        rank: whose part this is.
        buffers: how many units of all trees the ring holds.
    """

    def __init__(self, owner: Any, paths: Sequence[Path], rank: int, buffers: int) -> None:
        self.owner, self.buffers = owner, buffers
        self.world = weakref.ref(world.current())
        self.folders = tuple(path / f"rank-{rank:05d}" for path in paths)
        self.ring = Ring()
        self.closed = True
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()  # the `DiskState`s that somebody holds
        self.dead: list[str] = []  # folders of those that nobody holds any more
        self.leaving = Leaving(0)  # gradients on a device, being copied into the ring
        self.idle: list[Any] = []  # storage for gradients that nobody uses
        self._made = 0
        self._pending: set[Future[Any]] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self.open()

    def open(self) -> None:
        """Take the lock.

        Raises:
            PlacementError: somebody else holds it, or the folders cannot be written.
        """
        if not self.closed:
            return
        for folder in self.folders:
            _make(folder)
        lock = _locked(self.folders[0] / "lock")
        self.closed = False
        self.files = Files(self.folders)
        self._release = weakref.finalize(self, os.close, lock)
        self._release.atexit = False

    def close(self) -> None:
        """Let go of threads, memory and the lock; what is on disk stays."""
        if self.closed:
            return
        self.drain()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        self.ring.clear()
        self._release()
        self.closed = True

    # Work under way

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a read or a write on a thread of the disk."""
        if self.closed:
            self.open()
        if self._executor is None or self._pid != os.getpid():
            self._executor, self._pid = ThreadPoolExecutor(THREADS, "zfunc-offload"), os.getpid()
            weakref.finalize(self, self._executor.shutdown, wait=False).atexit = False
        return self._executor.submit(call, *args)

    def behind(self, futures: Iterable[Future[Any]]) -> None:
        """Let writes end in the background; an error is raised by the next ``settle``."""
        self._pending.update(futures)

    def settle(self, block: bool = True) -> bool:
        """Wait for some write behind (all, if ``block``); whether there was one.

        Raises:
            PlacementError: a write has failed.
        """
        if block:
            self.leaving.end()
        if not self._pending:
            return False
        done, rest = wait(self._pending, return_when=FIRST_COMPLETED)
        if block:
            done, rest = wait(self._pending)
        self._pending = set(rest)
        for future in done:
            finished(future)
        return True

    def drain(self) -> None:
        """Wait for all writes, whatever becomes of them."""
        self.leaving.end()
        wait(self._pending)
        self._pending.clear()

    def room(self, nbytes: int) -> Buffer:
        """A buffer, as soon as a write has freed one."""
        return self.ring.wait(nbytes, lambda: self.settle(block=False) or FLIGHTS.pass_one())

    def serve(self, device: torch.device, pin: bool) -> None:
        """Let copies to and from a device run by themselves: the ring is page-locked."""
        self.ring.locked = pin and device.type == "cuda"

    @contextmanager
    def thrifty(self, nbytes: int) -> Iterator[None]:
        """Within, units pass through ``nbytes`` of memory, whatever the ring may take else."""
        self.settle()
        self.ring.clear()  # what steps left idle there would come on top
        limit, self.ring.limit = self.ring.limit, aligned(nbytes)
        try:
            yield
            self.settle()
        finally:
            self.ring.limit = limit

    def size_ring(self, trees: Iterable[Sequence[int]]) -> None:
        """Make the ring hold ``buffers`` times the largest unit with its gradient.

        Args:
            trees: bytes of each unit, of every tree.
        """
        sizes: dict[int, int] = {}
        largest = 0
        for tree in trees:
            for unit, nbytes in enumerate(tree):
                sizes[unit] = sizes.get(unit, 0) + nbytes
                largest = max(largest, nbytes)
        need = self.buffers * (max(sizes.values(), default=0) + largest)
        self.ring.limit = max(self.ring.limit, need)
        self.leaving.limit = max(self.leaving.limit, 2 * largest)

    def reserve(self, sizes: Iterable[int]) -> list[FileRegion]:
        """Room for gradients in a file of their own, of these many bytes each."""
        name, self._made = f"spill-{self._made}.bin", self._made + 1
        regions, at = [], 0
        for nbytes in sizes:
            region = FileRegion(name, at, nbytes)
            regions.append(region)
            at += region.span(len(self.folders))
        self.files.reserve(name, at)
        return regions

    # Folders

    def fresh(self) -> str:
        """Make a folder for a state; returns its name. Folders that nobody holds are deleted."""
        self.sweep()
        taken = [int(p.name[6:]) for p in self.folders[0].glob("place-*") if p.name[6:].isdigit()]
        name = f"place-{max(taken, default=0) + 1:04d}"
        for folder in self.folders:
            _make(folder / name, anew=True)
        return name

    def sweep(self) -> None:
        """Delete the folders of states that are gone."""
        held = {state.folder for state in self.alive}  # by one that was opened again
        while self.dead:
            name = self.dead.pop()
            if name in held:
                continue
            for folder in self.folders:
                shutil.rmtree(folder / name, ignore_errors=True)

    def forget(self) -> None:
        """Delete what earlier processes left."""
        keep = {state.folder for state in self.alive}
        for folder in self.folders:
            for found in folder.iterdir():
                if found.name.startswith("place-") and found.name not in keep:
                    shutil.rmtree(found, ignore_errors=True)
                elif found.name.startswith("spill-") and not self._made:
                    found.unlink(missing_ok=True)

    def record(self, folder: str, data: bytes) -> None:
        """Put a state's commit record on the device, in the place of the one before."""
        path = self.folders[0] / folder / "index.json"
        fresh = path.with_name("index.json.new")
        try:
            with descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                with open(fd, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(fd)
            os.replace(fresh, path)
            with descriptor(path.parent, os.O_RDONLY) as fd:
                os.fsync(fd)
        except OSError as error:
            raise refused(path, "write", len(data), error) from error


class ForetoldWork(Future[Any]):
    """A read or a write that is foreseen; whoever asks for its end has waited for it."""

    def __init__(self, told: Moves | None, number: int) -> None:
        super().__init__()
        self._told, self.number = told, number

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._told is not None:
            self._told.waited(self.number)
        return super().exception(timeout)


def _number(work: Any) -> int:
    number: int = work.number
    return number


class AbsentDisk(Disk):
    """The folders of a step that is foreseen: nothing is made, read, written or deleted there."""

    def open(self) -> None:
        self.files: NoFiles = NoFiles(self.folders)
        self.closed = False

    def close(self) -> None:
        self.ring.clear()
        self.closed = True

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        told = MOVES.get()
        with nullcontext() if told is None else told.behind():
            result = call(*args)
        done = ForetoldWork(told, self.files.last)
        done.set_result(result)
        return done

    def settle(self, block: bool = True) -> bool:
        if block:
            self.leaving.end()
        pending, self._pending = self._pending, set()
        for last in sorted(pending, key=_number)[-1:]:  # a drive does one after the other
            finished(last)
        return bool(pending)

    def fresh(self) -> str:
        self._made += 1
        return f"place-{self._made:04d}"

    def sweep(self) -> None:
        self.dead.clear()

    def forget(self) -> None:
        """There is nothing."""

    def record(self, folder: str, data: bytes) -> None:
        """There is nowhere to."""


def _make(folder: Path, anew: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=not anew)
    except OSError as error:
        raise refused(folder, "make", 0, error) from error


def _locked(path: Path) -> int:
    """A descriptor that holds the lock at ``path`` and names this process in it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise refused(path, "open", 0, error) from error
    me = f"process {os.getpid()} on {socket.gethostname()}"
    for _ in range(3):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            if holder != me:
                break
            _collect()  # of a world that has ended: gradients first, and then what keeps them
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{me}\n".encode(), 0)
            return fd
    os.close(fd)
    who = "another step of this process" if holder == me else holder
    raise PlacementError(
        f"{path.parent} is in use by {who}. A path belongs to one step at a time: give this one "
        "its own `path`, or close the other (`step.close()`)."
    )


def _collect() -> None:
    """Collect all garbage there is now; ``gc.collect`` does nothing while another thread collects.

    Ranks of a simulated world come here at once.
    """
    me, done = threading.get_ident(), threading.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and threading.get_ident() == me:
            done.set()

    gc.callbacks.append(note)
    try:
        deadline = time.monotonic() + PATIENCE
        while not done.is_set() and time.monotonic() < deadline:
            gc.collect()
            if not done.is_set():
                time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


def _left_behind(owner: Any, paths: tuple[Path, ...], rank: int) -> Disk | None:
    """The folders of an equal step in a world of this process that has ended.

    Its threads have ended, but somebody may still hold states that lie in it. So the lock is not
    waited for, and nothing is deleted.
    """
    with _TAKING:
        disk = _DISKS.get((paths, rank))
        if disk is None or disk.owner != owner:
            return None
        before = disk.world()
        if before is not None and not before.ended:
            return None
        disk.world = weakref.ref(world.current())
    disk.drain()  # what a step that broke off was writing
    return disk


def open_disk(owner: Any, paths: Sequence[Path], buffers: int, left: bool = True) -> Disk:
    """The folders of a step on the calling rank; equal steps of one world share them.

    Args:
        owner: the step.
        paths: the folders that the user named.
        buffers: how many units of all trees the ring holds.
        left: whether to take over what an equal step left behind in a world that has ended.

    Raises:
        PlacementError: the folders belong to another step or process.
    """
    here = world.current()
    paths = tuple(Path(os.path.abspath(path)) for path in paths)
    disks = here.memo.setdefault("disks", weakref.WeakValueDictionary())
    disk: Disk | None = disks.get(paths)
    if disk is None or disk.owner != owner:
        if FORESEEN.get():
            disk = disks[paths] = AbsentDisk(owner, paths, here.rank, buffers)
            return disk
        found = _left_behind(owner, paths, here.rank) if left else None
        disk = disks[paths] = found or Disk(owner, paths, here.rank, buffers)
        with _TAKING:
            _DISKS[paths, here.rank] = disk
    disk.open()
    return disk
