"""Which memory is pretended to be the device's, which is page-locked, and how each is used."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.gpu.clocks import Uses

__all__ = ["Memory", "Table", "span", "storage_of"]

_functorch: Any = torch._C._functorch
real_device: Any = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]
_HOST = torch.device("cpu")


@dataclass(eq=False)
class Memory:
    """What is known of one storage, or of one page-locked region of the host.

    Attributes:
        number: storages are numbered as they are born.
        device: the index of the pretended GPU; ``None`` for the host.
        pinned: whether the host's memory is page-locked.
        home: the stream that it was allocated on.
        nbytes: its size.
        start: of a region, its first byte.
        born: the step in which it was allocated, and as the how manieth in it.
        kept: the streams that ``record_stream`` told it of.
    """

    number: int
    device: int | None
    pinned: bool
    home: str
    nbytes: int
    born: tuple[int, int]
    session: int
    start: int | None = None
    kept: set[str] = field(default_factory=set)
    uses: Uses = field(default_factory=Uses)


class Table:
    """All storages that are not plain host memory; each leaves when it is freed.

    It outlives a session, for caches of the project may keep tensors of an earlier one.
    """

    def __init__(self) -> None:
        self._held: dict[int, Memory] = {}
        self._regions: list[Memory] = []  # in the order of their first bytes
        self._starts: list[int] = []  # which are these
        self._numbers = itertools.count()
        self.session = 0
        self.step = 0
        self._births = itertools.count()
        self.freed: Callable[[Memory], None] = lambda memory: None

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, session: bool = False) -> None:
        """A new step, or a new session, in which nothing has been used yet."""
        self.session += session
        self.step += 1
        self._births = itertools.count()

    def add(self, x: Tensor, *, device: int | None, home: str, pinned: bool = False) -> Memory:
        """A storage is the device's, or page-locked, from now on; what is known of it stays."""
        storage = storage_of(x)
        key = storage._cdata
        if key in self._held:
            return self._held[key]
        made = self._made(device, pinned, home, storage.nbytes())
        self._held[key] = made
        weakref.finalize(storage, self._gone, key, made).atexit = False
        return made

    def _made(self, device: int | None, pinned: bool, home: str, nbytes: int) -> Memory:
        born = (self.step, next(self._births))
        return Memory(next(self._numbers), device, pinned, home, nbytes, born, self.session)

    def _gone(self, key: int, memory: Memory) -> None:
        if self._held.get(key) is memory:
            del self._held[key]
            self.freed(memory)

    def lock(self, address: int, nbytes: int) -> Memory:
        """A region of the host is page-locked (``cudaHostRegister``)."""
        made = self._made(None, True, "host", nbytes)
        made.start = address
        at = bisect.bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._regions.insert(at, made)
        return made

    def unlock(self, address: int) -> Memory | None:
        if address not in self._starts:
            return None
        at = self._starts.index(address)
        del self._starts[at]
        return self._regions.pop(at)

    def _region(self, address: int) -> Memory | None:
        """The page-locked region that a byte is in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + self._regions[at].nbytes:
            return None
        return self._regions[at]

    def find(self, x: Tensor) -> Memory | None:
        """What is known of a tensor's memory; ``None`` for pageable memory of the host."""
        try:
            found = self._held.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a wrapper: of vmap, of a subclass
            if not _functorch.is_functorch_wrapped_tensor(x):
                return None
            return self.find(_functorch.get_unwrapped(x))
        if found is None and self._regions and real_device(x) == _HOST:
            found = self._region(x.data_ptr())
        if found is None:
            return None
        if found.session != self.session:
            found.session, found.uses, found.kept = self.session, Uses(), set()
            found.home = "compute" if found.device is not None else "host"
        return found

    def start_of(self, x: Tensor, memory: Memory) -> int:
        """Where the memory begins that a tensor's bytes are counted from."""
        return x.untyped_storage().data_ptr() if memory.start is None else memory.start


def storage_of(x: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()


def span(x: Tensor, start: int) -> tuple[int, int]:
    """The bytes between a tensor's first and its last element, counted from ``start``."""
    first = x.data_ptr() - start
    if x.is_contiguous():
        return first, first + x.numel() * x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first, first + (last + 1) * x.element_size()
