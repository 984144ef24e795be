"""``Stored``: a tree on disk, and how gradients get there while backward is still running."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.copies import Upload
from zfunc.engine.hooks import Ready
from zfunc.errors import DonatedStateError, PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.layout.streaming import spans_of_flat
from zfunc.transforms.offloading.columns import Column, Reading, for_gradients, section
from zfunc.transforms.offloading.store import Store
from zfunc.transforms.offloading.streamed import Streamed, rank_in, registered
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed, Span, gone, spent
from zfunc.trees.squares import square_sum
from zfunc.trees.tree import dotted

__all__ = ["Lease", "Spill", "Stored", "plain_leaves", "state_nodes", "stored_nodes"]


class Stored(Streamed):
    """One generation of a column: this rank's part of a tree, on disk.

    Args:
        column: where.
        slot: in which of its slots.
        home: what keeps the files (a placement, or a lease of gradients).
    """

    reads = True

    def __init__(self, column: Column, slot: int, home: Any) -> None:
        self.column, self.slot, self.home = column, slot, home
        self._tokens = column.tokens[slot]
        self.skeleton = Sharded(column.layout, _hollow(column))

    def held(self) -> Sequence[Tensor | None]:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(
            n * dtype.itemsize for part in self.column.sections for _, dtype, n, _ in part.flats
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.column.device

    @staticmethod
    def seal(state: Any) -> None:
        """Commit a state that was written leaf by leaf."""
        nodes = stored_nodes(state).values()
        for home in {id(node.home): node.home for node in nodes}.values():
            for column in home.columns.values():
                column.seal(0)
            home.commit(dict.fromkeys(home.columns, 0), plain_leaves(state))

    def fetch(self, unit: int, must: bool = True) -> Any:
        reading = self.begin_read(unit, must)
        if self.device.type == "cpu":
            return reading
        lifting = self.column.lifting
        while lifting and ((first := lifting[0]()) is None or first.lift()):
            lifting.popleft()  # what has been read meanwhile goes up
        if reading is None:
            return None
        lifted = Lifted(reading, self.device)
        lifting.append(weakref.ref(lifted))
        return lifted

    def when(self, unit: int) -> int:
        order = self.column.order
        return order.get(unit, len(order))

    def begin_read(self, unit: int, must: bool = True) -> Reading | None:
        """Start to read one unit.

        Raises:
            DonatedStateError: a later generation is in the slot.
        """
        if spent(self._tokens[0]):
            story = self._tokens[0].__dict__.get("_zfunc_story")
            raise DonatedStateError(story or gone(self.column.name))
        return self.column.read(self.slot, unit, must)

    def arrived(self, unit: int, reading: Reading) -> Sharded:
        """The part of a unit that was read."""
        flats: list[Tensor | None] = [None] * len(self.layout.flats)
        for (i, *_), x in zip(self.column.sections[unit].flats, reading.wait(), strict=True):
            flats[i] = x
        return Sharded(self.layout, flats)

    @property
    def squares(self) -> Callable[[], Any] | None:
        """The sums of squares that were taken while the gradients were in memory."""
        column = self.column
        if not isinstance(self.home, Lease) or spent(self._tokens[0]):
            return None
        return lambda: (dict(column.squares), list(column.dtypes))

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> Stored:
        """A new node in a placement of its own, that of the nodes refilled before it.

        The memory of the largest unit is all that it takes: smaller ones are written while the
        next is filled.
        """
        home, name = self.home.refilling(self.column.name), self.column.name
        column: Column = home.columns[name]
        with column.store.thrifty(max((made.nbytes for made in column.sections), default=0)):
            for unit in range(len(column.sections)):
                column.store.behind(_refilled(column, unit, fill))
        home.filled(name)
        return Stored(column, 0, home)

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        return self.column.writer(self.slot, index)


def _refilled(column: Column, unit: int, fill: Callable[[Span, Tensor], None]) -> list[Future[Any]]:
    """Fill this rank's part of one unit, and start to write it."""
    made = column.sections[unit]
    buffer = column.store.room(made.nbytes)
    buffer.tensor(0, made.nbytes, torch.uint8).zero_()
    flats: list[Tensor | None] = [None] * len(column.layout.flats)
    for i, dtype, numel, at in made.flats:
        flats[i] = local = buffer.tensor(at, numel, dtype)
        for span, a, b in spans_of_flat(column.layout, i, column.rank):
            fill(span, local[a:b])
    return column.write(0, unit, flats)


