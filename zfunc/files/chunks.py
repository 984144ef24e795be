"""Chunks of leaves in safetensors files: where they lie, and their digests.

A rank writes one file. It has this rank's share of the elements of every leaf, flattened to 1-D and
divided into chunks, each a tensor of its own. Any safetensors reader opens it. Elements of a chunk
that do not lie one behind the other in the leaf are those that its name tells.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from zfunc.errors import CheckpointError
from zfunc.files.elements import Elements
from zfunc.ranks.digests import as_bytes

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "METADATA",
    "NAMES",
    "Chunk",
    "DataWriter",
    "as_bytes",
    "check_name",
    "checked_name",
    "digest",
    "header_of",
    "lay_out",
    "open_for_reading",
    "pieces_of",
    "read_exactly",
    "reading",
    "strict_json",
    "write_exactly",
]

CHUNK_BYTES = 16 << 20
METADATA = "__metadata__"  # where safetensors have no tensor
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""safetensors' names of the dtypes that it has."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """Elements of a leaf, at byte ``offset`` of a file."""

    leaf: str
    dtype: torch.dtype
    elements: Elements
    offset: int

    @property
    def count(self) -> int:
        return len(self.elements)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def digest(data: Any) -> str:
    """The xxh3-128 of bytes, in hexadecimal: 10 GB/s and more, against accidents, not attacks.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def pieces_of(start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Elements ``start`` to ``stop`` in runs of at most ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // dtype.itemsize)
    for a in range(start, stop, step):
        yield a, min(a + step, stop)


def lay_out(
    shares: Sequence[tuple[str, torch.dtype, Elements]],
) -> tuple[bytes, list[list[Chunk]]]:
    """Where a file holds these elements.

    Args:
        shares: ``(leaf, dtype, elements)`` each.

    Returns:
        The file's header, and the chunks of each share. In the file chunks of wider dtypes come
        first, so that each lies at a multiple of its item size.
    """
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    rows: list[list[tuple[str, Elements]]] = []
    for leaf, dtype, share in shares:
        rows.append([])
        for a, b in pieces_of(0, len(share), dtype):
            elements = share.part(a, b).simple
            name = f"{leaf}[{elements}]"
            while name in entries:
                name += "'"
            entries[name] = (dtype, (b - a,))
            rows[-1].append((name, elements))
    header, offsets = header_of(entries)
    return header, [
        [Chunk(leaf, dtype, elements, offsets[name]) for name, elements in row]
        for (leaf, dtype, _), row in zip(shares, rows, strict=True)
    ]


def checked_name(name: str) -> str:
    """The name of a tensor, if a safetensors file can have it.

    Raises:
        ValueError: it is that of the metadata, or no text (a lone surrogate).
    """
    if name == METADATA:
        raise ValueError(f"{METADATA!r} is what safetensors call their metadata")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name!a} is no text: UTF-8 has no lone surrogates") from None
    return name


def check_name(name: str) -> None:
    """Raise ``CheckpointError`` if a leaf has a name that a safetensors file cannot have."""
    try:
        checked_name(name)
    except ValueError as error:
        raise CheckpointError(f"a leaf cannot be written: {error}. Rename it.") from None


def header_of(
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file with these tensors, and where in the file each begins."""
    described: dict[str, Any] = {METADATA: {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(entries, key=lambda name: -entries[name][0].itemsize):
        dtype, shape = entries[name]
        size = dtype.itemsize * math.prod(shape)
        offsets[name] = end
        described[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + at for name, at in offsets.items()}


class DataWriter:
    """A safetensors file under way: chunks come in any order, and it keeps their digests.

    Attributes:
        table: leaf -> ``(start, count, offset, digest)`` of each chunk written; behind them the
            length and the runs of its rows, if it has some.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path, self.header = path, header
        self.table: dict[str, list[tuple[Any, ...]]] = {}
        self.size = len(header)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_exactly(self._fd, header, 0)
        except BaseException:
            self.close()
            raise

    def put(self, chunk: Chunk, data: memoryview, known: str | None = None) -> None:
        """Write one chunk.

        Args:
            known: the digest of the data, where it was taken before.

        Raises:
            OSError: what the system says: a full disk, no permission.
        """
        write_exactly(self._fd, data, chunk.offset)
        self.size = max(self.size, chunk.offset + chunk.nbytes)
        rows = chunk.elements.rows
        row = (chunk.elements.start, chunk.count, chunk.offset, known or digest(data))
        end = () if rows is None else (rows.length, rows.runs)
        self.table.setdefault(chunk.leaf, []).append((*row, *end))

    def finish(self) -> None:
        """Make the file durable and close it."""
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close it, whether complete or not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_exactly(fd: int, data: Any, offset: int) -> None:
    """``os.pwrite`` until all is written."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def open_for_reading(path: Path) -> tuple[int, int]:
    """A descriptor of a regular file, and its size.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a name that no file has
        raise CheckpointError(f"{str(path)!a}: {error}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is no regular file")
    return fd, found.st_size


@contextmanager
def reading(path: Path) -> Iterator[tuple[int, int]]:
    """The same, closed at the end of the block."""
    fd, size = open_for_reading(path)
    try:
        yield fd, size
    finally:
        os.close(fd)


def read_exactly(fd: int, into: Any, offset: int, path: Path) -> None:
    """Fill a writable buffer from a file.

    Raises:
        CheckpointError: the file is shorter, or the system cannot read it.
    """
    view = memoryview(into)
    try:
        while view:
            done = os.preadv(fd, [view], offset)
            if not done:
                raise CheckpointError(f"{path} ends at byte {offset}, in the middle of its data")
            view, offset = view[done:], offset + done
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def strict_json(text: str | bytes) -> Any:
    """What a JSON document says, if it says it once and in numbers that JSON has.

    Raises:
        ValueError: it is no JSON, has NaN or an infinity, or a name twice in one object.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
