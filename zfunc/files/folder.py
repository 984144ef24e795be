"""A folder of checkpoints: which steps it has, which of them are good, and changing it.

The newest is the one that was saved last, whatever its step: a run may go back and try again.

``step-00000012`` is a checkpoint, complete from the moment at which it has that name.
Folders whose name begins with a dot are being written or removed. One exception: when a
step is saved again, the old one is ``.replaced-step-00000012`` until the new one has its
name, and counts where there is no other.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zfunc.errors import CheckpointError
from zfunc.files import chunks
from zfunc.files.manifest import HEAD_BYTES, DataFile, Manifest, parse, serial_in
from zfunc.files.reading import Reader

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "candidates",
    "check_file",
    "check_room",
    "check_whole",
    "checked_count",
    "clean",
    "discard",
    "drop_old",
    "fsync_folder",
    "hidden_folder",
    "inspect",
    "list_steps",
    "next_serial",
    "passed_over",
    "publish",
    "read_manifest",
    "said",
]

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 31
STEP = re.compile(r"(\.replaced-)?step-(\d{8,18})")
SAVING, REPLACED, REMOVED = ".saving-", ".replaced-", ".removed-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found.

    Attributes:
        step: its step count.
        path: its folder.
        problem: what is wrong with it; ``None`` if it is good.
    """

    step: int
    path: Path
    problem: str | None = None

    @property
    def good(self) -> bool:
        """Whether it can be restored."""
        return self.problem is None


@contextmanager
def said(path: Path) -> Iterator[None]:
    """Make an ``OSError`` a ``CheckpointError`` that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: {error.strerror or error}") from error


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Step -> folder, the last saved first; only the first lines of each are read.

    Where these are damaged the time of the last change to them counts.

    Raises:
        CheckpointError: ``root`` is no folder, or cannot be read.
    """
    names = _names(root)
    if MANIFEST in names:  # a single checkpoint was named
        return {parse_step(root): root}
    found = _found(root, names)
    serials = {step: _serial(folder) for step, folder in found.items()}
    known = {step: (serial, step) for step, serial in serials.items() if serial is not None}
    order: dict[int, tuple[int, ...]] = {**known}
    changed = {step: _changed(folder) for step, folder in found.items()}
    for step in found.keys() - known.keys():
        before = [at for s, at in known.items() if (changed[s], s) < (changed[step], step)]
        order[step] = (*max(before, default=(-1,)), changed[step], step)
    return {step: found[step] for step in sorted(found, key=order.__getitem__, reverse=True)}


def checked_count(name: str, value: Any, least: int) -> int:
    """A whole number that a user gave: a number of any type, or a tensor of one element.

    Raises:
        ValueError: it is none, or smaller than ``least``.

    >>> checked_count("step", 2.0, 0)
    2
    >>> checked_count("step", 1.5, 0)
    Traceback (most recent call last):
    ValueError: step=1.5: expected a whole number from 0 on
    """
    number = -1
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(value, bool | str) and int(value) == value:
            number = int(value)
    if not least <= number < 10**18:
        raise ValueError(f"{name}={value!r}: expected a whole number from {least} on")
    return number


def candidates(root: Path, step: int | None) -> list[tuple[int, Path]]:
    """The checkpoint of a step, or all of them, the last saved first.

    Raises:
        CheckpointError: there is none, or none of that step.
        ValueError: ``step`` is no number of steps.
    """
    step = None if step is None else checked_count("step", step, 0)
    steps = list_steps(root)
    if not steps:
        raise CheckpointError(f"{root} holds no checkpoint (no folder named step-00000012).")
    if step is None:
        return list(steps.items())
    if step not in steps:
        raise CheckpointError(
            f"{root} holds no checkpoint of step {step}, but of {', '.join(map(str, steps))}."
        )
    return [(step, steps[step])]


def passed_over(what: str, damaged: Sequence[str], number: int) -> str:
    """The warning of who takes a checkpoint because later ones are damaged."""
    return f"{what} step {number}: later checkpoints are damaged. " + "; ".join(damaged)


def _names(root: Path) -> list[str]:
    with said(root):
        return sorted(os.listdir(root))


