"""A placed state on disk: its columns, and which slots of them are the newest whole state.

The index is the commit record. It is written after the data are on the device, to a file
beside the old one that then takes its place, so that a process killed at any instant leaves
one index, whole, that names slots which nothing has overwritten. It tells the two newest
generations: ranks killed at the same time may be one step apart.
"""

from __future__ import annotations

import base64
import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.layout.layout import Layout
from zfunc.transforms.offloading.blocks import Region, finished, refused
from zfunc.transforms.offloading.columns import Column, sections
from zfunc.transforms.offloading.store import Store

__all__ = ["Generation", "Placement", "Plan", "read_index", "shape_of", "unpacked"]

VERSION = 1
PLAIN_BYTES = 1 << 20  # of leaves in memory that the index keeps, so that it is a whole state


@dataclass(frozen=True)
class Plan:
    """A column to be: how its tree is cut, and the dtypes of its flats."""

    name: str
    layout: Layout
    rank: int
    dtypes: tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Generation:
    """One whole state: the slot of each column with the checksums in it, and its plain leaves.

    ``plain`` maps the path of a leaf that is in memory to its dtype, shape and bytes.
    """

    number: int
    slots: dict[str, int]
    sums: dict[str, list[list[int] | None]]
    plain: dict[str, tuple[str, list[int], str]] = field(default_factory=dict)


class Placement:
    """The columns of one placed state.

    Args:
        store: where.
        plans: the columns.
        folder: an existing folder to be opened again; a new one if left out.

    Raises:
        PlacementError: there is no room.
    """

    def __init__(self, store: Store, plans: Sequence[Plan], folder: str | None = None) -> None:
        self.store = store
        self.folder = folder or store.fresh()
        self.columns: dict[str, Column] = {}
        self.newest: list[Generation] = []
        self.full: set[str] = set()
        self._begun: weakref.ref[Placement] | None = None
        store.alive.add(self)
        self.dropped = weakref.finalize(self, store.dead.append, self.folder)
        self.dropped.atexit = False
        sizes = self._lay_out(plans)
        if folder is None:
            try:
                for name, nbytes in sizes.items():
                    store.files.reserve(name, nbytes)
            except BaseException:
                store.alive.discard(self)
                self.dropped()
                store.sweep()
                raise
        store.size_ring(
            [section.nbytes for section in column.sections] for column in self.columns.values()
        )

    def _lay_out(self, plans: Sequence[Plan]) -> dict[str, int]:
        """Give every unit of every column two regions; returns the sizes of the files."""
        sizes: dict[str, int] = {}
        kinds: list[Any] = []
        folders = len(self.store.folders)
        for plan in plans:
            names = tuple(unit.name for unit in plan.layout.units)
            if names not in kinds:
                kinds.append(names)
            kind = kinds.index(names)
            slots: list[list[Region]] = [[], []]
            for k, section in enumerate(sections(plan.layout, plan.rank, plan.dtypes)):
                label = re.sub(r"[^\w.\[\]-]", "_", names[k])[:60]
                name = f"{self.folder}/{kind}-{k:05d}-{label}.bin"
                for regions in slots:
                    region = Region(name, sizes.get(name, 0), section.nbytes)
                    regions.append(region)
                    sizes[name] = region.offset + region.span(folders)
            column = Column(self.store, plan.name, plan.layout, plan.rank, plan.dtypes, slots)
            self.columns[plan.name] = column
        return sizes

    def refilling(self, name: str) -> Placement:
        """A placement with the same columns, to be filled: the one begun, if it lacks ``name``."""
        begun = self._begun() if self._begun is not None else None
        if begun is None or name in begun.full:
            plans = [Plan(c.name, c.layout, c.rank, c.dtypes) for c in self.columns.values()]
            begun = Placement(self.store, plans)
            for column in self.columns.values():
                begun.columns[column.name].device = column.device
            self._begun = weakref.ref(begun)
        return begun

    def filled(self, name: str) -> None:
        """A column is complete; with the last of them there is a state to commit."""
        self.full.add(name)
        if self.full == set(self.columns):
            self.commit(dict.fromkeys(self.columns, 0), {})

    def resume(self, record: Mapping[str, Any]) -> None:
        """Take a generation from an index as the newest one."""
        made = Generation(record["number"], record["slots"], record["sums"], record["plain"])
        self.newest = [made]
        for name, slot in made.slots.items():
            self.columns[name].sums[slot] = list(made.sums[name])

    def begin(self, old: Mapping[str, int], new: Mapping[str, int]) -> None:
        """Make sure that ``old`` is committed, and spend what is in the slots of ``new``."""
        known = next((g for g in reversed(self.newest) if _holds(g, old)), None)
        if known is None:
            self.commit({**self.newest[-1].slots, **old}, {})
        elif known is not self.newest[-1]:
            self.newest = [known]
            self._write_index()
        self.newest = self.newest[-1:]  # of the one before, slots are about to be overwritten
        for name, slot in new.items():
            self.columns[name].begin(slot)

    def commit(
        self,
        slots: Mapping[str, int],
        plain: Mapping[str, Tensor],
    ) -> int:
        """Make what is in ``slots`` the newest state; returns its number.

        Raises:
            PlacementError: the device is full, or refuses.
        """
        futures = []
        for name in sorted({r.name for c in self.columns.values() for r in c.regions[0]}):
            futures.append(self.store.submit(self.store.files.sync, name))
        for future in futures:
            finished(future)
        last = self.newest[-1].number if self.newest else 0
        sums = {name: self.columns[name].sums[slot] for name, slot in slots.items()}
        made = Generation(last + 1, dict(slots), sums, _packed(plain))
        self.newest = [*self.newest[-1:], made]
        self._write_index()
        return made.number

    def _write_index(self) -> None:
        names = [column.name for column in self.columns.values()]
        record = {
            "version": VERSION,
            "columns": {name: shape_of(self.columns[name]) for name in names},
            "generations": [asdict(generation) for generation in self.newest],
        }
        body = json.dumps(record, separators=(",", ":")).encode()
        folder = self.store.folders[0] / self.folder
        path, fresh = folder / "index.json", folder / "index.json.new"
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body)
                file.flush()
                os.fsync(fd)
            os.replace(fresh, path)
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise refused(path, "write", len(body), error) from error


