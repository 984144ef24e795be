"""``Hosted``: a tree in host memory, of a step that computes on another device.

Units go up for a computation and come down as gradients; the optimizer runs here, on the
host, unit by unit. Copies run on streams of their own, so that the device computes meanwhile: the
optimizer begins with the unit whose gradient came first, while the device is still busy with
backward, and waits for one unit's event at a time. Where host and device are one memory a copy is
a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.copies import Leaving, Upload, descend
from zfunc.buffers.pages import FLIGHTS, wait_for
from zfunc.buffers.ring import HOST
from zfunc.engine import context
from zfunc.engine.hooks import Ready
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.streamed import Streamed, rank_in, same_node
from zfunc.trees.nodes import Span, register
from zfunc.trees.squares import square_sum

__all__ = ["HostSpill", "Hosted", "Landing", "Settled", "host_tensors", "in_host_memory"]


def host_tensors(flats: Sequence[Tensor | None], pin: bool) -> list[Tensor | None]:
    """Host memory for tensors, in one piece of whole pages, locked if a GPU is to use it.

    Raises:
        PlacementError: so much memory cannot be page-locked.
    """
    there = [(x.numel(), x.dtype) for x in flats if x is not None]
    made = iter(HOST.tensors(there, locked=pin))
    return [None if x is None else next(made) for x in flats]


def in_host_memory(node: Sharded, device: torch.device, pin: bool, empty: bool = False) -> Hosted:
    """A copy of a tree in host memory; zeros if it is to be ``empty``."""
    flats = host_tensors(node.flats, pin and device.type == "cuda")
    for mine, x in zip(flats, node.flats, strict=True):
        if mine is not None and x is not None:
            mine.zero_() if empty else mine.copy_(x)
    return Hosted(Sharded(node.layout, flats), device, pin)


@dataclass
class Landing:
    """Gradients on their way to the host.

    Attributes:
        layout: how they are cut.
        events: what the host has to wait for before it reads a unit; gone when it has.
        order: as the how manieth each unit came.
    """

    layout: Layout
    events: dict[int, Any] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)

    def wait(self, unit: int) -> None:
        """Wait for one unit."""
        if (event := self.events.pop(unit, None)) is not None:
            wait_for(event, self.layout.units[unit].name)


def _hollow(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")  # its memory is not looked at


class Hosted(Streamed):
    """This rank's part of a tree, in host memory.

    Args:
        node: the flats, on the CPU.
        device: where its units are used.
        pin: whether its memory is page-locked.
        squares: of gradients, the leaves' sums of squares.
        landing: of gradients, what to wait for.
    """

    def __init__(
        self,
        node: Sharded,
        device: torch.device,
        pin: bool = True,
        squares: dict[int, Tensor] | None = None,
        landing: Landing | None = None,
    ) -> None:
        self._node, self.device, self.pin, self._squares = node, device, pin, squares
        self.landing = landing
        self._held = tuple(node.flats)
        if landing is not None:  # nobody may reach past it: these are empty
            self._held = tuple(x if x is None else x[:0] for x in node.flats)
        self.skeleton = Sharded(node.layout, [x if x is None else _hollow(x) for x in node.flats])

    def held(self) -> Sequence[Tensor | None]:
        return self._held

    def when(self, unit: int) -> int:
        order = {} if self.landing is None else self.landing.order
        return order.get(unit, len(order))

    @property
    def squares(self) -> Callable[[], Any] | None:
        if self._squares is None:
            return None
        found = self._squares
        dtypes = [None if x is None else x.dtype for x in self._node.flats]
        return lambda: (dict(found), dtypes)

    @property
    def locked(self) -> bool:
        """Whether its memory is page-locked."""
        return self.pin and self.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(x.nbytes for x in self._node.flats if x is not None)

    def part(self, unit: int) -> Sharded:
        """One unit, where it is, when it is there; the optimizer may write into it."""
        if self.landing is not None:
            self.landing.wait(unit)
        mine = self.layout.units[unit].flats
        flats = [x if i in mine else None for i, x in enumerate(self._node.flats)]
        running = context.current()
        if running is not None and running.donation is not None:
            for x in flats:
                if x is not None and x.numel():  # an upload in vain may still read it
                    FLIGHTS.settle(x, self.layout.units[unit].name)
        return Sharded(self.layout, flats)

    def fetch(self, unit: int, must: bool = True) -> Upload:
        if self.landing is not None:
            self.landing.wait(unit)
        flats = [self._node.flats[i] for i in self.layout.units[unit].flats]
        return Upload([x for x in flats if x is not None], self.device, self.pin)

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        return self._node.writer(index)

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Hosted:
        return in_host_memory(self._node.refilled(fill), self.device, self.pin)


def _rebuilt(static: Any, flats: Sequence[Any]) -> Hosted:
    if isinstance(static, Hosted):
        same_node(static, flats)
        return static
    return Hosted(Sharded(static[0], flats), static[1], static[2])


register(
    Hosted,
    lambda node: (
        node.held(),
        (node.layout, node.device, node.pin) if node.landing is None else node,
        tuple(range(len(node.held()))),
    ),
    _rebuilt,
)


class HostSpill:
    """The gradients of one pass on their way to host memory.

    Args:
        layout: how they are cut.
        device: where they come from.
        pin: whether they get page-locked memory.
    """

    def __init__(self, layout: Layout, device: torch.device, pin: bool) -> None:
        self._layout, self._device = layout, device
        self._pin = pin and device.type == "cuda"
        self._flats: list[Tensor | None] = [None] * len(layout.flats)
        self._squares: dict[int, Tensor] = {}
        self._landing = Landing(layout)
        largest = max((layout.unit_nbytes(k) for k in range(len(layout.units))), default=0)
        self._leaving = Leaving(2 * largest)

    def put(self, unit: int, flats: Sequence[Tensor]) -> Ready:
        """Let the gradients of one unit's trainable flats go."""
        layout = self._layout
        mine = [i for i in layout.units[unit].flats if layout.flats[i].trainable]
        full: list[Tensor | None] = [None] * len(layout.flats)
        for i, x in zip(mine, flats, strict=True):
            full[i] = x
        self._squares.update(Sharded(layout, full).partial_sums(square_sum))
        into = [x for x in host_tensors(flats, self._pin) if x is not None]
        event = descend(flats, into, pin=self._pin)
        self._leaving.add(event, flats)
        self._landing.order[unit] = len(self._landing.order)
        if event is not None:
            self._landing.events[unit] = event
        for i, x in zip(mine, into, strict=True):
            self._flats[i] = x
        return Ready([])

    def node(self) -> Hosted:
        """The gradients, perhaps still on their way; zero where none came."""
        self._leaving.end()
        rank = rank_in(self._layout)
        for i, spec in enumerate(self._layout.flats):
            if spec.trainable and self._flats[i] is None:
                low, high = spec.bounds(rank)
                self._flats[i] = torch.zeros(high - low, dtype=spec.dtype)
        node = Sharded(self._layout, self._flats)
        return Hosted(node, self._device, self._pin, self._squares, self._landing)


