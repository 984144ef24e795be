"""Trees in host memory, of a step that computes on another device.

Units are copied up to the device when it computes with them, and gradients are copied down. The
optimizer runs on the host, unit by unit. Copies run on streams of their own, beside the device's
computation. The optimizer begins with the unit whose gradient arrived first, and waits for one
unit's event at a time: backward still runs on the device. Where host and device share one memory,
a copy is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.copies import Leaving, Upload, descend
from zfunc.buffers.pages import FLIGHTS, wait_for
from zfunc.buffers.ring import HOST
from zfunc.engine import context
from zfunc.engine.unit_info import Ready
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.deferred import InMemory, same_node
from zfunc.transforms.offloading.evaluation import Sums
from zfunc.transforms.offloading.parts import part_of, rank_in, trainable_part
from zfunc.transforms.offloading.present import Present
from zfunc.trees.nodes import Span, register
from zfunc.trees.squares import square_sum

__all__ = ["HostGradients", "HostTree", "HostWriter", "Landing", "copied_to_host"]


def host_tensors(flats: Sequence[Tensor], pin: bool) -> list[Tensor]:
    """Host memory for tensors, in one piece of whole pages, locked if a GPU is to use it.

    Raises:
        PlacementError: so much memory cannot be page-locked.
    """
    return HOST.tensors([(x.numel(), x.dtype) for x in flats], locked=pin)


def copied_to_host(node: Sharded, device: torch.device, pin: bool, empty: bool = False) -> HostTree:
    """A copy of a tree in host memory; zeros if it is to be ``empty``."""
    there = {i: x for i, x in enumerate(node.flats) if x is not None}
    made = host_tensors(list(there.values()), pin and device.type == "cuda")
    for mine, x in zip(made, there.values(), strict=True):
        mine.zero_() if empty else mine.copy_(x)
    return HostTree(part_of(node.layout, dict(zip(there, made, strict=True))), device, pin)


@dataclass
class Landing:
    """Gradients on their way to the host.

    Attributes:
        layout: how they are sharded.
        events: what the host has to wait for before it reads a unit; gone when it has.
        order: when each unit arrived, counted from 0.
        squares: the leaves' sums of squares, taken on the device.
    """

    layout: Layout
    events: dict[int, Any] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)

    def wait(self, unit: int) -> None:
        """Wait for one unit."""
        if (event := self.events.pop(unit, None)) is not None:
            wait_for(event, self.layout.units[unit].name)


class HostTree(InMemory):
    """This rank's part of a tree, in host memory.

    Args:
        node: the flats, on the CPU.
        device: where its units are used.
        pin: whether its memory is page-locked.
        landing: of gradients, what to wait for.
    """

    def __init__(
        self,
        node: Sharded,
        device: torch.device,
        pin: bool = True,
        landing: Landing | None = None,
    ) -> None:
        super().__init__(node)
        self.device, self.pin, self.landing = device, pin, landing
        self._held = tuple(node.flats)
        if landing is not None:  # nobody may reach past it: these are empty
            self._held = tuple(x if x is None else x[:0] for x in node.flats)

    def held(self) -> Sequence[Tensor | None]:
        return self._held

    def when(self, unit: int) -> int:
        order = {} if self.landing is None else self.landing.order
        return order.get(unit, len(order))

    def known_sums(self, f: Callable[[Tensor], Tensor]) -> Sums | None:
        if self.landing is None or f is not square_sum:
            return None
        dtypes = [None if x is None else x.dtype for x in self._node.flats]
        return dict(self.landing.squares), dtypes

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
        running = context.current()
        if running is not None and running.donation is not None:
            for x in self.sources(unit):
                if x is not None and x.numel():  # an upload in vain may still read it
                    FLIGHTS.settle(x, self.layout.units[unit].name)
        return super().part(unit)

    def fetch(self, unit: int, must: bool = True) -> Upload:
        if self.landing is not None:
            self.landing.wait(unit)
        return Upload([x for x in self.sources(unit) if x is not None], self.device, self.pin)

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        return self._node.writer(index)

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> HostTree:
        return copied_to_host(self._node.refilled(fill), self.device, self.pin)


def _rebuilt(static: Any, flats: Sequence[Any]) -> HostTree:
    if isinstance(static, HostTree):
        same_node(static, flats)
        return static
    return HostTree(Sharded(static[0], flats), static[1], static[2])


register(
    HostTree,
    lambda node: (
        node.held(),
        (node.layout, node.device, node.pin) if node.landing is None else node,
        tuple(range(len(node.held()))),
    ),
    _rebuilt,
)


class HostGradients:
    """The gradients of one pass on their way to host memory.

    Args:
        layout: how they are sharded.
        device: where they come from.
        pin: whether they get page-locked memory.
        state: what the step's state holds there.
    """

    def __init__(
        self, layout: Layout, device: torch.device, pin: bool, state: Present | None = None
    ) -> None:
        self._state = state
        self._layout, self._device = layout, device
        self._pin = pin and device.type == "cuda"
        self._flats: list[Tensor | None] = [None] * len(layout.flats)
        self._landing = Landing(layout)
        largest = max((layout.unit_nbytes(k) for k in range(len(layout.units))), default=0)
        self._leaving = Leaving(2 * largest)

    def begin(self) -> None:
        """Forward is done, and has waited for what it used: the copies go beside backward."""
        if self._state is not None:
            self._state.mark(self._device)

    def put(self, unit: int, flats: Sequence[Tensor]) -> Ready:
        """Copy the gradients of one unit's trainable flats, in the background."""
        part, landing = trainable_part(self._layout, unit, flats), self._landing
        landing.squares.update(part.partial_sums(square_sum))
        copies = host_tensors(flats, self._pin)
        event = descend(flats, copies, pin=self._pin)
        self._leaving.add(event, flats)
        landing.order[unit] = len(landing.order)
        if event is not None:
            landing.events[unit] = event
        there = trainable_part(self._layout, unit, copies).flats
        self._flats = [x if y is None else y for x, y in zip(self._flats, there, strict=True)]
        return Ready([])

    def node(self) -> HostTree:
        """The gradients, perhaps still on their way; zero where none came."""
        self._leaving.end()
        rank = rank_in(self._layout)
        for i, spec in enumerate(self._layout.flats):
            if spec.trainable and self._flats[i] is None:
                low, high = spec.bounds(rank)
                self._flats[i] = torch.zeros(high - low, dtype=spec.dtype)
        node = Sharded(self._layout, self._flats)
        return HostTree(node, self._device, self._pin, self._landing)


