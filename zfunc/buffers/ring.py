"""A ring of buffers: page-aligned memory for units on their way between a disk and a computation.

A buffer comes back by itself as soon as no tensor lies in it any more, so nobody gives one back,
and a view that somebody kept is safe. What has to be read now always gets memory; only reading
ahead is bounded by the ring, so no number of buffers is too small.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from zfunc.buffers.moves import crossing
from zfunc.buffers.pages import FLIGHTS, Pages, address_of, aligned

__all__ = ["HOST", "Buffer", "Ring"]

SMALLEST = 1 << 16
LINE = 64  # bytes; no two tensors of a buffer share a cache line


class Buffer:
    """Memory of whole pages, and what tensors in it are made of."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view  # a slice of it would not keep the memory: whoever slices holds the buffer

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor in this memory, with a storage of its own."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        made = torch.frombuffer(self.view, dtype=dtype, count=numel, offset=offset)
        if (told := crossing()) is not None:
            told.hosts(made)
        return made


class Ring:
    """Recycled buffers of together at most ``limit`` bytes (see :meth:`take`).

    Args:
        smallest: the least that a buffer takes.
        limit: bytes.

    Attributes:
        locked: whether its memory is page-locked.
    """

    def __init__(self, smallest: int = SMALLEST, limit: int = 0) -> None:
        self.limit, self.locked = limit, False
        self.taken = 0  # bytes in use, those beyond the limit included
        self._smallest = smallest
        self._free: dict[tuple[int, bool], list[Pages]] = {}
        self._back: deque[Pages] = deque()
        self._views: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self._lock = Lock()

    def take(self, nbytes: int, must: bool = True, locked: bool | None = None) -> Buffer | None:
        """A buffer of at least ``nbytes``; None if the ring is used up, unless ``must``.

        Raises:
            PlacementError: so much memory cannot be page-locked.
        """
        size = max(aligned(nbytes), self._smallest)
        locked = self.locked if locked is None else locked
        FLIGHTS.reap()
        with self._lock:
            self._collect()
            if not must and self.taken and self.taken + size > self.limit:
                return None
            row = self._free.get((size, locked))
            block = row.pop() if row else None
            self.taken += size
            if block is None:
                self._make_room(size)
        if block is None:
            try:
                block = Pages(size, locked)
            except BaseException:
                self.taken -= size
                raise
        view = memoryview(block.memory)
        self._views[address_of(view)] = view
        # A finalizer may run anywhere, so it takes no lock: appending is atomic.
        weakref.finalize(view, self._back.append, block).atexit = False
        return Buffer(view)

    def tensors(
        self, sizes: Sequence[tuple[int, torch.dtype]], locked: bool | None = None
    ) -> list[Tensor]:
        """1-D tensors of ``(numel, dtype)`` each, in one buffer of just their size."""
        starts, end = [], 0
        for numel, dtype in sizes:
            starts.append(start := -(-end // LINE) * LINE)
            end = start + numel * dtype.itemsize
        if not end:
            return [torch.empty(0, dtype=dtype) for _, dtype in sizes]
        buffer = self.take(end, locked=locked)
        assert buffer is not None
        return [buffer.tensor(at, n, t) for at, (n, t) in zip(starts, sizes, strict=True)]

    def at(self, address: int) -> Buffer | None:
        """The buffer in use that begins at an address."""
        view = self._views.get(address)
        return None if view is None else Buffer(view)

    def _collect(self) -> None:
        while self._back:
            block = self._back.popleft()
            self.taken -= block.nbytes
            self._free.setdefault((block.nbytes, block.locked), []).append(block)

    def _make_room(self, size: int) -> None:
        """Return idle memory to the system until the ring keeps to its limit."""
        idle = self.idle
        for (s, _), row in self._free.items():
            while row and self.taken + idle > self.limit:
                row.pop()  # unmapped with its last reference
                idle -= s

    @property
    def idle(self) -> int:
        """Bytes that nobody uses."""
        return sum(s * len(row) for (s, _), row in self._free.items())

    def wait(self, nbytes: int, pending: Callable[[], bool]) -> Buffer:
        """A buffer as soon as ``pending`` (which waits for some work to end) has freed one."""
        while (buffer := self.take(nbytes, must=False)) is None:
            if not pending():
                break
        else:
            return buffer
        last = self.take(nbytes)
        assert last is not None
        return last

    def clear(self) -> None:
        """Return all idle memory to the system."""
        FLIGHTS.reap()
        with self._lock:
            self._collect()
            self._free.clear()


HOST = Ring(smallest=1, limit=1 << 62)
"""State, gradients and copies of a process that computes on another device than the host.

Whether what copies pass through is ``locked`` is for the step to say that runs.
"""
