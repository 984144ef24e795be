"""Reading safetensors files that others have written, block by block."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files import chunks
from zfunc.files.chunks import DTYPES
from zfunc.files.elements import Elements, copy_blocks, overlaps
from zfunc.files.inventory import TensorLeaf

__all__ = ["INDEX", "SINGLE", "SafetensorsFiles"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
MOST = (1 << 63) - 1  # of elements, as torch counts them
DIMENSIONS = 64
PAGE = 4096  # bytes: of shorter runs a disk reads what lies between them in any case
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _Home:
    """Where a tensor lies in a file."""

    path: Path
    leaf: TensorLeaf
    offset: int


class SafetensorsFiles:
    """The tensors of a safetensors file, or of a folder of them, read block by block.

    Attributes:
        tensors: name -> shape and dtype.

    Raises:
        CheckpointError: there are no such files, or they are damaged.
    """

    def __init__(self, path: PathLike) -> None:
        self._homes: dict[str, _Home] = {}
        for file in _files(Path(path)):
            for name, home in _header(file).items():
                if name in self._homes:
                    raise CheckpointError(
                        f"{name} is in {self._homes[name].path} and in {file}: which one counts?"
                    )
                self._homes[name] = home
        self.tensors = {name: home.leaf for name, home in self._homes.items()}

    def fill(self, name: str, elements: Elements, out: Tensor) -> None:
        """Write these elements to the 1-D tensor ``out``, in its dtype."""
        home = self._homes[name]
        dtype = home.leaf.dtype
        with chunks.reading(home.path) as (fd, _):
            for a, b in chunks.pieces_of(0, len(elements), dtype):
                part, target = elements.part(a, b).simple, out[a:b]
                direct = target.dtype == dtype and target.device.type == "cpu"
                block = target if direct else torch.empty(b - a, dtype=dtype)
                (_read_through if _scattered(part, dtype) else _read_runs)(fd, home, part, block)
                if not direct:
                    target.copy_(block)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        leaf = self.tensors[name]
        out = torch.empty(leaf.shape, dtype=leaf.dtype)
        self.fill(name, Elements(0, out.numel()), out.view(-1))
        return out

    def same(self, a: str, b: str) -> bool:
        """Whether two tensors are the same, bit by bit."""
        first, second = self._homes[a], self._homes[b]
        if first.leaf != second.leaf:
            return False
        for start, stop in chunks.pieces_of(0, first.leaf.numel, first.leaf.dtype):
            x, y = (torch.empty(stop - start, dtype=first.leaf.dtype) for _ in range(2))
            self.fill(a, Elements(start, stop), x)
            self.fill(b, Elements(start, stop), y)
            if chunks.as_bytes(x) != chunks.as_bytes(y):
                return False
        return True


def _scattered(elements: Elements, dtype: torch.dtype) -> bool:
    """Whether they are many short runs."""
    rows = elements.rows
    return rows is not None and rows.width * dtype.itemsize < PAGE * len(rows.runs)


def _read_runs(fd: int, home: _Home, part: Elements, into: Tensor) -> None:
    view: Any = chunks.as_bytes(into)
    at, size = 0, into.itemsize
    for low, high in part.intervals():
        end = at + (high - low) * size
        chunks.read_exactly(fd, view[at:end], home.offset + low * size, home.path)
        at = end


def _read_through(fd: int, home: _Home, part: Elements, into: Tensor) -> None:
    """What lies between runs is read, too, a block at a time."""
    for a, b in chunks.pieces_of(*part.bounds, into.dtype):
        if shared := overlaps(Elements(a, b), part):
            block = torch.empty(b - a, dtype=into.dtype)
            view: Any = chunks.as_bytes(block)
            chunks.read_exactly(fd, view, home.offset + a * into.itemsize, home.path)
            copy_blocks(shared, block, into)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if (path / INDEX).exists():
        return _of_index(path / INDEX)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no *.safetensors file.")
    return files


def _of_index(index: Path) -> list[Path]:
    try:
        document = json.loads(index.read_bytes())
        names = sorted(set(document["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of shards: {error}") from None
    return [index.parent / name for name in names]


def _header(path: Path) -> dict[str, _Home]:
    with chunks.reading(path) as (fd, size):
        length = bytearray(8)
        chunks.read_exactly(fd, length, 0, path)
        n = int.from_bytes(length, "little")
        if n > min(size - 8, LARGEST_HEADER):
            raise CheckpointError(f"{path} is truncated, or no safetensors file.")
        text = bytearray(n)
        chunks.read_exactly(fd, text, 8, path)
    try:
        rows = chunks.strict_json(text.decode())
        rows.pop(chunks.METADATA, None)
        return {chunks.checked_name(k): _home(path, row, 8 + n, size) for k, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no safetensors header: {error!a:.100}") from None


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:  # of an empty tensor, too
        raise ValueError(f"{value!r:.40} is no size")
    return value


def _home(path: Path, row: dict[str, Any], base: int, size: int) -> _Home:
    leaf = TensorLeaf(tuple(map(_size, row["shape"])), DTYPES[row["dtype"]])
    start, stop = map(_size, row["data_offsets"])
    if len(leaf.shape) > DIMENSIONS or math.prod(max(1, n) for n in leaf.shape) > MOST:
        raise ValueError(f"shape {leaf.shape!s:.60}")
    if stop - start != leaf.nbytes:
        raise ValueError(f"shape {leaf.shape} in {stop - start} bytes")
    if base + stop > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, and {base + stop} or more by its header. "
            "Copy it again."
        )
    return _Home(path, leaf, base + start)
