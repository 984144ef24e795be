"""``Hosted``: a tree in host memory, of a step that computes on another device.

Units go up for a computation and come down as gradients; the optimizer runs here, on the
host, unit by unit. Copies run on streams of their own, so that the device computes meanwhile.
Where host and device are one memory a copy is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.nodes import Span, register
from zfunc.placed.layout import Layout
from zfunc.placed.sharded import Sharded
from zfunc.placed.streamed import Streamed, rank_in
from zfunc.seams import Ready
from zfunc.squares import square_sum

__all__ = ["HostSpill", "Hosted", "Upload", "host_empty", "lowered", "page_locked"]


def host_empty(like: Tensor, pin: bool) -> Tensor:
    """Host memory for a tensor, page-locked if that lets a GPU copy by itself."""
    pinned = pin and torch.cuda.is_available()
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def lowered(x: Tensor | None, pin: bool) -> Tensor | None:
    """A copy of a tensor in host memory."""
    return None if x is None else host_empty(x, pin).copy_(x)


def page_locked(x: Tensor, pin: bool) -> Tensor:
    """A host tensor in page-locked memory, if that is wanted and it is not there already."""
    return host_empty(x, pin).copy_(x) if pin and not x.is_pinned() else x


class Hosted(Streamed):
    """This rank's part of a tree, in host memory.

    Args:
        node: the flats, on the CPU.
        device: where its units are used.
        pin: whether its memory is page-locked.
    """

    def __init__(
        self,
        node: Sharded,
        device: torch.device,
        pin: bool = True,
        squares: dict[int, Tensor] | None = None,
    ) -> None:
        self._node, self.device, self.pin, self._squares = node, device, pin, squares
        self.skeleton = Sharded(node.layout, [x if x is None else x.to("meta") for x in node.flats])

    def held(self) -> Sequence[Tensor | None]:
        return self._node.flats

    @property
    def squares(self) -> Callable[[], Any] | None:
        if self._squares is None:
            return None
        found = self._squares
        dtypes = [None if x is None else x.dtype for x in self._node.flats]
        return lambda: (dict(found), dtypes)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(x.nbytes for x in self._node.flats if x is not None)

    def part(self, unit: int) -> Sharded:
        """One unit, where it is."""
        mine = self.layout.units[unit].flats
        flats = [x if i in mine else None for i, x in enumerate(self._node.flats)]
        return Sharded(self.layout, flats)

    def fetch(self, unit: int, must: bool = True) -> Upload:
        flats = [self._node.flats[i] for i in self.layout.units[unit].flats]
        return Upload([x for x in flats if x is not None], self.device)

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        return self._node.writer(index)

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Hosted:
        node = self._node.refilled(fill)
        flats = [lowered(x, self.pin) for x in node.flats]
        return Hosted(Sharded(node.layout, flats), self.device, self.pin)


register(
    Hosted,
    lambda node: (
        node.held(),
        (node.layout, node.device, node.pin),
        tuple(range(len(node.held()))),
    ),
    lambda static, flats: Hosted(Sharded(static[0], flats), static[1], static[2]),
)


class Upload:
    """One unit on its way to the device; a ``Pending``."""

    def __init__(self, flats: Sequence[Tensor], device: torch.device) -> None:
        stream = _stream(device, "up")
        if stream is None:
            self._event, self._flats = None, [x.to(device) for x in flats]
            return
        with torch.cuda.stream(stream):
            self._flats = [x.to(device, non_blocking=True) for x in flats]
            self._event = stream.record_event()

    def wait(self) -> list[Tensor]:
        """The flats; what is computed from now on comes behind the copy."""
        if self._event is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self._event)
            for x in self._flats:
                x.record_stream(here)
            self._event = None
        return self._flats

    def advance(self) -> None:
        """There is one round only."""


class HostSpill:
    """The gradients of one pass on their way to host memory.

    Args:
        layout: how they are cut.
        device: where they come from.
        pin: whether they get page-locked memory.
    """

    def __init__(self, layout: Layout, device: torch.device, pin: bool) -> None:
        self._layout, self._device, self._pin = layout, device, pin
        self._flats: list[Tensor | None] = [None] * len(layout.flats)
        self._squares: dict[int, Tensor] = {}

    def put(self, unit: int, flats: Sequence[Tensor]) -> Ready:
        """Let the gradients of one unit's trainable flats go."""
        layout = self._layout
        mine = [i for i in layout.units[unit].flats if layout.flats[i].trainable]
        full: list[Tensor | None] = [None] * len(layout.flats)
        for i, x in zip(mine, flats, strict=True):
            full[i] = x
        self._squares.update(Sharded(layout, full).partial_sums(square_sum))
        stream = _stream(self._device, "down")
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        for i, x in zip(mine, flats, strict=True):
            self._flats[i] = self._lowered(x, stream)
        return Ready([])

    def _lowered(self, x: Tensor, stream: Any) -> Tensor:
        if stream is None:
            return x.to("cpu")
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            return host_empty(x, self._pin).copy_(x, non_blocking=True)

    def node(self) -> Hosted:
        """The gradients, all of them in host memory; zero where none came."""
        stream = _stream(self._device, "down")
        if stream is not None:
            stream.synchronize()
        rank = rank_in(self._layout)
        for i, spec in enumerate(self._layout.flats):
            if spec.trainable and self._flats[i] is None:
                low, high = spec.bounds(rank)
                self._flats[i] = torch.zeros(high - low, dtype=spec.dtype)
        node = Sharded(self._layout, self._flats)
        return Hosted(node, self._device, self._pin, self._squares)


_STREAMS: dict[tuple[torch.device, str], Any] = {}


def _stream(device: torch.device, name: str) -> Any:
    """A stream for copies in one direction; None where there are no streams."""
    if device.type != "cuda":
        return None
    if (device, name) not in _STREAMS:
        _STREAMS[device, name] = torch.cuda.Stream(device)
    return _STREAMS[device, name]
