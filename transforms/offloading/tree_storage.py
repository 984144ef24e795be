"""Where one tree lies on disk: unit by unit, in one slot or in two.

A new generation of a tree is written into the slot that does not hold the old one. So the old one
stays complete until the new one is complete. Each slot has *tokens*: an empty tensor for each flat,
which every node of the generation in that slot holds. Whoever writes into a slot spends its tokens,
and with them all nodes of the generation that was there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.copies import descend
from zfunc.buffers.pages import wait_for
from zfunc.buffers.ring import Buffer
from zfunc.errors import CheckpointError
from zfunc.layout.layout import Layout
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.blocks import FileRegion, aligned, finished
from zfunc.transforms.offloading.disk import Disk
from zfunc.transforms.offloading.parts import outline
from zfunc.trees.memory import blank

__all__ = ["PendingRead", "Section", "TreeStorage", "for_gradients", "sections"]


@dataclass(frozen=True)
class Section:
    """How the flats of one unit lie in a region: ``(flat, dtype, numel, first byte)`` each."""

    flats: tuple[tuple[int, torch.dtype, int, int], ...]

    @property
    def nbytes(self) -> int:
        return aligned(max((at + n * dtype.itemsize for _, dtype, n, at in self.flats), default=0))


def _section(skeleton: Sharded, unit: int) -> Section:
    rows, at = [], 0
    for i in skeleton.layout.units[unit].flats:
        if (x := skeleton.flats[i]) is not None:
            rows.append((i, x.dtype, x.numel(), at))
            at += -(-x.nbytes // 64) * 64
    return Section(tuple(rows))


def sections(skeleton: Sharded) -> list[Section]:
    """One section for each unit of a tree; flats that the skeleton lacks have no values."""
    return [_section(skeleton, k) for k in range(len(skeleton.layout.units))]


class TreeStorage:
    """One tree on disk; a *column* in the words of the index.

    Attributes:
        disk: what does the reading and writing.
        name: path of the tree in the state.
        skeleton: the tree without data, on ``meta``.
        layout, rank: how it is sharded, and whose part this is.
        sections: what lies where in a unit's region; one for each unit.
        regions: for each slot the units' regions.
        room: bytes that are reserved for each unit.
        sums: for each slot and unit the checksums of its blocks; None: nothing written.
        tokens: for each slot those of the generation in it.
        squares: for the gradients in a slot, the sum of squares of each leaf's part.
        order: for gradients, when each unit arrived, counted from 0.
        written: by slot and unit, the writes that were begun last.
        lifting: references to units that are read, and then go up to the device.
        device: where its units are used.
    """

    def __init__(
        self,
        disk: Disk,
        name: str,
        skeleton: Sharded,
        rank: int,
        regions: list[list[FileRegion]],
    ) -> None:
        self.disk, self.name, self.skeleton, self.rank = disk, name, skeleton, rank
        self.layout = layout = skeleton.layout
        self.sections = sections(skeleton)
        self.regions = regions
        self.room = [region.nbytes for region in regions[0]]
        self.sums: list[list[list[int] | None]] = [[None] * len(layout.units) for _ in regions]
        self.tokens = [self._fresh() for _ in regions]
        self.squares: dict[int, Tensor] = {}
        self.order: dict[int, int] = {}
        self.written: dict[tuple[int, int], list[Future[Any]]] = {}
        self.lifting: deque[Any] = deque()
        self.device = torch.device("cpu")

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """Of each flat, if it has values."""
        return [None if x is None else x.dtype for x in self.skeleton.flats]

    def retype(self, unit: int, part: Sharded) -> None:
        """From now on the unit has the dtypes of this part."""
        flats = list(self.skeleton.flats)
        for i in self.layout.units[unit].flats:
            if (x := part.flats[i]) is not None:
                flats[i] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        self.skeleton = Sharded(self.layout, flats)
        self.sections[unit] = _section(self.skeleton, unit)

    def _fresh(self) -> tuple[Tensor, ...]:
        dtypes = [dtype for dtype in self.dtypes if dtype is not None] or [torch.float32]
        return tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)

    def begin(self, slot: int) -> None:
        """Spend the generation in a slot: it is about to be overwritten."""
        story = (
            f"{self.name} of this state was on disk in {self.disk.folders[0]}, where a later "
            "step has overwritten it: two generations are kept, the state that a step was given "
            "last and the one that it returned. Use the state that the step returned, or keep "
            "what you need of an old one by `zf.full(state)` before the next but one step."
        )
        for token in self.tokens[slot]:
            token.__dict__["_zfunc_story"] = story
            blank(token)
        self.tokens[slot] = self._fresh()
        self.sums[slot] = [None] * len(self.layout.units)
        self.squares, self.order = {}, {}

    def write(self, slot: int, unit: int, flats: Sequence[Tensor | None]) -> list[Future[Any]]:
        """Start to write one unit; ``flats`` are indexed as those of the layout."""
        section, region = self.sections[unit], self.regions[slot][unit]
        if not section.nbytes:
            return []
        values = [flats[i] for i, _, _, _ in section.flats]
        landed, buffer = _no_wait, self._buffer_under(section, values)
        if buffer is None:
            landed, buffer = self._copied(unit, values)
        sums = self.sums[slot][unit] = [0] * region.blocks

        def one(block: int, buffer: Buffer = buffer) -> None:
            landed()
            a, b = region.bounds(block)
            sums[block] = self.disk.files.write(region, block, buffer.view[a:b])

        written = [self.disk.submit(one, block) for block in range(region.blocks)]
        self.written[slot, unit] = written
        return written

    def _buffer_under(self, section: Section, values: Sequence[Tensor | None]) -> Buffer | None:
        """The buffer of which the values are the flats, if they are just where they were read."""
        rows = list(zip(section.flats, values, strict=True))
        if any(x is not None and x.device.type != "cpu" for x in values):
            return None
        starts = (x.data_ptr() - at for (*_, at), x in rows if x is not None and x.numel())
        buffer = self.disk.ring.at(start := next(starts, 0))
        for (_, dtype, numel, at), value in rows:
            if value is None or value.dtype != dtype or value.numel() != numel:
                return None
            if numel and (value.data_ptr() != start + at or not value.is_contiguous()):
                return None
        return buffer

    def _copied(
        self, unit: int, values: Sequence[Tensor | None]
    ) -> tuple[Callable[[], None], Buffer]:
        """A buffer with the values, and a function that waits until they are in it."""
        section = self.sections[unit]
        buffer = self.disk.room(section.nbytes)
        end, flats, into = 0, [], []
        for (_, dtype, numel, at), value in zip(section.flats, values, strict=True):
            assert value is not None
            buffer.view[end:at] = bytes(at - end)
            flats.append(value)
            into.append(buffer.tensor(at, numel, dtype))
            end = at + numel * dtype.itemsize
        buffer.view[end : section.nbytes] = bytes(section.nbytes - end)
        event = descend(flats, into, pin=self.disk.ring.locked)
        self.disk.leaving.add(event, flats)
        return (_no_wait if event is None else _Landed(event, self.layout.units[unit].name)), buffer

    def read(self, slot: int, unit: int, must: bool = True) -> PendingRead | None:
        """Start to read one unit; None if that would be ahead of time and there is no room."""
        section, region = self.sections[unit], self.regions[slot][unit]
        if self.sums[slot][unit] is None or not section.nbytes:
            return PendingRead(self, slot, unit, None, [])
        if must:
            buffer: Buffer | None = self.disk.room(section.nbytes)
        else:
            buffer = self.disk.ring.take(section.nbytes, must=False)
        if buffer is None:
            return None

        before = self.written.get((slot, unit), ())  # submitted earlier, so they do not wait for us

        def one(block: int, buffer: Buffer = buffer) -> int:
            for writing in before:
                finished(writing)
            a, b = region.bounds(block)
            return self.disk.files.read(region, block, buffer.view[a:b])

        futures = [self.disk.submit(one, block) for block in range(region.blocks)]
        return PendingRead(self, slot, unit, buffer, futures)

    def writer(self, slot: int, index: int) -> Callable[[Tensor], None]:
        """A function that takes the full value of leaf ``index`` and writes this rank's piece."""
        spot = self.layout.slots[index]
        assert spot is not None
        unit = self.layout.unit_of_flat[spot.flat]
        region = self.regions[slot][unit]
        base = next(at for i, _, _, at in self.sections[unit].flats if i == spot.flat)

        def write(value: Tensor) -> None:
            for other, a, b, offset in self.layout.segments(spot.flat, self.rank):
                if other.index == index:
                    piece = value.reshape(-1)[offset : offset + b - a].contiguous().cpu()
                    data = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]
                    self.disk.files.patch(region, base + a * value.element_size(), data)

        return write

    def seal(self, slot: int) -> None:
        """Take the checksums of what ``writer`` wrote."""
        for unit, region in enumerate(self.regions[slot]):
            self.disk.files.sync(region.name)
            if not region.nbytes:
                continue
            buffer = self.disk.room(region.nbytes)
            sums = self.sums[slot][unit] = []
            for block in range(region.blocks):
                a, b = region.bounds(block)
                sums.append(self.disk.files.read(region, block, buffer.view[a:b]))

    def damaged(self, slot: int, unit: int, block: int) -> CheckpointError:
        """The error for a block whose checksum is wrong."""
        region = self.regions[slot][unit]
        a, b = region.bounds(block)
        paths = []
        for i, dtype, _, at in self.sections[unit].flats:
            for leaf, low, high, _ in self.layout.segments(i, self.rank):
                if at + low * dtype.itemsize < b and a < at + high * dtype.itemsize:
                    paths.append(leaf.path)
        files = self.disk.files
        file = files.folders[block % len(files.folders)] / region.name
        leaves = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}" if paths else "none"
        return CheckpointError(
            f"{file} is damaged: block {block} of {self.name}, unit "
            f"{self.layout.units[unit].name} (leaves {leaves}) has another checksum than when it "
            "was written. The device or the file was changed: restore a checkpoint, and check "
            "the device."
        )


