"""A store: the folders where a step keeps state on disk, and who may write there.

``path/rank-00003`` is one rank's own. In it a lock file names the process that holds it,
and each ``place`` makes a folder of its own:

    rank-00003/lock
    rank-00003/place-0001/index.json          which slot of which column is the state
    rank-00003/place-0001/0-00002-blocks.2.bin  all columns of one unit
    rank-00003/spill-0.bin                    gradients on their way through

What another process left there is discarded by the next ``place``; until then
:func:`zfunc.recover` opens it.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zfunc.buffers.copies import Leaving
from zfunc.buffers.pages import FLIGHTS
from zfunc.buffers.ring import Buffer, Ring
from zfunc.errors import PlacementError
from zfunc.ranks import world
from zfunc.transforms.offloading.blocks import Files, Region, aligned, finished, refused

__all__ = ["Store", "open_store"]

THREADS = 4
PATIENCE = 10.0  # seconds for the collections of other threads to end
_STORES: weakref.WeakValueDictionary[Any, Store] = weakref.WeakValueDictionary()  # of all worlds
_TAKING = threading.Lock()


class Store:
    """One rank's folders, open for one step.

    Args:
        owner: the step, as a value; another step may not use the same folders.
        paths: the folders that the user named.
        rank: whose part this is.
        buffers: how many units of all columns the ring holds.
    """

    def __init__(self, owner: Any, paths: Sequence[Path], rank: int, buffers: int) -> None:
        self.owner, self.buffers = owner, buffers
        self.world = weakref.ref(world.current())
        self.folders = tuple(path / f"rank-{rank:05d}" for path in paths)
        self.ring = Ring()
        self.closed = True
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()  # placements
        self.dead: list[str] = []  # folders of placements that nobody holds any more
        self.leaving = Leaving(0)  # gradients on a device, being copied into the ring
        self.idle: list[Any] = []  # columns for gradients that nobody uses
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
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise refused(folder, "make", 0, error) from error
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
        """Run a read or a write on a thread of the store."""
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

    def size_ring(self, columns: Iterable[Sequence[int]]) -> None:
        """Make the ring hold ``buffers`` times the largest unit with its gradient.

        Args:
            columns: bytes of each unit, of every column.
        """
        sizes: dict[int, int] = {}
        largest = 0
        for column in columns:
            for unit, nbytes in enumerate(column):
                sizes[unit] = sizes.get(unit, 0) + nbytes
                largest = max(largest, nbytes)
        need = self.buffers * (max(sizes.values(), default=0) + largest)
        self.ring.limit = max(self.ring.limit, need)
        self.leaving.limit = max(self.leaving.limit, 2 * largest)

    def reserve(self, sizes: Iterable[int]) -> list[Region]:
        """Room for gradients in a file of their own, of these many bytes each."""
        name, self._made = f"spill-{self._made}.bin", self._made + 1
        regions, at = [], 0
        for nbytes in sizes:
            region = Region(name, at, nbytes)
            regions.append(region)
            at += region.span(len(self.folders))
        self.files.reserve(name, at)
        return regions

    # Folders

    def fresh(self) -> str:
        """Name of a new folder for a placement, made; what nobody holds is swept away."""
        self.sweep()
        taken = [int(p.name[6:]) for p in self.folders[0].glob("place-*") if p.name[6:].isdigit()]
        name = f"place-{max(taken, default=0) + 1:04d}"
        for folder in self.folders:
            try:
                (folder / name).mkdir()
            except OSError as error:
                raise refused(folder / name, "make", 0, error) from error
        return name

    def sweep(self) -> None:
        """Delete the folders of placements that are gone."""
        held = {placement.folder for placement in self.alive}  # by one that was opened again
        while self.dead:
            name = self.dead.pop()
            if name in held:
                continue
            for folder in self.folders:
                shutil.rmtree(folder / name, ignore_errors=True)

    def forget(self) -> None:
        """Delete what earlier processes left."""
        keep = {placement.folder for placement in self.alive}
        for folder in self.folders:
            for found in folder.iterdir():
                if found.name.startswith("place-") and found.name not in keep:
                    shutil.rmtree(found, ignore_errors=True)
                elif found.name.startswith("spill-") and not self._made:
                    found.unlink(missing_ok=True)


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


def _left_behind(owner: Any, paths: tuple[Path, ...], rank: int) -> Store | None:
    """The store of an equal step in a world of this process that has ended.

    Its threads have gone, and states that lie in it may still be in somebody's hands: the lock is
    not waited for, and nothing of theirs is discarded.
    """
    with _TAKING:
        store = _STORES.get((paths, rank))
        if store is None or store.owner != owner:
            return None
        before = store.world()
        if before is not None and not before.ended:
            return None
        store.world = weakref.ref(world.current())
    store.drain()  # what a step that broke off was writing
    return store


def open_store(owner: Any, paths: Sequence[Path], buffers: int, left: bool = True) -> Store:
    """The store of a step on the calling rank; equal steps of one world share it.

    Args:
        owner: the step.
        paths: the folders that the user named.
        buffers: how many units of all columns the ring holds.
        left: whether to go on with what an equal step left behind in a world that has ended.

    Raises:
        PlacementError: the folders belong to another step or process.
    """
    here = world.current()
    paths = tuple(Path(os.path.abspath(path)) for path in paths)
    stores = here.memo.setdefault("stores", weakref.WeakValueDictionary())
    store: Store | None = stores.get(paths)
    if store is None or store.owner != owner:
        found = _left_behind(owner, paths, here.rank) if left else None
        store = stores[paths] = found or Store(owner, paths, here.rank, buffers)
        with _TAKING:
            _STORES[paths, here.rank] = store
    store.open()
    return store