def _hollow(column: Column) -> list[Tensor | None]:
    flats: list[Tensor | None] = [None] * len(column.layout.flats)
    for part in column.sections:
        for i, dtype, numel, _ in part.flats:
            flats[i] = torch.empty(numel, dtype=dtype, device="meta")
    return flats


registered(Stored)


class Lifted:
    """One unit on its way from the disk to a device; a ``Pending``."""

    def __init__(self, reading: Reading, device: torch.device) -> None:
        self._reading, self._device = reading, device
        self._pin = reading.column.store.ring.locked
        self._upload: Upload | None = None

    def lift(self, must: bool = False) -> bool:
        """Begin to copy what has been read; whether it was."""
        if self._upload is None and (must or self._reading.done):
            self._upload = Upload(self._reading.wait(), self._device, self._pin)
            del self._reading
        return self._upload is not None

    def wait(self) -> list[Tensor]:
        self.lift(must=True)
        assert self._upload is not None
        return self._upload.wait()

    def advance(self) -> None:
        """There is one round only."""


class Lease:
    """Keeps a column of gradients from being given to others."""

    def __init__(self, store: Store, column: Column) -> None:
        weakref.finalize(self, store.idle.append, column).atexit = False


class Spill:
    """The gradients of one pass on their way to the disk.

    Args:
        store: where.
        layout: how they are cut.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store = store
        self._column = for_gradients(store, layout, rank_in(layout))
        self._lease = Lease(store, self._column)
        self._dtypes: list[torch.dtype | None] = list(self._column.dtypes)
        if not all(x.done() for row in self._column.written.values() for x in row):
            store.settle()  # of gradients that nobody wanted
        self._column.begin(0)

    def put(self, unit: int, flats: Sequence[Tensor]) -> Ready:
        """Let the gradients of one unit's trainable flats go; they are written behind."""
        column = self._column
        trainable = [i for i in column.layout.units[unit].flats if column.layout.flats[i].trainable]
        full: list[Tensor | None] = [None] * len(column.layout.flats)
        for i, x in zip(trainable, flats, strict=True):
            full[i] = x
            self._dtypes[i] = x.dtype
        column.dtypes = tuple(self._dtypes)
        column.sections[unit] = made = section(column.layout, unit, column.rank, self._dtypes)
        region = column.regions[0][unit]
        if made.nbytes > column.room[unit]:
            raise PlacementError(
                f"the gradient of unit {column.layout.units[unit].name} takes {made.nbytes} bytes, "
                f"{column.room[unit]} are reserved on disk for it (its parameters' dtype, float32 "
                "at least). Reduce gradients in the dtype of their parameters, or in float32."
            )
        column.regions[0][unit] = replace(region, nbytes=made.nbytes)
        column.squares.update(Sharded(column.layout, full).partial_sums(square_sum))
        column.device = flats[0].device if flats else column.device
        column.order[unit] = len(column.order)
        self._store.behind(column.write(0, unit, full))
        return Ready([])

    def node(self) -> Stored:
        """The gradients, perhaps still on their way; zero where none came."""
        self._store.leaving.end()
        return Stored(self._column, 0, self._lease)


# The trees of a state


def state_nodes(state: Any, kinds: Any = Placed) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure of a state; nodes of ``kinds`` and boxes count as leaves."""
    keys, found, spec = optree.tree_flatten_with_path(
        state,
        is_leaf=lambda x: isinstance(x, Box | kinds),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    return [dotted(*key) for key in keys], found, spec


def stored_nodes(state: Any) -> dict[str, Stored]:
    """The trees of a state that are on disk, by their path."""
    names, found, _ = state_nodes(state, Placed | Lazy)
    return {n: x for n, x in zip(names, found, strict=True) if isinstance(x, Stored)}


def plain_leaves(state: Any) -> dict[str, Tensor]:
    """The tensors of a state that are neither placed nor parameters of a model."""
    names, found, _ = state_nodes(state)
    return {
        name: x
        for name, x in zip(names, found, strict=True)
        if isinstance(x, Tensor) and not x.is_meta
    }