def for_gradients(disk: Disk, layout: Layout, rank: int) -> TreeStorage:
    """Storage for gradients: one of ``disk.idle`` if there is one that fits, else a new one."""
    for storage in disk.idle:
        if storage.layout == layout:
            disk.idle.remove(storage)
            found: TreeStorage = storage
            return found
    wide: list[torch.dtype | None] = [  # room for gradients reduced in float32
        max(flat.dtype, torch.float32, key=lambda t: t.itemsize) if flat.trainable else None
        for flat in layout.flats
    ]
    skeleton = outline(layout, wide, rank)
    regions = disk.reserve(section.nbytes for section in sections(skeleton))
    return TreeStorage(disk, "gradients", skeleton, rank, [regions])


def _no_wait() -> None:
    """The values are there already."""


class _Landed:
    """Waits, once, for an event that many threads need."""

    def __init__(self, event: Any, name: str) -> None:
        self._event, self._name, self._lock = event, name, Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._event is not None:
                wait_for(self._event, self._name)
                self._event = None


class PendingRead:
    """One unit on its way from the disk; a ``Pending``."""

    def __init__(
        self,
        storage: TreeStorage,
        slot: int,
        unit: int,
        buffer: Buffer | None,
        futures: list[Future[int]],
    ) -> None:
        self.storage, self.slot, self.unit = storage, slot, unit
        self._buffer, self._futures = buffer, futures
        self._sums = storage.sums[slot][unit]
        self._values: list[Tensor] | None = None

    @property
    def done(self) -> bool:
        """Whether all of it has been read."""
        return all(future.done() for future in self._futures)

    def wait(self) -> list[Tensor]:
        """The unit's flats that have values.

        Raises:
            CheckpointError: a block is damaged, or its file is.
        """
        if self._values is None:
            for block, future in enumerate(self._futures):
                assert self._sums is not None
                if finished(future) != self._sums[block]:
                    raise self.storage.damaged(self.slot, self.unit, block)
            self._values = [self._tensor(*row) for row in self.storage.sections[self.unit].flats]
            self._futures, self._buffer = [], None
        return self._values

    def _tensor(self, flat: int, dtype: torch.dtype, numel: int, at: int) -> Tensor:
        if self._buffer is None:
            return torch.zeros(numel, dtype=dtype)  # nothing was written: no gradient came
        return self._buffer.tensor(at, numel, dtype)

    def advance(self) -> None:
        """There is one round only."""
