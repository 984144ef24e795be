"""``manifest.json``: everything about a checkpoint but the numbers themselves.

A JSON document that names every leaf by its dotted path, with shape, dtype and chunks
(file, first element, number of elements, byte offset, digest). Its last entry is the
digest of the bytes before it; the first lines have a digest of their own, since they alone
are read to tell which checkpoint of a folder was saved last. Nothing in it is trusted
before it has been checked: a manifest that gets past :func:`parse` describes files that
are tiled by chunks without a gap, and leaves that are.

Where ranks held parts of rows of a leaf (version 2) it has the length of these, and a table of
runs within them: a chunk whose sixth entry names such runs counts the elements in them alone.
Chunks of such a leaf cover it; what several ranks held may be in several of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from zfunc.errors import CheckpointError
from zfunc.files.chunks import DTYPES, NAMES, digest, strict_json
from zfunc.files.elements import Elements, covers
from zfunc.layout.splits import Strided

__all__ = [
    "FORMAT",
    "HEAD_BYTES",
    "VERSION",
    "DataFile",
    "Manifest",
    "NewerVersion",
    "Row",
    "StoredLeaf",
    "parse",
    "row_of",
    "serial_in",
]

FORMAT, VERSION = "zfunc checkpoint", 2
WITHOUT_ROWS = 1  # the version of checkpoints in which no leaf is cut within its rows
MOST = 1 << 62  # of elements, bytes, steps
HEAD = re.compile(rb',\n"head": "([0-9a-f]{32})"')
HEAD_BYTES = 1024  # in which the first lines are
SEAL = re.compile(rb',\n"digest": "([0-9a-f]{32})"}\n')
SEAL_BYTES = len(b',\n"digest": ""}\n') + 32
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
T = TypeVar("T")
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """A chunk: the number of its file, its elements, the byte at which it begins, its digest."""

    file: int
    elements: Elements
    offset: int
    digest: str

    @property
    def count(self) -> int:
        return len(self.elements)


def row_of(
    file: int, start: int, count: int, offset: int, digest: str, length: int = 0, runs: Any = None
) -> Row:
    """A chunk of a file, in rows of ``length`` if there are ``runs``."""
    rows = None if runs is None else Strided(length, tuple((low, high) for low, high in runs))
    return Row(file, Elements(start, start + count, rows), offset, digest)


class NewerVersion(CheckpointError):
    """A checkpoint that a later version of zfunc has written; nothing is wrong with it."""


@dataclass(frozen=True)
class DataFile:
    """One safetensors file: its name, its size, and length and digest of its header."""

    name: str
    size: int
    header: int
    digest: str


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: its chunks are in the order of their first elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Row, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int | None:
        """Of the rows in which its chunks are; ``None`` if they lie one behind the other."""
        for row in self.chunks:
            if row.elements.rows is not None:
                return row.elements.rows.length
        ends = [0, *(row.elements.stop for row in self.chunks)]
        apart = [row.elements.start for row in self.chunks] == ends[:-1]
        return None if apart and ends[-1] == self.numel else self.numel

    def encode(self) -> dict[str, Any]:
        """What the manifest says of it."""
        what: dict[str, Any] = {"dtype": NAMES[self.dtype], "shape": self.shape}
        runs: dict[Runs, int] = {}
        chunks = []
        for row in self.chunks:
            rows = row.elements.rows
            at = () if rows is None else (runs.setdefault(rows.runs, len(runs)),)
            start = row.elements.start
            chunks.append((row.file, start, row.count, row.offset, row.digest, *at))
        if self.length is not None:
            what |= {"row": self.length, "runs": list(runs)}
        return what | {"chunks": chunks}


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says.

    Attributes:
        step: the state's step count.
        world: how many ranks wrote it (of no importance to readers).
        id: a random word, different for each save.
        files, leaves, static: see the module; ``static`` are leaves that are no tensors.
        serial: its number among the saves into its folder, from 1; 0 if nobody has counted.
        extra: each rank's own JSON value, if it was saved with such.
    """

    step: int
    world: int
    id: str
    files: tuple[DataFile, ...]
    leaves: dict[str, StoredLeaf]
    static: dict[str, Any] = field(default_factory=dict)
    serial: int = 0
    extra: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        """The file's bytes."""
        files = [vars(file) for file in self.files]
        leaves = {name: leaf.encode() for name, leaf in self.leaves.items()}
        rows = any("row" in leaf for leaf in leaves.values())
        head = {
            "format": FORMAT,
            "version": VERSION if rows else WITHOUT_ROWS,
            "step": self.step,
            "world": self.world,
            "id": self.id,
            "serial": self.serial,
        }
        first = "{\n" + ",\n".join(_entry(name, value) for name, value in head.items())
        lines = [first, _entry("head", digest(first.encode()))]
        lines.append('"files": [\n' + ",\n".join(map(_dumps, files)) + "\n]")
        lines.append(_block("leaves", leaves))
        lines.append(_block("static", {k: _encoded(v) for k, v in self.static.items()}))
        if self.extra:  # readers that do not know it pass over it
            lines.append('"extra": [\n' + ",\n".join(map(_dumps, self.extra)) + "\n]")
        body = ",\n".join(lines).encode()
        return body + f',\n"digest": "{digest(body)}"}}\n'.encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _entry(name: str, value: Any) -> str:
    return f"{_dumps(name)}: {_dumps(value)}"


