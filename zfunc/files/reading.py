"""Reading parts of leaves out of a checkpoint, every chunk checked by its digest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files import chunks
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

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Write elements ``start`` and following of a leaf to the 1-D tensor ``out``.

        Raises:
            CheckpointError: a chunk that is needed is damaged or missing.
        """
        leaf = self.manifest.leaves[name]
        stop = start + out.numel()
        for row in leaf.chunks:
            a, b = max(start, row[1]), min(stop, row[1] + row[2])
            if a >= b:
                continue
            target = out[a - start : b - start]
            if b - a == row[2] and target.device.type == "cpu" and target.is_contiguous():
                self._read(name, row, target)
                continue
            whole = torch.empty(row[2], dtype=leaf.dtype)
            self._read(name, row, whole)
            target.copy_(whole[a - row[1] : b - row[1]])

    def check(self, name: str) -> None:
        """Raise ``CheckpointError`` if a chunk of a leaf is damaged or missing."""
        leaf = self.manifest.leaves[name]
        for row in leaf.chunks:
            self._read(name, row, torch.empty(row[2], dtype=leaf.dtype))

    def _read(self, name: str, row: Row, into: Tensor) -> None:
        file, start, count, offset, expected = row
        view: Any = chunks.as_bytes(into)
        path = self.folder / self.manifest.files[file].name
        chunks.read_exactly(self._open(file, path), view, offset, path)
        if chunks.digest(view) != expected:
            raise CheckpointError(
                f"{path} is damaged: elements {start} to {start + count} of {name} do not fit "
                "their digest"
            )

    def _open(self, file: int, path: Path) -> int:
        if file not in self._fds:
            if len(self._fds) >= MOST_OPEN:
                self.__exit__()
            self._fds[file] = chunks.open_for_reading(path)[0]
        return self._fds[file]
