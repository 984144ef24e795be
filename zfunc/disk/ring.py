"""A ring of buffers: page-aligned memory for units on their way between a disk and a computation.

A buffer comes back by itself as soon as no tensor lies in it any more, so nobody gives one back,
and a view that somebody kept is safe. What has to be read now always gets memory; only reading
ahead is bounded by the ring, so no number of buffers is too small.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from zfunc.disk.blocks import aligned

__all__ = ["Buffer", "Ring"]


class Buffer:
    """Memory of whole pages, and what tensors in it are made of."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view  # a slice of it would not keep the memory: whoever slices holds the buffer

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor in this memory, with a storage of its own."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=numel, offset=offset)


class Ring:
    """Recycled buffers of together at most ``limit`` bytes (see :meth:`take`)."""

    def __init__(self) -> None:
        self.limit = 0
        self.taken = 0  # bytes in use, those beyond the limit included
        self._free: dict[int, list[mmap.mmap]] = {}
        self._back: deque[tuple[int, mmap.mmap]] = deque()
        self._views: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()
        self._lock = Lock()

    def take(self, nbytes: int, must: bool = True) -> Buffer | None:
        """A buffer of at least ``nbytes``; None if the ring is used up, unless ``must``."""
        size = max(aligned(nbytes), 1 << 16)
        with self._lock:
            self._collect()
            if not must and self.taken and self.taken + size > self.limit:
                return None
            row = self._free.get(size)
            memory = row.pop() if row else None
            self.taken += size
            if memory is None:
                self._make_room(size)
        if memory is None:
            memory = mmap.mmap(-1, size)
        view = memoryview(memory)
        self._views[torch.frombuffer(view, dtype=torch.uint8).data_ptr()] = view
        # A finalizer may run anywhere, so it takes no lock: appending is atomic.
        weakref.finalize(view, self._back.append, (size, memory)).atexit = False
        return Buffer(view)

    def at(self, address: int) -> Buffer | None:
        """The buffer in use that begins at an address."""
        view = self._views.get(address)
        return None if view is None else Buffer(view)

    def _collect(self) -> None:
        while self._back:
            size, memory = self._back.popleft()
            self.taken -= size
            self._free.setdefault(size, []).append(memory)

    def _make_room(self, size: int) -> None:
        """Return idle memory to the system until the ring keeps to its limit."""
        idle = sum(s * len(row) for s, row in self._free.items())
        for s, row in self._free.items():
            while row and self.taken + idle > self.limit:
                row.pop()  # unmapped with its last reference
                idle -= s

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
        with self._lock:
            self._collect()
            self._free.clear()