def _found(root: Path, names: Iterable[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:  # those with a dot come first, and give way to those without
        if match := STEP.fullmatch(name):
            found[int(match[2])] = root / name
    return found


def next_serial(root: Path) -> int:
    """The serial of the next save into a folder.

    Raises:
        CheckpointError: ``root`` cannot be read.
    """
    found = _found(root, _names(root)).values()
    return 1 + max((_serial(folder) or 0 for folder in found), default=0)


def _changed(folder: Path) -> int:
    for path in (folder / MANIFEST, folder):
        with suppress(OSError):
            return path.stat().st_mtime_ns
    return 0


def _serial(folder: Path) -> int | None:
    """When a checkpoint was saved; 0 if nobody counted then, ``None`` if it is damaged."""
    path = folder / MANIFEST
    try:
        return serial_in(_read(path, HEAD_BYTES), lambda: _read(path))
    except CheckpointError:
        return None


def parse_step(folder: Path) -> int:
    """The step that a folder's name tells, else that of its manifest."""
    match = STEP.fullmatch(folder.resolve().name)
    return int(match[2]) if match else read_manifest(folder).step


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or no manifest.
    """
    path = folder / MANIFEST
    found = parse(_read(path), str(path))
    match = STEP.fullmatch(folder.name)
    if match and int(match[2]) != found.step:
        raise CheckpointError(f"{path} is of step {found.step}: the folder was renamed")
    return found


def _read(path: Path, first: int = LARGEST_MANIFEST + 1) -> bytes:
    """The first bytes of a manifest, or all of them."""
    with chunks.reading(path) as (fd, size):
        if size > LARGEST_MANIFEST:
            raise CheckpointError(f"{path} has {size} bytes, more than a manifest ever has")
        data = bytearray(min(size, first))
        chunks.read_exactly(fd, data, 0, path)
    return bytes(data)


def check_file(folder: Path, file: DataFile) -> None:
    """Raise ``CheckpointError`` unless the file is there, whole, with the header it had."""
    path = folder / file.name
    with chunks.reading(path) as (fd, size):
        if size != file.size:
            raise CheckpointError(f"{path} has {size} bytes, it was written with {file.size}")
        header = bytearray(file.header)
        chunks.read_exactly(fd, header, 0, path)
    if chunks.digest(header) != file.digest:
        raise CheckpointError(f"{path} is damaged: the digest of its header does not fit")


def check_whole(folder: Path) -> Manifest:
    """The manifest of a checkpoint of which all files are there, by sizes and headers.

    Raises:
        CheckpointError: it is damaged or incomplete, or no checkpoint.
    """
    manifest = read_manifest(folder)
    for file in manifest.files:
        check_file(folder, file)
    return manifest


def inspect(step: int, folder: Path, thorough: bool = True) -> Checkpoint:
    """Whether a checkpoint is good.

    Args:
        thorough: read every byte; else sizes and headers alone.
    """
    try:
        manifest = check_whole(folder)
        if thorough:
            with Reader(folder, manifest) as reader:
                for name in manifest.leaves:
                    reader.check(name)
    except CheckpointError as error:
        return Checkpoint(step, folder, str(error))
    return Checkpoint(step, folder)


# Changing it


def hidden_folder(root: Path, step: int, token: str) -> Path:
    """The folder in which a checkpoint is written."""
    return root / f"{SAVING}{step_name(step)}-{token}"


def check_room(folder: Path, need: int, what: str) -> None:
    """Raise ``CheckpointError`` if the disk has less room than is needed.

    Args:
        what: what needs so many bytes, and ends the message.
    """
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < need:
        raise CheckpointError(f"{folder}: the disk has {free:,} bytes left, {what}")


def clean(root: Path) -> None:
    """Remove what runs that were killed have left: half-written and half-removed checkpoints."""
    with os.scandir(root) as entries:
        left = list(entries)
    for entry in left:
        if entry.name.startswith(REPLACED):
            final = root / entry.name.removeprefix(REPLACED)
            if not final.exists():  # killed between the two renamings of `publish`
                os.rename(entry.path, final)
                continue
        if entry.name.startswith((SAVING, REPLACED, REMOVED)):
            shutil.rmtree(entry.path, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint, or a half-written one that others may still be writing."""
    removed = folder.with_name(f"{REMOVED}{folder.name.lstrip('.')}")
    shutil.rmtree(removed, ignore_errors=True)
    # Renamed first: at once gone as a checkpoint, however long removing takes, and nobody
    # finds the folder any more to add to it.
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def publish(hidden: Path, root: Path, step: int) -> None:
    """Give a finished checkpoint its name; one that had it goes when this one is in place."""
    final, replaced = root / step_name(step), root / f"{REPLACED}{step_name(step)}"
    again = final.exists()
    if again:
        os.rename(final, replaced)
    os.rename(hidden, final)
    fsync_folder(root)
    if again:
        shutil.rmtree(replaced, ignore_errors=True)


def drop_old(root: Path, step: int, keep: int) -> None:
    """Remove all but ``step``, which was saved last, and the ``keep - 1`` good ones before it."""
    left = keep - 1
    for earlier, folder in list_steps(root).items():
        if earlier == step:
            continue
        if left > 0:
            left -= inspect(earlier, folder, thorough=False).good
            continue
        discard(folder)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