class HostWriter:
    """Takes the parts of the tree that follows a :class:`HostTree`, and writes each once.

    An optimizer that updates a tensor in new memory is given memory here (see
    :func:`zfunc.trees.memory.reuse`), where the new tree will lie: page-locked, in one piece. What
    comes from elsewhere is copied there. What stays in the old tree's memory is not copied.

    Args:
        was: the tree before.
        stays: the addresses of the tensors of the state that was given.
        offers: gets the new memory for each address of the old tree; None if that is donated.
    """

    def __init__(
        self, was: HostTree, stays: Collection[int], offers: dict[int, Tensor] | None
    ) -> None:
        self._was, self._stays = was, stays
        self._flats: list[Tensor | None] = list(was.held())
        self._sizes = [None if x is None else (x.numel(), x.dtype) for x in self._flats]
        self._offers = {} if offers is None else offers
        self._offered: dict[int, int] = {}
        for i, room in self._rooms.items() if offers is not None else ():
            if (old := self._flats[i]) is not None and old.numel():
                self._offered[i] = old.data_ptr()
                self._offers[old.data_ptr()] = room

    @cached_property
    def _rooms(self) -> dict[int, Tensor]:
        """Memory for what a step changes of the tree."""
        mine = [i for i, spec in enumerate(self._was.layout.flats) if spec.trainable]
        sizes = {i: size for i in mine if (size := self._sizes[i]) is not None}
        made = HOST.tensors(list(sizes.values()), locked=self._was.locked)
        return dict(zip(sizes, made, strict=True))

    def __call__(self, unit: int, part: Sharded) -> None:
        for i in self._was.layout.units[unit].flats:
            self._flats[i] = self._taken(i, part.flats[i])

    def _taken(self, flat: int, x: Tensor | None) -> Tensor | None:
        if x is None or not x.numel() or x.data_ptr() in self._stays:
            return x
        room = self._rooms.get(flat)
        if room is not None and x.data_ptr() == room.data_ptr():
            return x
        taken = flat in self._offered and self._offered[flat] not in self._offers
        if taken or room is None or self._sizes[flat] != (x.numel(), x.dtype):
            # Another tree's value may lie in the room that was offered.
            room = HOST.tensors([(x.numel(), x.dtype)], locked=self._was.locked)[0]
        self._offers.pop(self._offered.get(flat, 0), None)
        return room.copy_(x)

    def result(self) -> HostTree:
        """The new tree."""
        was = self._was
        return HostTree(Sharded(was.layout, self._flats), was.device, was.pin)