class Settled:
    """Takes the parts of the tree that follows a ``Hosted`` one, each written once.

    What an optimizer updates in memory of its own is given that memory here (see
    :func:`zfunc.trees.memory.reuse`), where the new tree is to be: page-locked, in one piece. What
    comes from elsewhere is copied there, and what stays in the old tree's memory stays.

    Args:
        was: the tree before.
        stays: the addresses of the tensors of the state that was given.
        offers: gets the new memory for each address of the old tree; None if that is donated.
    """

    def __init__(
        self, was: Hosted, stays: Collection[int], offers: dict[int, Tensor] | None
    ) -> None:
        self._layout, self._device, self._pin = was.layout, was.device, was.pin
        self._stays = stays
        self._locked = was.locked
        self._flats: list[Tensor | None] = list(was.held())
        self._sizes = [None if x is None else (x.numel(), x.dtype) for x in self._flats]
        self._rooms: dict[int, Tensor] | None = None
        self._offers: dict[int, Tensor] = {}
        self._offered: dict[int, int] = {}
        if offers is None:
            return
        self._offers = offers
        for i, room in self._made_rooms().items():
            if (old := self._flats[i]) is not None and old.numel():
                self._offered[i] = old.data_ptr()
                offers[old.data_ptr()] = room

    def _made_rooms(self) -> dict[int, Tensor]:
        """Memory for what a step changes of the tree."""
        if self._rooms is None:
            mine = [i for i, spec in enumerate(self._layout.flats) if spec.trainable]
            sizes = {i: size for i in mine if (size := self._sizes[i]) is not None}
            made = HOST.tensors(list(sizes.values()), locked=self._locked)
            self._rooms = dict(zip(sizes, made, strict=True))
        return self._rooms

    def __call__(self, unit: int, part: Sharded) -> None:
        for i in self._layout.units[unit].flats:
            self._flats[i] = self._taken(i, part.flats[i])

    def _taken(self, flat: int, x: Tensor | None) -> Tensor | None:
        if x is None or not x.numel() or x.data_ptr() in self._stays:
            return x
        room = self._made_rooms().get(flat)
        if room is not None and x.data_ptr() == room.data_ptr():
            return x
        taken = flat in self._offered and self._offered[flat] not in self._offers
        if taken or room is None or self._sizes[flat] != (x.numel(), x.dtype):
            # Another tree's value may lie in the room that was offered.
            room = HOST.tensors([(x.numel(), x.dtype)], locked=self._locked)[0]
        self._offers.pop(self._offered.get(flat, 0), None)
        return room.copy_(x)

    def result(self) -> Hosted:
        """The tree."""
        return Hosted(Sharded(self._layout, self._flats), self._device, self._pin)
