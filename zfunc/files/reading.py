"""Reading parts of leaves out of a checkpoint, every chunk checked by its digest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files import chunks
from zfunc.files.elements import Block, Elements, copy_blocks, overlaps
from zfunc.files.manifest import Manifest, Row

__all__ = ["Reader"]

MOST_OPEN = 64


class Reader:
    """An open checkpoint. Holds one chunk at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._fds: dict[int, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def fill(self, name: str, elements: Elements, out: Tensor) -> None:
        """Write these elements of a leaf to the 1-D tensor ``out``.

        Raises:
            CheckpointError: a chunk that is needed is damaged or missing.
        """
        leaf = self.manifest.leaves[name]
        direct = out.device.type == "cpu" and out.is_contiguous()
        for row in _apart(leaf.chunks):
            blocks = overlaps(row.elements, elements)
            if direct and (target := _all_in_order(blocks, row, out)) is not None:
                self._read(name, row, target)
            elif blocks:
                whole = torch.empty(row.count, dtype=leaf.dtype)
                self._read(name, row, whole)
                copy_blocks(blocks, whole, out)

    def check(self, name: str) -> None:
        """Raise ``CheckpointError`` if a chunk of a leaf is damaged or missing."""
        leaf = self.manifest.leaves[name]
        for row in leaf.chunks:
            self._read(name, row, torch.empty(row.count, dtype=leaf.dtype))

    def _read(self, name: str, row: Row, into: Tensor) -> None:
        view: Any = chunks.as_bytes(into)
        path = self.folder / self.manifest.files[row.file].name
        chunks.read_exactly(self._open(row.file, path), view, row.offset, path)
        if chunks.digest(view) != row.digest:
            where = str(row.elements).replace(":", " to ", 1)
            raise CheckpointError(
                f"{path} is damaged: elements {where} of {name} do not fit their digest"
            )

    def _open(self, file: int, path: Path) -> int:
        if file not in self._fds:
            if len(self._fds) >= MOST_OPEN:
                self.__exit__()
            self._fds[file] = chunks.open_for_reading(path)[0]
        return self._fds[file]


def _apart(rows: Iterable[Row]) -> Iterator[Row]:
    """Chunks, and of those that several ranks have written alike the first."""
    seen: set[Elements] = set()
    for row in rows:
        if row.elements not in seen:
            seen.add(row.elements)
            yield row


def _all_in_order(blocks: Sequence[Block], row: Row, out: Tensor) -> Tensor | None:
    """Where a whole chunk goes, if it lies there in one piece."""
    if len(blocks) != 1 or blocks[0].rows * blocks[0].width != row.count:
        return None
    x = blocks[0]
    return out[x.second :][: row.count] if x.rows == 1 or x.second_step == x.width else None
