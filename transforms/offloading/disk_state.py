"""A placed state on disk: its trees, and which of their slots are the newest complete state.

``index.json`` is the commit record. It is written after the data have reached the device: first to
a file beside the old record, which then takes its place. So a process that is killed at any instant
leaves one complete record, of slots that nothing has overwritten. The record names the two newest
generations, because ranks that are killed at the same time may be one step apart.
"""

from __future__ import annotations

import base64
import json
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
from zfunc.layout.sharded import Sharded
from zfunc.transforms.offloading.blocks import FileRegion, finished
from zfunc.transforms.offloading.disk import Disk
from zfunc.transforms.offloading.tree_storage import TreeStorage, sections

__all__ = ["DiskState", "Generation", "description_of", "read_index", "unpacked"]

VERSION = 1
PLAIN_BYTES = 1 << 20  # of leaves in memory that the index keeps, so that it is a complete state


@dataclass(frozen=True)
class Generation:
    """One complete state: the slot of each tree with the checksums in it, and its plain leaves.

    ``plain`` maps the path of a leaf that is in memory to its dtype, shape and bytes.
    """

    number: int
    slots: dict[str, int]
    sums: dict[str, list[list[int] | None]]
    plain: dict[str, tuple[str, list[int], str]] = field(default_factory=dict)


class DiskState:
    """The trees of one placed state.

    Args:
        disk: where.
        skeletons: the trees without data, by their path in the state.
        folder: an existing folder to be opened again; a new one if left out.

    Raises:
        PlacementError: there is no room.
    """

    def __init__(
        self, disk: Disk, skeletons: Mapping[str, Sharded], folder: str | None = None
    ) -> None:
        self.disk = disk
        self.folder = folder or disk.fresh()
        self.trees: dict[str, TreeStorage] = {}
        self.newest: list[Generation] = []
        self.full: set[str] = set()
        self._begun: weakref.ref[DiskState] | None = None
        disk.alive.add(self)
        self.dropped = weakref.finalize(self, disk.dead.append, self.folder)
        self.dropped.atexit = False
        sizes = self._lay_out(skeletons)
        if folder is None:
            try:
                for name, nbytes in sizes.items():
                    disk.files.reserve(name, nbytes)
            except BaseException:
                disk.alive.discard(self)
                self.dropped()
                disk.sweep()
                raise
        disk.size_ring([made.nbytes for made in tree.sections] for tree in self.trees.values())

    def _lay_out(self, skeletons: Mapping[str, Sharded]) -> dict[str, int]:
        """Give every unit of every tree two regions; returns the sizes of the files."""
        sizes: dict[str, int] = {}
        kinds: list[Any] = []
        folders = len(self.disk.folders)
        for path, skeleton in skeletons.items():
            names = tuple(unit.name for unit in skeleton.layout.units)
            if names not in kinds:
                kinds.append(names)
            kind = kinds.index(names)
            slots: list[list[FileRegion]] = [[], []]
            for k, section in enumerate(sections(skeleton)):
                label = re.sub(r"[^\w.\[\]-]", "_", names[k])[:60]
                name = f"{self.folder}/{kind}-{k:05d}-{label}.bin"
                for regions in slots:
                    region = FileRegion(name, sizes.get(name, 0), section.nbytes)
                    regions.append(region)
                    sizes[name] = region.offset + region.span(folders)
            rank = skeleton.group.rank
            self.trees[path] = TreeStorage(self.disk, path, skeleton, rank, slots)
        return sizes

    def refilling(self, name: str) -> DiskState:
        """A state with the same trees, to be filled: the one begun, if it lacks ``name``."""
        begun = self._begun() if self._begun is not None else None
        if begun is None or name in begun.full:
            begun = DiskState(self.disk, {n: tree.skeleton for n, tree in self.trees.items()})
            for path, tree in self.trees.items():
                begun.trees[path].device = tree.device
            self._begun = weakref.ref(begun)
        return begun

    def filled(self, name: str) -> None:
        """A tree is complete; with the last of them there is a state to commit."""
        self.full.add(name)
        if self.full == set(self.trees):
            self.commit(dict.fromkeys(self.trees, 0), {})

    def resume(self, record: Mapping[str, Any]) -> None:
        """Take a generation from an index as the newest one."""
        made = Generation(record["number"], record["slots"], record["sums"], record["plain"])
        self.newest = [made]
        for name, slot in made.slots.items():
            self.trees[name].sums[slot] = list(made.sums[name])

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
            self.trees[name].begin(slot)

    def commit(self, slots: Mapping[str, int], plain: Mapping[str, Tensor]) -> int:
        """Make what is in ``slots`` the newest state; returns its number.

        Raises:
            PlacementError: the device is full, or refuses.
        """
        futures = []
        for name in sorted({r.name for tree in self.trees.values() for r in tree.regions[0]}):
            futures.append(self.disk.submit(self.disk.files.sync, name))
        for future in futures:
            finished(future)
        last = self.newest[-1].number if self.newest else 0
        sums = {name: self.trees[name].sums[slot] for name, slot in slots.items()}
        made = Generation(last + 1, dict(slots), sums, _packed(plain))
        self.newest = [*self.newest[-1:], made]
        self._write_index()
        return made.number

    def _write_index(self) -> None:
        record = {
            "version": VERSION,
            "columns": {name: description_of(tree) for name, tree in self.trees.items()},
            "generations": [asdict(generation) for generation in self.newest],
        }
        body = json.dumps(record, separators=(",", ":")).encode()
        head = xxhash.xxh3_128_hexdigest(body).encode()
        self.disk.record(self.folder, head + b"\n" + body)


def _holds(generation: Generation, slots: Mapping[str, int]) -> bool:
    return all(generation.slots[name] == slot for name, slot in slots.items())


def description_of(tree: TreeStorage) -> list[list[str]]:
    """What a tree must agree in to be opened again: every leaf, its shape, dtype and ranks."""
    dtypes = tree.dtypes
    return [
        [slot.path, str(list(slot.shape)), str(dtypes[slot.flat]), str(tree.layout.world)]
        for slot in tree.layout.present
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
    """The record at ``path``, ``index.json`` of a state.

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
