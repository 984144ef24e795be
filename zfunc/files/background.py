"""Saving beside the training that goes on: a copy is taken now, and written by a thread.

A background thread learns from the hidden folder how far the other ranks are. Collectives belong to
the main thread, which is in the middle of a step.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files.chunks import Chunk, DataWriter, as_bytes
from zfunc.files.folder import MANIFEST, discard, said
from zfunc.files.saving import (
    Task,
    agreed,
    chunk_plan,
    complete,
    conclude,
    leave_record,
    on_host,
    planned_pieces,
)
from zfunc.ranks.axes import group
from zfunc.ranks.world import current, on_leave, on_renewal

__all__ = ["Saving", "settle", "start"]

ALIGN = 64
AT_EXIT = 60.0  # seconds without any progress of the others after which a leaving process gives up

_unfinished: set[Saving] = set()


class Saving:
    """A checkpoint that is saved, or being saved.

    Attributes:
        step: its step.
        path: its folder, once it is complete.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        self.problem: str | None = None
        self._failure: str | None = None  # what is raised on this rank
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Saving(step={self.step}, {str(self.path)!r}, done={self.done})"

    @property
    def done(self) -> bool:
        """Whether ``wait`` has nothing to wait for on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the checkpoint is complete; a collective. Again it is free.

        Raises:
            CheckpointError: it could not be written; each time, whoever was told before.
        """
        if self._thread is None:
            return self._report()
        self._join()
        try:
            agreed(group(None, "data"), self._report, label="save")
        except CheckpointError as error:
            self._failure = str(error)  # of another rank, too
            raise

    def _end(self) -> None:
        """Wait on this rank alone, and raise what went wrong."""
        self._join()
        self._report()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _unfinished.discard(self)

    def _report(self) -> None:
        if self._failure is None and self.problem is not None:
            self._failure = f"saving step {self.step} in the background failed: {self.problem}"
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def _run(self, task: Task, writer: DataWriter, data: list[tuple[Chunk, memoryview]]) -> None:
        if sys.platform == "linux":  # where threads have priorities: the training goes first
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            with said(task.hidden):
                complete(task, writer, data)
        except Exception as error:
            self.problem = str(error)
            with suppress(OSError):
                task.data(task.rank).unlink()  # room for the record, if the disk is full
            with suppress(OSError):
                leave_record(task, {"error": self.problem})
        data.clear()
        try:
            (_lead if task.rank == 0 else _follow)(task)
        except Exception as error:
            self.problem = self.problem or str(error)


def start(task: Task) -> Saving:
    """Copy what this rank writes, and write it in the background.

    Raises:
        CheckpointError: what the system refuses already; the other ranks will know.
    """
    saving, writer = Saving(task.step, task.final), None
    try:
        header, plan = chunk_plan(task.stock)
        with said(task.hidden):
            writer = DataWriter(task.data(task.rank), header)
            for chunk, view in on_host(planned_pieces(task.stock, plan, resident=False)):
                writer.put(chunk, view, task.known(chunk))
        data = _copied(list(planned_pieces(task.stock, plan, resident=True)))
        thread = threading.Thread(
            target=saving._run,
            args=(task, writer, data),
            name=f"saving step {task.step}",
            daemon=False,  # as the thread of a simulated rank is
        )
        thread.start()
    except BaseException as error:
        if writer is not None:
            writer.close()
        with suppress(OSError):
            leave_record(task, {"error": str(error)})
        raise
    saving._thread = thread
    _unfinished.add(saving)
    current().memo["saving"] = saving
    return saving


def _copied(pieces: list[tuple[Chunk, Tensor]]) -> list[tuple[Chunk, memoryview]]:
    """The values in this rank's buffer for copies, which is kept for the next save."""
    sizes = (-(-chunk.nbytes // ALIGN) * ALIGN for chunk, _ in pieces)
    *offsets, end = accumulate(sizes, initial=0)
    fast = any(x.is_cuda for _, x in pieces)
    buffer = current().memo.get("saving buffer")
    if buffer is None or buffer.numel() < end or (fast and not buffer.is_pinned()):
        buffer = torch.empty(end, dtype=torch.uint8, pin_memory=fast)
        current().memo["saving buffer"] = buffer
    copies = []
    for (chunk, x), at in zip(pieces, offsets, strict=True):
        room = buffer[at : at + chunk.nbytes]
        room.view(chunk.dtype).copy_(x, non_blocking=fast)
        copies.append((chunk, as_bytes(room)))
    if fast:
        torch.cuda.synchronize()
    return copies


def _lead(task: Task) -> None:
    """Wait for all records and publish, or clear away what there is."""
    try:
        watch = _Patience(task)
        while missing := [r for r in range(task.size) if not task.record(r).exists()]:
            watch.look(f"rank {missing[0]}, which has left no word")
            if not task.hidden.exists():
                raise CheckpointError("it was given up, because another rank could not begin")
        conclude(task)
    except BaseException:
        with suppress(OSError):
            discard(task.hidden)
        raise


def _follow(task: Task) -> None:
    """Wait until rank 0 has renamed the folder, or removed it."""
    watch = _Patience(task)
    while task.hidden.exists():
        watch.look("rank 0, which completes the checkpoint")
    with suppress(OSError), (task.final / MANIFEST).open() as file:
        if f'"id": "{task.id}"' in file.read(1000):
            return
    raise CheckpointError(f"{task.final} was not completed: rank 0 says why")


class _Patience:
    """A limit on the time in which nothing changes in the folder that all ranks write to."""

    def __init__(self, task: Task) -> None:
        self.task, self.pause = task, 0.002
        self.seen: Any = None
        self.since = time.monotonic()

    def look(self, whom: str) -> None:
        """Sleep for a moment.

        Raises:
            CheckpointError: nothing has happened for too long.
        """
        time.sleep(self.pause)
        self.pause = min(2 * self.pause, 0.1)
        seen = _state_of(self.task.hidden)
        if seen != self.seen:
            self.seen, self.since = seen, time.monotonic()
        leaving = not threading.main_thread().is_alive()
        patience = min(self.task.timeout, AT_EXIT) if leaving else self.task.timeout
        if time.monotonic() - self.since > patience:
            raise CheckpointError(
                f"{self.task.hidden} has not changed for {patience:g} s: given up waiting for "
                f"{whom}. The process may have ended."
            )


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    try:
        with os.scandir(folder) as found:
            return sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in found)
    except OSError:  # renamed or removed meanwhile
        return []


def settle(together: bool = True) -> None:
    """Wait for what this rank has under way; a collective (unless not ``together``).

    Raises:
        CheckpointError: it could not be written.
    """
    saving: Saving | None = current().memo.pop("saving", None)
    if saving is not None and not together:
        saving._end()
    elif saving is not None and saving._thread is not None:  # nobody has waited for it
        saving.wait()


def _settle_apart() -> None:
    """For when groups are made anew: one rank may have waited for its save, and another not.

    Raises:
        CheckpointError: on some rank it could not be written.
    """
    agreed(group(None, "data"), partial(settle, together=False), label="save")


def _at_exit() -> None:
    """Wait at the end of the process, too; without a collective, as other ranks may be gone."""
    for saving in list(_unfinished):
        saving._end()


on_leave.append(settle)
on_renewal.append(_settle_apart)
atexit.register(_at_exit)
