"""Whole pages of host memory, page-locked where a GPU copies by itself, and an account of them.

``torch.empty(pin_memory=True)`` takes the next power of two; here memory is mapped in whole pages
and registered with the driver as it is. Copies that are under way hold the host memory that they
use, so that it is neither given back, nor unlocked, nor handed out again before they are done.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import resource
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import PlacementError

__all__ = ["ACCOUNT", "FLIGHTS", "PAGE", "Account", "Flights", "Pages", "aligned", "wait_for"]

PAGE = 4096  # of memory, and of offsets and lengths as direct I/O wants them
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages.

    >>> aligned(1), aligned(4096)
    (4096, 4096)
    """
    return -(-nbytes // PAGE) * PAGE


@dataclass
class Account:
    """What this process has page-locked, copied and waited for; for tests and for reports.

    Attributes:
        locked: bytes that are page-locked now, by the address of each block.
        waits: how often the host waited for a copy, by the name of the unit.
        copies: by kind (``"pinned up"``, ``"pageable down"``, ...).
        ahead, most_ahead: bytes on their way to a device that no computation has waited for yet,
            and the most there were.
    """

    locked: dict[int, int] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    ahead: int = 0
    most_ahead: int = 0

    @property
    def locked_bytes(self) -> int:
        return sum(self.locked.values())

    def rise(self, nbytes: int) -> None:
        """So many bytes more, or fewer, are ahead."""
        self.ahead += nbytes
        self.most_ahead = max(self.most_ahead, self.ahead)

    def begin(self) -> None:
        """Count from here on; what is locked stays so."""
        self.waits.clear()
        self.copies.clear()
        self.most_ahead = self.ahead


ACCOUNT = Account()
_UNLOCK: dict[int, Callable[[int], Any]] = {}


class Pages:
    """``nbytes`` of whole pages; unlocked and unmapped with the last reference.

    Raises:
        PlacementError: the system does not let so much memory be page-locked.
    """

    __slots__ = ("__weakref__", "locked", "memory", "nbytes")

    def __init__(self, nbytes: int, locked: bool = False) -> None:
        self.nbytes, self.locked = nbytes, locked
        self.memory = mmap.mmap(-1, nbytes)
        if locked:
            address = address_of(self.memory)
            _lock(address, nbytes)
            # The finalizer keeps the mapping until the driver has let go of it.
            weakref.finalize(self, _unlock, address, self.memory).atexit = False


def address_of(memory: Any) -> int:
    """Where a buffer begins."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _lock(address: int, nbytes: int) -> None:
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(code):
        raise PlacementError(_refused(nbytes, code))
    _UNLOCK[address] = runtime.cudaHostUnregister
    ACCOUNT.locked[address] = nbytes


def _unlock(address: int, memory: Any) -> None:
    ACCOUNT.locked.pop(address, None)
    if (unlock := _UNLOCK.pop(address, None)) is not None:
        with contextlib.suppress(RuntimeError, AssertionError):  # the driver may be gone already
            unlock(address)


def _refused(nbytes: int, code: Any) -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return (
        f"{nbytes} bytes of host memory cannot be page-locked (CUDA error {int(code)}; "
        f"{ACCOUNT.locked_bytes} bytes are locked by this process, `ulimit -l` is {limit}). Raise "
        "the limit (`ulimit -l unlimited`; in a container --ulimit memlock=-1), free host memory, "
        "keep more of the state on the device or on disk (what=..., to='disk'), or write "
        "offload(..., pin=False): then copies wait for one another."
    )


class Flights:
    """Copies under way, in the order of each stream, and the host memory that they use."""

    def __init__(self) -> None:
        self._rows: dict[Any, deque[tuple[Any, tuple[Tensor, ...]]]] = {}
        self._reads: dict[int, Any] = {}  # by address: behind what it may be written again
        self._lock = Lock()

    def hold(self, stream: Any, event: Any, tensors: Iterable[Tensor], reads: bool = False) -> None:
        """Keep host tensors until ``event`` of ``stream`` has happened.

        Args:
            reads: whether the stream reads them, see :meth:`settle`.
        """
        kept = tuple(x.detach() for x in tensors if x.numel())
        self.reap()
        with self._lock:
            self._rows.setdefault(stream, deque()).append((event, kept))
            if reads:
                self._reads.update((x.data_ptr(), event) for x in kept)

    def reap(self) -> None:
        """Let go of what is done."""
        with self._lock:
            for row in self._rows.values():
                while row and row[0][0].query():
                    self._forget(*row.popleft())

    def _forget(self, event: Any, kept: Iterable[Tensor]) -> None:
        for x in kept:
            if self._reads.get(x.data_ptr()) is event:
                del self._reads[x.data_ptr()]

    def pass_one(self) -> bool:
        """Wait for the copy that has been under way for longest; whether there was one."""
        with self._lock:
            row = next((row for row in self._rows.values() if row), None)
            if row is None:
                return False
            event, kept = row.popleft()
            wait_for(event, "ring")
            self._forget(event, kept)
        return True

    def settle(self, x: Tensor, name: str) -> None:
        """Wait until no device reads a host tensor any more: it is about to be overwritten."""
        event = self._reads.get(x.data_ptr()) if self._reads else None
        if event is not None:
            wait_for(event, name)

    def end(self) -> None:
        """Wait for everything."""
        with self._lock:
            while self._rows:
                for event, _ in self._rows.popitem()[1]:
                    event.synchronize()
            self._reads.clear()

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))


FLIGHTS = Flights()


def wait_for(event: Any, name: str) -> None:
    """Let the host wait for an event, that of unit ``name``, unless it has happened."""
    if not event.query():
        ACCOUNT.waits[name] += 1
        event.synchronize()


@atexit.register
def _leave() -> None:
    """The interpreter ends, perhaps by an error: nothing may stay locked or under way."""
    with contextlib.suppress(RuntimeError, AssertionError):
        FLIGHTS.end()
    for address in list(_UNLOCK):
        _unlock(address, None)
