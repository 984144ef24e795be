"""A save, an export or a restore that fails leaves no file open."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc.files import background, chunks, folder, locking, saving

STATE = {"w": torch.ones(3000), "step": 1}


def refuse(*args: Any, **how: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory(*args: Any, **how: Any) -> Any:
    raise MemoryError("not enough memory")


def no_thread(*args: Any, **how: Any) -> Any:
    raise RuntimeError("can't start new thread")


def after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Works so many times, and refuses from then on."""
    left = [calls]

    def call(*args: Any, **how: Any) -> Any:
        left[0] -= 1
        return real(*args, **how) if left[0] >= 0 else refuse()

    return call


FAULTS: dict[str, Any] = {
    "header": lambda p: p.setattr(os, "pwrite", refuse),
    "chunk": lambda p: p.setattr(os, "pwrite", after(1, os.pwrite)),
    "fsync": lambda p: p.setattr(os, "fsync", refuse),
    "record": lambda p: p.setattr(saving, "leave_record", refuse),
    "manifest": lambda p: p.setattr(saving, "parse", refuse),
    "rename": lambda p: p.setattr(os, "rename", refuse),
    "open": lambda p: p.setattr(os, "open", after(2, os.open)),
    "layout": lambda p: p.setattr(chunks, "header_of", refuse),
    "hidden": lambda p: p.setattr(folder.Path, "mkdir", refuse),
    "room": lambda p: p.setattr(os, "statvfs", refuse),
}
BEHIND: dict[str, Any] = {
    "copy": lambda p: p.setattr(background, "_copied", no_memory),
    "thread": lambda p: p.setattr(threading.Thread, "start", no_thread),
    "values": lambda p: p.setattr(background, "planned_pieces", no_memory),
}
ERRORS = (zf.CheckpointError, MemoryError, RuntimeError, OSError)


def opened() -> list[str]:
    """What this process has open, names of files that are gone included."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells what is open")
@pytest.mark.parametrize(
    ("fault", "block"), [*((f, True) for f in FAULTS), *((f, False) for f in {**FAULTS, **BEHIND})]
)
def test_a_failed_save_leaves_no_file_open(
    fault: str, block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zf.save(tmp_path, STATE)
    before = opened()
    for _ in range(3):
        with monkeypatch.context() as patch:
            {**FAULTS, **BEHIND}[fault](patch)
            with pytest.raises(ERRORS):
                zf.save(tmp_path, {**STATE, "step": 2}, block=block).wait()
        assert opened() == before
    zf.save(tmp_path, {**STATE, "step": 3}, block=block).wait()
    assert zf.restore(tmp_path, STATE)["step"] == 3
    assert opened() == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells what is open")
def test_a_lock_that_cannot_be_written_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened()
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(zf.CheckpointError, match="No space left"):
                zf.save(tmp_path / "a", STATE)
        assert opened() == before and (tmp_path / "a").resolve() not in locking._held
    zf.save(tmp_path / "a", STATE)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells what is open")
def test_failed_exports_and_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zf.save(tmp_path, STATE)
    file = tmp_path / "step-00000001" / "rank-00000.safetensors"
    data = file.read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    file.write_bytes(data[:-1] + b"!")
    before = opened()
    for _ in range(3):
        with pytest.raises(zf.CheckpointError):
            zf.restore(tmp_path, STATE)
        with pytest.raises(zf.CheckpointError):
            zf.import_safetensors(tmp_path / "model.safetensors", {"w": torch.ones(3000)})
        for name in ("fsync", "pwrite", "replace", "statvfs"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, refuse)
                with pytest.raises(zf.CheckpointError):
                    zf.export_safetensors(tmp_path / "out", {"w": torch.ones(3000)})
        assert opened() == before
    shutil.rmtree(tmp_path / "out")


def test_an_export_that_fails_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its files was about to get its name."""
    params = {"a": torch.ones(30), "b": torch.ones(30)}
    for calls in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", after(calls, os.replace))
            with pytest.raises(zf.CheckpointError):
                zf.export_safetensors(tmp_path, params, shard_bytes=130)
        assert not list(tmp_path.glob(".*"))
    zf.export_safetensors(tmp_path, params, shard_bytes=130)


class Exhausted:
    """No file can be opened: one call of that kind, or all from some call on."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, lasting: bool) -> None:
        self.calls, self.first, self.lasting = 0, first, lasting
        for name in ("open", "scandir", "listdir"):
            patch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            self.calls += 1
            if self.calls == self.first or (self.lasting and self.calls > self.first):
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*args, **how)

        return call


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("step", [2, 3])
def test_whatever_stays_for_want_of_descriptors_goes_with_the_next_save(
    step: int, lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the old checkpoint or the new one is there at each moment."""
    failed = kept = 0
    for first in range(1, 60):
        root = tmp_path / str(first)
        for n in (1, 2):
            zf.save(root, {"w": torch.ones(3000), "step": n, "note": "old"})
        with monkeypatch.context() as patch:
            disk = Exhausted(patch, first, lasting)
            try:
                zf.save(root, {"w": torch.ones(3000), "step": step, "note": "new"}, keep=1)
            except (zf.CheckpointError, OSError):
                failed += 1
        got = zf.restore(root, {**STATE, "note": ""})
        assert (got["step"], got["note"]) in ((2, "old"), (step, "new"))
        kept += any(name.startswith((".removed", ".replaced")) for name in os.listdir(root))
        zf.save(root, {"w": torch.ones(3000), "step": 4, "note": "newest"})
        assert [n for n in os.listdir(root) if n.startswith(".")] == [".lock"]
        if disk.calls < first:
            break
    assert failed and kept and disk.calls < first  # all of them were tried


def test_a_save_that_fails_in_the_background_ends_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that could not even be started is not waited for, either."""
    zf.save(tmp_path, STATE)
    with monkeypatch.context() as patch:
        BEHIND["thread"](patch)
        with pytest.raises(RuntimeError, match="start new thread"):
            zf.save(tmp_path, {**STATE, "step": 2}, block=False)
    assert not background._unfinished
    assert not [t for t in threading.enumerate() if t.name.startswith("saving step")]
    assert zf.restore(tmp_path, STATE)["step"] == 1
