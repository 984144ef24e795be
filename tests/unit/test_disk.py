"""Buffers, blocks, regions and the lock, by themselves."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfunc as zf
from zfunc.buffers.ring import Ring
from zfunc.transforms.offloading.blocks import BLOCK, FileRegion, Files, aligned, digest
from zfunc.transforms.offloading.disk import Disk


def test_a_buffer_comes_back_when_no_tensor_lies_in_it() -> None:
    ring = Ring()
    ring.limit = 1 << 20
    buffer = ring.take(1 << 20)
    assert buffer is not None
    x = buffer.tensor(4096, 8, torch.float32)
    address = x.data_ptr()
    assert (address - 4096) % 4096 == 0 and x.storage_offset() == 0
    assert ring.at(address - 4096) is not None
    view = x[2:4]
    del buffer, x
    assert ring.take(1, must=False) is None  # the view still lies in it
    del view
    gc.collect()
    again = ring.take(1 << 20, must=False)
    assert again is not None
    assert again.tensor(4096, 1, torch.float32).data_ptr() == address
    beyond = ring.take(1 << 20)  # what has to be read now is never refused
    assert beyond is not None and ring.taken == 2 << 20


def test_waiting_for_a_buffer_waits_for_writes_only() -> None:
    ring = Ring()
    ring.limit = 1 << 16
    held = [ring.take(1 << 16)]
    assert ring.wait(1 << 16, lambda: bool(held and [held.pop()])) is not None
    assert ring.wait(1 << 16, lambda: False) is not None


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 3), st.randoms())
def test_blocks_of_a_region_do_not_meet(
    folders: int, pages: int, before: int, draw: object
) -> None:
    """Every byte of every region has a place of its own, whatever the number of folders."""
    files = Files([])
    files.folders = tuple(Path(str(i)) for i in range(folders))
    files.direct = (False,) * folders
    nbytes = pages * BLOCK // 3 // 4096 * 4096
    first = FileRegion("x", before * 4096, nbytes)
    second = FileRegion("x", first.offset + first.span(folders), nbytes)
    taken: dict[Path, list[tuple[int, int]]] = {}
    for region in (first, second):
        for block in range(region.blocks):
            a, b = region.bounds(block)
            path, at, _ = files._place(region, block)
            taken.setdefault(path, []).append((at, at + b - a))
            assert at + b - a <= region.offset + region.span(folders)
    assert sum(b - a for rows in taken.values() for a, b in rows) == 2 * nbytes
    for rows in taken.values():
        rows.sort()
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(rows))


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(direct: bool, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    files, ring = Files(folders), Ring()
    files.direct = tuple(direct and can for can in files.direct)
    region = FileRegion("x", 4096, 2 * BLOCK + 8192)
    files.reserve("x", region.offset + region.span(2))
    buffer, other = ring.take(region.nbytes), ring.take(region.nbytes)
    assert buffer is not None and other is not None
    buffer.view[:] = os.urandom(len(buffer.view))
    sums = []
    for block in range(region.blocks):
        a, b = region.bounds(block)
        sums.append(files.write(region, block, buffer.view[a:b]))
        assert sums[-1] == digest(buffer.view[a:b])
        assert files.read(region, block, other.view[a:b]) == sums[-1]
    assert other.view[: region.nbytes] == buffer.view[: region.nbytes]
    patch = os.urandom(3000)
    files.patch(region, BLOCK - 1000, memoryview(patch))
    for block in range(region.blocks):
        a, b = region.bounds(block)
        files.read(region, block, other.view[a:b])
    assert bytes(other.view[BLOCK - 1000 : BLOCK + 2000]) == patch


def test_pages() -> None:
    assert [aligned(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_a_store_can_be_closed_and_opened_again(tmp_path: Path) -> None:
    disk = Disk("step", [tmp_path], 0, 3)
    with pytest.raises(zf.PlacementError, match="another step of this process"):
        Disk("other", [tmp_path], 0, 3)
    disk.close()
    disk.close()
    other = Disk("other", [tmp_path], 0, 3)
    with pytest.raises(zf.PlacementError, match="in use"):
        disk.submit(len, "")
    del other
    gc.collect()
    assert disk.submit(len, "abc").result() == 3
    disk.close()


def test_a_write_that_fails_is_told_later(tmp_path: Path) -> None:
    disk = Disk("step", [tmp_path], 0, 3)

    def fail() -> None:
        raise zf.PlacementError("full")

    disk.behind([disk.submit(fail)])
    with pytest.raises(zf.PlacementError, match="full"):
        disk.settle()
    assert not disk.settle()
    disk.close()
