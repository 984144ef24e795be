"""Copies between the host and a device, on streams of their own.

The device memory of a copy belongs to the stream that computes: it is allocated there, and freed
there behind an event of the copy. So a host that is far ahead of its device uses no more memory
than the program holds at a time, and no allocator has to guess when another stream is done. Only
devices wait; the host waits in :func:`zfunc.buffers.pages.wait_for` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.moves import MoveEvent, crossing, on_device
from zfunc.buffers.pages import ACCOUNT, FLIGHTS, wait_for
from zfunc.buffers.ring import HOST

__all__ = ["Descent", "Leaving", "Upload", "descend", "stream_of", "uploaded"]

_STREAMS: dict[tuple[torch.device, str], Any] = {}


def stream_of(device: torch.device, name: str) -> Any:
    """A stream for copies of one kind; None where there are no streams."""
    if device.type != "cuda":
        return None
    if (device, name) not in _STREAMS:
        _STREAMS[device, name] = torch.cuda.Stream(device)
    return _STREAMS[device, name]


def _staged(x: Tensor, pin: bool) -> Tensor:
    """A host tensor from which a device copies by itself."""
    if not pin or not HOST.locked or not x.numel() or x.is_pinned():
        return x
    return HOST.tensors([(x.numel(), x.dtype)])[0].view(x.shape).copy_(x)


class Upload:
    """Host tensors on their way to the device; a ``Pending``.

    Args:
        flats: what goes up; nobody may write into it before the copy is done, see
            :meth:`zfunc.buffers.pages.Flights.settle`.
        device: where to.
        pin: whether what is pageable goes through page-locked memory.
    """

    def __init__(self, flats: Sequence[Tensor], device: torch.device, pin: bool = True) -> None:
        self._event, self._nbytes = None, sum(x.nbytes for x in flats)
        self._told = crossing()
        if self._told is not None:
            self._number, self._given = self._told.moved("up", self._nbytes), flats
            self._flats = [torch.empty(x.shape, dtype=x.dtype) for x in flats]
            return
        up = stream_of(device, "up")
        if up is None:
            self._flats = [x.to(device) for x in flats]
            return
        self._home = torch.cuda.current_stream(device)
        flats = [_staged(x, pin) for x in flats]
        self._flats = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in flats]
        up.wait_stream(self._home)  # whatever was in this memory before
        with torch.cuda.stream(up):
            for mine, x in zip(self._flats, flats, strict=True):
                _copy(mine, x, "up", pin and HOST.locked)
            self._event = up.record_event()
        FLIGHTS.hold(up, self._event, flats, reads=True)
        ACCOUNT.rise(self._nbytes)

    def wait(self) -> list[Tensor]:
        """The tensors; what is computed from now on comes behind the copy."""
        if self._told is not None:
            self._told.waited(self._number)
            self._told.arrived(self._flats, self._given, self._fill)
            self._told, self._given = None, ()
        if self._event is not None:
            here = torch.cuda.current_stream(self._home.device)
            self._join(here)
            if here != self._home:
                for x in self._flats:
                    x.record_stream(here)
        return self._flats

    def _fill(self) -> None:
        for mine, x in zip(self._flats, self._given, strict=True):
            mine.copy_(x)

    def _join(self, stream: Any) -> None:
        stream.wait_event(self._event)
        self._event = None
        ACCOUNT.rise(-self._nbytes)

    def advance(self) -> None:
        """There is one round only."""

    def __del__(self) -> None:
        if self._event is not None:  # started in vain: its memory is let go of
            self._join(self._home)


def _copy(into: Tensor, x: Tensor, way: str, pinned: bool) -> None:
    if x.numel():
        ACCOUNT.copies[f"{'pinned' if pinned else 'pageable'} {way}"] += 1
        into.copy_(x, non_blocking=True)


def uploaded(flats: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Tensors, perhaps of the host, on a device; what is there already is not copied."""
    there = [x is None or on_device(x) for x in flats]
    moving = [x for x, stays in zip(flats, there, strict=True) if x is not None and not stays]
    rest = iter(Upload(moving, device).wait() if moving else ())
    return [x if stays else next(rest) for x, stays in zip(flats, there, strict=True)]


