"""Trees on disk, and how gradients get there while backward is still running."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.buffers.copies import Upload
from zfunc.buffers.moves import crossing
from zfunc.engine.unit_info import Ready
from zfunc.errors import DonatedStateError, PlacementError
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.layout.streaming import spans_of_flat
from zfunc.transforms.offloading.deferred import Streamed, registered
from zfunc.transforms.offloading.disk import Disk
from zfunc.transforms.offloading.evaluation import Sums
from zfunc.transforms.offloading.parts import part_of, rank_in, trainable_part
from zfunc.transforms.offloading.tree_storage import PendingRead, TreeStorage, for_gradients
from zfunc.trees.kinds import kind
from zfunc.trees.marks import gone, spent
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed, Span
from zfunc.trees.squares import square_sum
from zfunc.trees.tree import dotted

__all__ = ["DiskGradients", "DiskTree", "plain_leaves", "state_nodes", "trees_on_disk"]


class DiskTree(Streamed):
    """One generation of a tree: this rank's part, on disk.

    Args:
        storage: where.
        slot: in which of its slots.
        home: what keeps the files: a ``DiskState``, or a lease of gradients.
    """

    def __init__(self, storage: TreeStorage, slot: int, home: Any) -> None:
        self.storage, self.slot, self.home = storage, slot, home
        self._tokens = storage.tokens[slot]
        self.skeleton = storage.skeleton

    def held(self) -> Sequence[Tensor | None]:
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(x.nbytes for x in self.skeleton.flats if x is not None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.storage.device

    @staticmethod
    def seal(state: Any) -> None:
        """Commit a state that was written leaf by leaf."""
        nodes = trees_on_disk(state).values()
        for home in {id(node.home): node.home for node in nodes}.values():
            for storage in home.trees.values():
                storage.seal(0)
            home.commit(dict.fromkeys(home.trees, 0), plain_leaves(state))

    def fetch(self, unit: int, must: bool = True) -> Any:
        reading = self._read(unit, must)
        if kind(self.device) == "cpu":
            return reading
        lifting = self.storage.lifting
        while lifting and ((first := lifting[0]()) is None or first.lift()):
            lifting.popleft()  # what has been read meanwhile goes up
        if reading is None:
            return None
        lifted = PendingUpload(reading, self.device)
        lifting.append(weakref.ref(lifted))
        return lifted

    def when(self, unit: int) -> int:
        order = self.storage.order
        return order.get(unit, len(order))

    def begin(self, unit: int, must: bool) -> Callable[[], Sharded] | None:
        reading = self._read(unit, must)
        if reading is None:
            return None
        rows = self.storage.sections[unit].flats

        def arrived() -> Sharded:
            flats = zip((i for i, *_ in rows), reading.wait(), strict=True)
            return part_of(self.layout, dict(flats))

        return arrived

    def _read(self, unit: int, must: bool) -> PendingRead | None:
        """Start to read one unit.

        Raises:
            DonatedStateError: a later generation is in the slot.
        """
        if spent(self._tokens[0]):
            story = self._tokens[0].__dict__.get("_zfunc_story")
            raise DonatedStateError(story or gone(self.storage.name))
        return self.storage.read(self.slot, unit, must)

    def known_sums(self, f: Callable[[Tensor], Tensor]) -> Sums | None:
        """The sums of squares that were taken while the gradients were in memory."""
        storage = self.storage
        if f is not square_sum or not isinstance(self.home, _Lease) or spent(self._tokens[0]):
            return None
        return dict(storage.squares), storage.dtypes

    def refilled(self, fill: Callable[[Span, Tensor], None]) -> DiskTree:
        """A new node in a state of its own, that of the nodes refilled before it.

        It takes the memory of the largest unit and no more: smaller ones are written while the
        next is filled.
        """
        home, name = self.home.refilling(self.storage.name), self.storage.name
        storage: TreeStorage = home.trees[name]
        with storage.disk.thrifty(max((made.nbytes for made in storage.sections), default=0)):
            for unit in range(len(storage.sections)):
                storage.disk.behind(_refilled(storage, unit, fill))
        home.filled(name)
        return DiskTree(storage, 0, home)

    def writer(self, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        return self.storage.writer(self.slot, index)


def _refilled(
    storage: TreeStorage, unit: int, fill: Callable[[Span, Tensor], None]
) -> list[Future[Any]]:
    """Fill this rank's part of one unit, and start to write it."""
    made = storage.sections[unit]
    buffer = storage.disk.room(made.nbytes)
    buffer.tensor(0, made.nbytes, torch.uint8).zero_()
    flats: dict[int, Tensor | None] = {}
    for i, dtype, numel, at in made.flats:
        flats[i] = local = buffer.tensor(at, numel, dtype)
        for span, a, b in spans_of_flat(storage.layout, i, storage.rank):
            fill(span, local[a:b])
    return storage.write(0, unit, part_of(storage.layout, flats).flats)