def _block(name: str, entries: dict[str, Any]) -> str:
    rows = ",\n".join(_entry(key, value) for key, value in entries.items())
    return f"{_dumps(name)}: {{\n{rows}\n}}"


def _encoded(value: Any) -> Any:
    """JSON has no infinities and no NaN."""
    return {"float": repr(value)} if isinstance(value, float) else value


def _decoded(name: str, value: Any) -> Any:
    if isinstance(value, dict) and list(value) == ["float"] and isinstance(value["float"], str):
        try:
            return float(value["float"])
        except ValueError:
            pass
    elif value is None or type(value) in (bool, int, str):
        return value
    raise ValueError(f"static {name!r} is {value!r:.60}")


def serial_in(first: bytes, whole: Callable[[], bytes]) -> int | None:
    """When a checkpoint was saved, as its manifest's first ``HEAD_BYTES`` tell.

    Returns:
        The serial; 0 if saves were not counted then, ``None`` if the manifest is damaged.
    """
    head = HEAD.search(first)
    if head is None:
        return 0 if _is_sealed(whole()) else None
    if digest(first[: head.start()]) != head[1].decode():
        return None
    try:
        serial = json.loads(first[: head.start()] + b"}")["serial"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return serial if type(serial) is int and 0 <= serial < MOST else None


def _is_sealed(data: bytes) -> bool:
    seal = SEAL.fullmatch(data[-SEAL_BYTES:]) if len(data) > SEAL_BYTES else None
    return seal is not None and digest(data[:-SEAL_BYTES]) == seal[1].decode()


def parse(data: bytes, where: str) -> Manifest:
    """Read and check a manifest.

    Raises:
        NewerVersion: a later version wrote it.
        CheckpointError: it is damaged, or no manifest at all; ``where`` is named.
    """
    seal = SEAL.fullmatch(data[-SEAL_BYTES:]) if len(data) > SEAL_BYTES else None
    if seal is None:
        raise CheckpointError(f"{where} is truncated or no manifest: it does not end in its digest")
    if digest(data[:-SEAL_BYTES]) != seal[1].decode():
        raise CheckpointError(f"{where} is damaged: its digest does not fit its contents")
    try:
        return _checked(strict_json(data))
    except NewerVersion as error:
        raise NewerVersion(f"{where} {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no manifest of a checkpoint: {error}") from None


def _checked(document: Any) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'its "format" is not "{FORMAT}"')
    version = _natural(document.get("version"), "version")
    if version > VERSION:
        raise NewerVersion(
            f"has version {version}, this zfunc reads up to {VERSION}. It is not damaged: install "
            "the zfunc that wrote it, or a later one."
        )
    files = tuple(_file(row) for row in _expect(list, document.get("files"), "files"))
    if len({f.name for f in files}) != len(files):
        raise ValueError("a file stands twice in it")
    rows = _expect(dict, document.get("leaves"), "leaves")
    leaves = {name: _leaf(name, row, len(files)) for name, row in rows.items()}
    _check_tiles(files, leaves)
    static = _expect(dict, document.get("static"), "static")
    if both := leaves.keys() & static.keys():
        raise ValueError(f"{min(both)!r} is both a tensor and none")
    world = _natural(document.get("world"), "world")
    extra = _expect(list, document.get("extra", []), "extra")
    if extra and len(extra) != world:
        raise ValueError(f"{world} ranks have {len(extra)} values of extra")
    return Manifest(
        step=_natural(document.get("step"), "step"),
        world=world,
        id=_expect(str, document.get("id"), "id"),
        files=files,
        leaves=leaves,
        static={name: _decoded(name, value) for name, value in static.items()},
        serial=_natural(document.get("serial", 0), "serial"),
        extra=tuple(extra),
    )