def descend(
    flats: Sequence[Tensor],
    into: Sequence[Tensor],
    name: str = "down",
    behind: Iterable[Any] | None = None,
    pin: bool = True,
) -> Any:
    """Start to copy tensors of a device into host memory; an event of that, None if it is done.

    Args:
        flats: they have to stay until the event has happened.
        into: tensors of the same shapes and dtypes; held until then.
        name: of the stream.
        behind: events; what the current stream has to do if left out.
        pin: whether ``into`` is page-locked.
    """
    if (told := crossing()) is not None and any(map(on_device, flats)):
        number = told.moved("down", sum(x.nbytes for x in flats))
        told.arrived(into, flats, lambda: [m.copy_(x) for m, x in zip(into, flats, strict=True)])
        return MoveEvent(told, number)
    stream = next((stream_of(x.device, name) for x in flats if x.device.type == "cuda"), None)
    if stream is None:
        for mine, x in zip(into, flats, strict=True):
            mine.copy_(x)
        return None
    if behind is None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    for event in behind or ():
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        for mine, x in zip(into, flats, strict=True):
            _copy(mine, x, "down", pin)
        event = stream.record_event()
    FLIGHTS.hold(stream, event, into)
    return event


def _computing(flats: Sequence[Tensor]) -> Any:
    """The stream that computes with tensors, some of which are a device's."""
    if (told := crossing()) is not None:
        return MoveEvent(told)
    return torch.cuda.current_stream(next(x.device for x in flats if x.device.type == "cuda"))


class Leaving:
    """Tensors of a device that are being copied away: few of them are there at once.

    Args:
        limit: bytes; beyond them the stream that computes waits for the copies.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: deque[tuple[Any, Any, int, tuple[Tensor, ...]]] = deque()
        self._held = 0

    def add(self, event: Any, flats: Sequence[Tensor]) -> None:
        """Keep tensors until ``event``."""
        if event is None:
            return
        nbytes = sum(x.nbytes for x in flats)
        self._rows.append((_computing(flats), event, nbytes, tuple(flats)))
        self._held += nbytes
        while self._held > self.limit and len(self._rows) > 1:
            self._drop()

    def _drop(self) -> None:
        home, event, nbytes, flats = self._rows.popleft()
        home.wait_event(event)
        self._held -= nbytes
        del flats

    def end(self) -> None:
        """Let go of all."""
        while self._rows:
            self._drop()

    __del__ = end


class Descent:
    """What one group of units needs of the device, on its way to the host.

    Args:
        flats: tensors of the device.
        name: of the unit, for the account.
        behind: events of what else the group needs; waiting for this covers them.
        after: events behind which the tensors are there; if left out they are when the current
            stream has done what it has to do.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        name: str,
        behind: Sequence[Any] = (),
        after: Sequence[Any] | None = None,
    ) -> None:
        self.name, self._event = name, None
        self.flats = HOST.tensors([(x.numel(), x.dtype) for x in flats])
        self._home, self._sources = _computing(flats), tuple(flats)
        known = after is not None or crossing() is not None
        events = [*(after or ())] if known else [self._home.record_event()]
        self._event = descend(flats, self.flats, "aside", [*events, *behind], HOST.locked)

    def wait(self) -> list[Tensor]:
        """The tensors, in host memory."""
        if self._event is not None:
            wait_for(self._event, self.name)
            self._leave()
        return self.flats

    def _leave(self) -> None:
        if self._event is not None:  # what was made of its sources' memory comes behind
            self._home.wait_event(self._event)
            self._event, self._sources = None, ()

    __del__ = _leave
