"""Payloads in memory that ranks of one host share: whose it is, what is free, who may read it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zfunc.ranks import outbox as module
from zfunc.ranks.outbox import NOWHERE, Inbox, Outbox, is_open_to

WORD = bytes(range(16))

pytestmark = pytest.mark.skipif(
    Outbox(WORD).address == NOWHERE, reason="this system shares no memory without a name"
)


def payload(size: int, fill: int) -> memoryview:
    return memoryview(bytes([fill]) * size)


def test_payloads_come_in_any_order_and_free_their_room_in_the_order_they_were_sent() -> None:
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 1, WORD)
    starts = [sender.put(payload(100, fill), 1) for fill in range(3)]
    for start in starts:
        reader.expect(start, 100)
    for fill in (2, 0):
        into = bytearray(100)
        reader.take(starts[fill], memoryview(into))
        assert into == bytes([fill]) * 100
    assert sender.put(payload(100, 3), 1) == 300, "the second one has not been read"
    reader.expect(300, 100)
    for start in (starts[1], 300):
        reader.take(start, memoryview(bytearray(100)))
    assert sender.put(payload(100, 4), 1) % module.ROOM == 0, "all has been read"


def test_one_copy_is_for_all_readers_and_the_slowest_frees_it() -> None:
    sender = Outbox(WORD)
    readers = [Inbox(sender.address, rank, WORD) for rank in (1, 2)]
    same = payload(50, 7)
    assert sender.put(same, 1) == sender.put(same, 2) == 0
    for reader in readers:
        reader.expect(0, 50)
    readers[1].take(0, memoryview(bytearray(50)))
    assert sender.put(payload(50, 8), 2) == 50
    readers[0].take(0, memoryview(bytearray(50)))
    readers[1].expect(50, 50)
    readers[1].take(50, memoryview(bytearray(50)))
    assert sender.put(payload(50, 9), 1) % module.ROOM == 0


def test_much_that_has_been_read_goes_back_to_the_system() -> None:
    def held() -> int:
        return os.fstat(sender._file).st_blocks * 512

    sender = Outbox(WORD)
    reader = Inbox(sender.address, 0, WORD)
    size = 2 * module.KEPT
    start = sender.put(payload(size, 1), 0)
    reader.expect(start, size)
    assert held() >= size
    reader.take(start, memoryview(bytearray(size)))
    sender.put(payload(1, 2), 0)
    assert held() <= module.KEPT + 2**16


def test_memory_of_another_one_is_not_read() -> None:
    sender = Outbox(WORD)
    with pytest.raises(ConnectionResetError, match="another process has its number"):
        Inbox(sender.address, 0, bytes(16))
    process, file, rights = sender.address.split(" ", 2)
    with (
        open(os.devnull) as other,
        pytest.raises(OSError, match="ZFUNC_SHARED_MEMORY=0 on all ranks"),
    ):
        Inbox(f"{process} {other.fileno()} {rights}", 0, WORD)
    sender.close()
    with pytest.raises(OSError, match="cannot be read"):
        Inbox(f"{process} {file} {rights}", 0, WORD)


def test_only_ranks_of_the_same_user_container_and_rights_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = Outbox(WORD).address, Outbox(WORD).address
    assert is_open_to(mine, theirs)
    told = Path("/proc/self/status").read_text()
    other = "\n".join("Uid:\t4242" if x.startswith("Uid") else x for x in told.splitlines())
    monkeypatch.setattr(Path, "read_text", lambda self: other)
    assert not is_open_to(mine, Outbox(WORD).address)
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")
    without = Outbox(WORD).address
    assert without == NOWHERE and not is_open_to(without, without)


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's file descriptors")
def test_a_closed_outbox_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 0, WORD)
    reader.close()
    sender.close()
    assert set(os.listdir("/proc/self/fd")) <= before