registered(DiskTree)


class PendingUpload:
    """One unit on its way from the disk to a device; a ``Pending``."""

    def __init__(self, reading: PendingRead, device: torch.device) -> None:
        self._reading, self._device = reading, device
        self._pin = reading.storage.disk.ring.locked
        self._upload: Upload | None = None

    def lift(self, must: bool = False) -> bool:
        """Begin to copy what has been read; whether it was."""
        if self._upload is None and (must or self._reading.done):
            told = crossing()
            with nullcontext() if told is None else told.behind():
                self._upload = Upload(self._reading.wait(), self._device, self._pin)
            del self._reading
        return self._upload is not None

    def wait(self) -> list[Tensor]:
        self.lift(must=True)
        assert self._upload is not None
        return self._upload.wait()

    def advance(self) -> None:
        """There is one round only."""


class _Lease:
    """Keeps storage of gradients from being given to others."""

    def __init__(self, storage: TreeStorage) -> None:
        weakref.finalize(self, storage.disk.idle.append, storage).atexit = False


class DiskGradients:
    """The gradients of one pass on their way to the disk.

    Args:
        disk: where.
        layout: how they are sharded.
    """

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._storage = for_gradients(disk, layout, rank_in(layout))
        self._lease = _Lease(self._storage)
        if not all(x.done() for row in self._storage.written.values() for x in row):
            disk.settle()  # of gradients that nobody wanted
        self._storage.begin(0)

    def begin(self) -> None:
        """Forward is done."""

    def put(self, unit: int, flats: Sequence[Tensor]) -> Ready:
        """Write the gradients of one unit's trainable flats, in the background."""
        storage = self._storage
        part = trainable_part(storage.layout, unit, flats)
        storage.retype(unit, part)
        made, region = storage.sections[unit], storage.regions[0][unit]
        if made.nbytes > storage.room[unit]:
            raise PlacementError(
                f"the gradient of unit {storage.layout.units[unit].name} takes {made.nbytes} "
                f"bytes, {storage.room[unit]} are reserved on disk for it (its parameters' dtype, "
                "float32 at least). Reduce gradients in the dtype of their parameters, or in "
                "float32."
            )
        storage.regions[0][unit] = replace(region, nbytes=made.nbytes)
        storage.squares.update(part.partial_sums(square_sum))
        storage.device = flats[0].device if flats else storage.device
        storage.order[unit] = len(storage.order)
        self._disk.behind(storage.write(0, unit, part.flats))
        return Ready([])

    def node(self) -> DiskTree:
        """The gradients, perhaps still on their way; zero where none came."""
        self._disk.leaving.end()
        return DiskTree(self._storage, 0, self._lease)


# The trees of a state


def state_nodes(state: Any, *kinds: type) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure of a state; nodes of ``kinds`` count as leaves.

    Placed nodes and boxes do if none are named.
    """
    keys, found, spec = optree.tree_flatten_with_path(
        state,
        is_leaf=lambda x: isinstance(x, kinds or (Placed, Box)),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
    return [dotted(*key) for key in keys], found, spec


def trees_on_disk(state: Any) -> dict[str, DiskTree]:
    """The trees of a state that are on disk, by their path."""
    names, found, _ = state_nodes(state, Placed, Box, Lazy)
    return {n: x for n, x in zip(names, found, strict=True) if isinstance(x, DiskTree)}


def plain_leaves(state: Any) -> dict[str, Tensor]:
    """The tensors of a state that are neither placed nor parameters of a model."""
    names, found, _ = state_nodes(state)
    return {
        name: x
        for name, x in zip(names, found, strict=True)
        if isinstance(x, Tensor) and not x.is_meta
    }