def _file(row: Any) -> DataFile:
    row = _expect(dict, row, "a file")
    name = _expect(str, row.get("name"), "a file's name")
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"a file is called {name!r:.60}")
    size, header = _natural(row.get("size"), name), _natural(row.get("header"), name)
    if not 8 < header <= size:
        raise ValueError(f"{name} has {size} bytes and a header of {header}")
    return DataFile(name, size, header, _expect(str, row.get("digest"), "a digest"))


def _leaf(name: str, row: Any, files: int) -> StoredLeaf:
    row = _expect(dict, row, name)
    dtype = _expect(str, row.get("dtype"), name)
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r:.60}")
    shape = tuple(_natural(n, name) for n in _expect(list, row.get("shape"), name))
    if len(shape) > 64:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    patterns = _patterns(name, row, math.prod(shape)) if "row" in row else ()
    chunks = tuple(_chunk(name, c, files, patterns) for c in _expect(list, row.get("chunks"), name))
    leaf = StoredLeaf(shape, DTYPES[dtype], chunks)
    if not _complete(leaf, row.get("row")):
        raise ValueError(f"the chunks of {name} do not make up its {leaf.numel} elements")
    return leaf


def _complete(leaf: StoredLeaf, length: int | None) -> bool:
    if length is None:
        return leaf.length is None
    return covers(leaf.numel, length, (row.elements for row in leaf.chunks))


def _patterns(name: str, row: dict[str, Any], numel: int) -> list[Strided]:
    """The rows of which a leaf has chunks."""
    length = _natural(row.get("row"), name)
    if not length or numel % length:
        raise ValueError(f"{name} has {numel} elements in rows of {length}")
    found = []
    for runs in _expect(list, row.get("runs"), name):
        borders = [_natural(x, name) for run in _expect(list, runs, name) for x in _pair(name, run)]
        if not borders or any(a >= b for a, b in pairwise(borders)) or borders[-1] > length:
            raise ValueError(f"{name} has rows of {length} with the runs {runs!r:.80}")
        found.append(Strided(length, tuple(zip(borders[::2], borders[1::2], strict=True))))
    return found


def _pair(name: str, run: Any) -> list[Any]:
    if not isinstance(run, list) or len(run) != 2:
        raise ValueError(f"{name} has the run {run!r:.60}")
    return run


def _chunk(name: str, row: Any, files: int, patterns: Sequence[Strided]) -> Row:
    row = _expect(list, row, name)
    if not 5 <= len(row) <= 5 + bool(patterns):
        raise ValueError(f"a chunk of {name} has {len(row)} entries")
    file, start, count, offset, *number = (_natural(n, name) for n in row[:4] + row[5:])
    if file >= files or not count or any(n >= len(patterns) for n in number):
        raise ValueError(f"a chunk of {name} is {row!r:.80}")
    rows = patterns[number[0]] if number else None
    elements = Elements(start, start + count, rows)
    return Row(file, elements, offset, _expect(str, row[4], "a digest"))


def _check_tiles(files: Sequence[DataFile], leaves: dict[str, StoredLeaf]) -> None:
    """Every byte behind a file's header belongs to exactly one chunk."""
    extents: list[list[tuple[int, int]]] = [[(0, f.header)] for f in files]
    for leaf in leaves.values():
        for row in leaf.chunks:
            end = row.offset + row.count * leaf.dtype.itemsize
            extents[row.file].append((row.offset, end))
    for f, found in zip(files, extents, strict=True):
        found.sort()
        if any(a[1] != b[0] for a, b in pairwise(found)) or found[-1][1] != f.size:
            raise ValueError(f"its chunks do not make up {f.name}")


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{what}: {value!r:.60} is no size")
    return value


def _expect(kind: type[T], value: Any, what: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {value!r:.60}")
    return value
