"""A folder of checkpoints: which steps it has, which of them are good, and changing it.

``step-00000012`` is a checkpoint, complete from the moment at which it has that name.
Folders whose name begins with a dot are being written or removed. One exception: when a
step is saved again, the old one is ``.replaced-step-00000012`` until the new one has its
name, and counts where there is no other.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zfunc.errors import CheckpointError
from zfunc.files import chunks
from zfunc.files.manifest import DataFile, Manifest, parse

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "check_file",
    "clean",
    "discard",
    "drop_old",
    "fsync_folder",
    "inspect",
    "list_steps",
    "make_hidden",
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
    """What the system refuses is a ``CheckpointError`` that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: {error.strerror or error}") from error


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Step -> folder, newest first, without a look into them.

    Raises:
        CheckpointError: ``root`` is no folder, or cannot be read.
    """
    with said(root):
        names = sorted(os.listdir(root))
    if MANIFEST in names:  # a single checkpoint was named
        return {parse_step(root): root}
    found: dict[int, Path] = {}
    for name in names:  # those with a dot come first, and give way to those without
        if match := STEP.fullmatch(name):
            found[int(match[2])] = root / name
    return dict(sorted(found.items(), reverse=True))


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
    fd, size = chunks.open_for_reading(path)
    try:
        if size > LARGEST_MANIFEST:
            raise CheckpointError(f"{path} has {size} bytes, more than a manifest ever has")
        data = bytearray(size)
        chunks.read_exactly(fd, data, 0, path)
    finally:
        os.close(fd)
    found = parse(bytes(data), str(path))
    match = STEP.fullmatch(folder.name)
    if match and int(match[2]) != found.step:
        raise CheckpointError(f"{path} is of step {found.step}: the folder was renamed")
    return found


def check_file(folder: Path, file: DataFile) -> None:
    """Raise ``CheckpointError`` unless the file is there, whole, with the header it had."""
    path = folder / file.name
    fd, size = chunks.open_for_reading(path)
    try:
        if size != file.size:
            raise CheckpointError(f"{path} has {size} bytes, it was written with {file.size}")
        header = bytearray(file.header)
        chunks.read_exactly(fd, header, 0, path)
    finally:
        os.close(fd)
    if chunks.digest(header) != file.digest:
        raise CheckpointError(f"{path} is damaged: the digest of its header does not fit")


def inspect(step: int, folder: Path, thorough: bool = True) -> Checkpoint:
    """Whether a checkpoint is good.

    Args:
        thorough: read every byte; else sizes and headers alone.
    """
    try:
        manifest = read_manifest(folder)
        for file in manifest.files:
            check_file(folder, file)
        if thorough:
            _check_chunks(folder, manifest)
    except CheckpointError as error:
        return Checkpoint(step, folder, str(error))
    return Checkpoint(step, folder)


def _check_chunks(folder: Path, manifest: Manifest) -> None:
    from zfunc.files.reading import Reader

    with Reader(folder, manifest) as reader:
        for name in manifest.leaves:
            reader.check(name)


# Changing it


def make_hidden(root: Path, step: int, token: str) -> Path:
    """The folder in which a checkpoint is written."""
    hidden = root / f"{SAVING}{step_name(step)}-{token}"
    hidden.mkdir()
    return hidden


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


def publish(hidden: Path, root: Path, step: int) -> Path:
    """Give a finished checkpoint its name; one that had it goes when this one is in place."""
    final, replaced = root / step_name(step), root / f"{REPLACED}{step_name(step)}"
    again = final.exists()
    if again:
        os.rename(final, replaced)
    os.rename(hidden, final)
    fsync_folder(root)
    if again:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def drop_old(root: Path, step: int, keep: int) -> None:
    """Remove checkpoints before ``step`` until it and ``keep - 1`` earlier good ones are left."""
    left = keep - 1
    for earlier, folder in list_steps(root).items():
        if earlier >= step:
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