def _holds(generation: Generation, slots: Mapping[str, int]) -> bool:
    return all(generation.slots[name] == slot for name, slot in slots.items())


def shape_of(column: Column) -> list[list[str]]:
    """What a column must agree in to be opened again: every leaf and dtype, where it lies."""
    dtypes = column.dtypes
    return [
        [slot.path, str(list(slot.shape)), str(dtypes[slot.flat]), str(column.layout.world)]
        for slot in column.layout.present
    ]


def _packed(plain: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], str]]:
    out, left = {}, PLAIN_BYTES
    for path, x in plain.items():
        left -= x.nbytes
        if left >= 0:
            flat = x.detach().cpu().contiguous().reshape(-1)
            data = bytes(flat.view(torch.uint8).numpy()) if x.numel() else b""
            out[path] = (str(x.dtype), list(x.shape), base64.b64encode(data).decode())
    return out


def unpacked(dtype: str, shape: Sequence[int], data: str) -> Tensor:
    """A leaf that an index kept."""
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    raw = base64.b64decode(data)
    if not raw:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(tuple(shape)).clone()


def read_index(path: Path) -> dict[str, Any]:
    """The record at ``path``, ``index.json`` of a placement.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if head != xxhash.xxh3_128_hexdigest(body).encode():
        raise CheckpointError(
            f"{path} is damaged (its checksum is wrong). Restore a checkpoint instead."
        )
    record: dict[str, Any] = json.loads(body)
    if record["version"] != VERSION:
        raise CheckpointError(
            f"{path} has version {record['version']}, this zfunc reads {VERSION}. Open it with "
            "the version that wrote it."
        )
    return record
