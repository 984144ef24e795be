"""Writing a checkpoint: every rank its part, and rank 0 the manifest.

Ranks write into one hidden folder: ``rank-00000.safetensors`` with a record of its chunks
beside it. Rank 0 makes the manifest of all records and gives the folder its name. How it
learns that all are done differs: see ``zfunc.files.checkpoint`` and ``zfunc.files.background``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files.chunks import Chunk, DataWriter, as_bytes, digest, lay_out
from zfunc.files.elements import Elements, elements_of
from zfunc.files.folder import (
    MANIFEST,
    drop_old,
    fsync_folder,
    next_serial,
    publish,
    said,
    step_name,
)
from zfunc.files.inventory import Inventory, own_share
from zfunc.files.manifest import DataFile, Manifest, Row, StoredLeaf, parse, row_of
from zfunc.ranks.comm import Group

__all__ = [
    "Task",
    "agreed",
    "chunk_plan",
    "complete",
    "conclude",
    "leave_record",
    "on_host",
    "planned_pieces",
    "write_now",
]


Plan = dict[tuple[str, Elements], list[Chunk]]


@dataclass(frozen=True)
class Task:
    """One save, as all ranks have agreed on it."""

    root: Path
    hidden: Path
    step: int
    id: str
    keep: int | None
    stock: Inventory
    rank: int
    size: int
    timeout: float
    digests: dict[tuple[str, Elements], str]  # of chunks, where they are known already
    extra: Any  # this rank's own

    @property
    def final(self) -> Path:
        return self.root / step_name(self.step)

    def data(self, rank: int) -> Path:
        return self.hidden / f"rank-{rank:05d}.safetensors"

    def record(self, rank: int) -> Path:
        return self.hidden / f"rank-{rank:05d}.done"

    def known(self, chunk: Chunk) -> str | None:
        """The digest of a chunk, if it was taken before."""
        return self.digests.get((chunk.leaf, chunk.elements))


def agreed(ranks: Group, do: Any, label: str) -> Any:
    """``do()`` on every rank; if it fails on one, an error on all. A collective.

    Raises:
        CheckpointError: another rank failed; the message says which one and why.
        Exception: what ``do`` raised here.
    """
    value, error = None, None
    try:
        value = do()
    except Exception as failed:
        error = failed
    problems = ranks.exchange(None if error is None else str(error), label=label)
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"on rank {rank}: {problem}")
    return value


# One rank's file


def chunk_plan(stock: Inventory) -> tuple[bytes, Plan]:
    """The header of this rank's file, and its chunks by leaf and span."""
    spans = [(name, span, elements_of(span)) for name, span in stock.spans()]
    header, chunks = lay_out(
        [
            (name, stock.tensors[name].dtype, elements.part(*own_share(span)))
            for name, span, elements in spans
        ]
    )
    keys = [(name, elements) for name, _, elements in spans]
    return header, dict(zip(keys, chunks, strict=True))


def planned_pieces(
    stock: Inventory, plan: Plan, resident: bool | None = None
) -> Iterator[tuple[Chunk, Tensor]]:
    """This rank's chunks and their values, where they lie."""
    for name, span, x in stock.streamed(resident):
        at, _ = own_share(span)
        for chunk in plan[name, elements_of(span)]:
            yield chunk, x[at : at + chunk.count]
            at += chunk.count


def on_host(pieces: Iterable[tuple[Chunk, Tensor]]) -> Iterator[tuple[Chunk, memoryview]]:
    for chunk, x in pieces:
        yield chunk, as_bytes(x.cpu().contiguous())


def write_now(task: Task) -> None:
    """Write this rank's file and record.

    Raises:
        CheckpointError: what the system refuses.
    """
    header, plan = chunk_plan(task.stock)
    with said(task.hidden):
        writer = DataWriter(task.data(task.rank), header)
        complete(task, writer, on_host(planned_pieces(task.stock, plan)))


def complete(task: Task, writer: DataWriter, data: Iterable[tuple[Chunk, memoryview]]) -> None:
    try:
        for chunk, view in data:
            writer.put(chunk, view, task.known(chunk))
        writer.finish()
    finally:
        writer.close()
    file = DataFile(writer.path.name, writer.size, len(writer.header), digest(writer.header))
    leave_record(task, {"file": vars(file), "table": writer.table, "extra": task.extra})


def leave_record(task: Task, record: dict[str, Any]) -> None:
    path = task.record(task.rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)


# All of them together: rank 0


def conclude(task: Task) -> None:
    """Make the manifest of all records, publish the checkpoint and drop old ones.

    Raises:
        CheckpointError: a rank failed, or what the system refuses.
    """
    with said(task.hidden):
        records = [json.loads(task.record(rank).read_bytes()) for rank in range(task.size)]
        failed = [(rank, r["error"]) for rank, r in enumerate(records) if "error" in r]
        if failed:
            raise CheckpointError(f"on rank {failed[0][0]}: {failed[0][1]}")
        data = _manifest(task, records).encode()
        parse(data, str(task.hidden / MANIFEST))  # what cannot be read must not be published
        with (task.hidden / MANIFEST).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for rank in range(task.size):
            task.record(rank).unlink()
        fsync_folder(task.hidden)
        publish(task.hidden, task.root, task.step)
        if task.keep is not None:
            drop_old(task.root, task.step, task.keep)


def _manifest(task: Task, records: list[dict[str, Any]]) -> Manifest:
    rows: dict[str, list[Row]] = {name: [] for name in task.stock.tensors}
    for rank, record in enumerate(records):
        for name, table in record["table"].items():
            rows[name].extend(row_of(rank, *entry) for entry in table)
    leaves = {
        name: StoredLeaf(leaf.shape, leaf.dtype, _in_order(name, rows[name]))
        for name, leaf in task.stock.tensors.items()
    }
    files = tuple(DataFile(**record["file"]) for record in records)
    serial = next_serial(task.root)
    extra = tuple(record["extra"] for record in records)
    return Manifest(
        task.step,
        task.size,
        task.id,
        files,
        leaves,
        task.stock.static,
        serial,
        () if all(value is None for value in extra) else extra,
    )


def _in_order(name: str, rows: list[Row]) -> tuple[Row, ...]:
    """A leaf's chunks by where they begin.

    Raises:
        CheckpointError: ranks that have the same part of a split leaf have different values.
    """
    seen: dict[Elements, Row] = {}
    for row in rows:
        twin = seen.setdefault(row.elements, row)
        if twin.digest != row.digest:
            raise CheckpointError(
                f"ranks {twin.file} and {row.file} both have elements {row.elements} of {name}, "
                "with different values. The ranks that share a part of a split leaf have "
                "diverged: go on from an earlier checkpoint."
            )
    return tuple(sorted(rows, key=lambda row: row.elements.bounds))
