"""Payloads in memory that ranks of one host share: whose it is, what is free, who may read it."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests import warm
from zfunc.ranks import shared_memory as module
from zfunc.ranks.shared_memory import BEGIN, NOWHERE, Inbox, Outbox, Posted, is_open_to

WORD = bytes(range(16))

pytestmark = pytest.mark.skipif(
    Outbox(WORD).address == NOWHERE, reason="this system shares no memory without a name"
)


def payload(size: int, fill: int) -> memoryview:
    return memoryview(bytes([fill]) * size)


def put(sender: Outbox, size: int, fill: int, reader: int = 1) -> Posted:
    place = sender.put(payload(size, fill), reader)
    assert place is not None
    return place


def taken(reader: Inbox, place: Posted) -> bytes:
    into = bytearray(place.size)
    reader.take(place, memoryview(into))
    return bytes(into)


def held(sender: Outbox) -> int:
    return os.fstat(sender._file).st_blocks * 512


def shared_bytes() -> int:
    """Of this process, in files and in memory without a name."""
    found = Path("/proc/self/status").read_text().partition("RssShmem:")[2]
    return int(found.split()[0]) * 1024


def test_payloads_are_read_in_any_order_and_each_frees_its_own_room() -> None:
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 1, WORD)
    first, second, third = (put(sender, 100, fill) for fill in range(3))
    assert taken(reader, third) == bytes([2]) * 100
    assert taken(reader, first) == bytes(100)
    small, large = put(sender, 80, 3), put(sender, 101, 4)
    assert small.start == first.start and large.start == second.start + 100
    assert taken(reader, second) == bytes([1]) * 100
    assert taken(reader, small) + taken(reader, large) == bytes([3]) * 80 + bytes([4]) * 101
    assert put(sender, 300, 5).start == BEGIN


def test_whatever_is_under_way_is_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, orders and readers at random in a memory that is often full."""
    monkeypatch.setattr(module, "ROOM", 5000)
    monkeypatch.setattr(module, "SLOTS", 20)
    monkeypatch.setattr(module, "KEPT", 0)
    draw, sender = random.Random(0), Outbox(WORD)
    readers = [Inbox(sender.address, rank, WORD) for rank in range(3)]
    waiting: list[tuple[int, Posted, bytes]] = []
    refused = 0
    for _ in range(3000):
        if draw.random() < 0.5:
            data = draw.randbytes(draw.randint(1, 900))
            view = memoryview(data)
            for rank in draw.sample(range(3), draw.randint(1, 3)):
                place = sender.put(view, rank)
                refused += place is None
                if place is not None:
                    waiting.append((rank, place, data))
        elif waiting:
            rank, place, data = waiting.pop(draw.randrange(len(waiting)))
            assert taken(readers[rank], place) == data
    assert refused > 100


def test_one_copy_is_for_all_readers_and_the_slowest_frees_it() -> None:
    sender = Outbox(WORD)
    readers = [Inbox(sender.address, rank, WORD) for rank in (1, 2)]
    same = payload(50, 7)
    places = [sender.put(same, reader) for reader in (1, 2)]
    assert places[0] is not None and places[0] == places[1]
    assert taken(readers[1], places[0]) == bytes(same)
    assert put(sender, 50, 8, 2).start == BEGIN + 50
    assert taken(readers[0], places[0]) == bytes(same)
    assert put(sender, 50, 9).start == BEGIN
    assert sender.put(same, 1) != sender.put(same, 1), "read twice by one it is sent twice"


def test_what_is_sent_to_one_again_waits_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", 1)
    sender, same = Outbox(WORD), payload(50, 7)
    readers = [Inbox(sender.address, rank, WORD) for rank in (0, 1)]
    place = sender.put(same, 0)
    assert place is not None and sender.put(same, 1) == place
    taken(readers[0], place)
    assert sender.put(payload(50, 8), 0) is None, "there is one slot, and it is taken"
    assert sender.put(same, 0) == place
    taken(readers[1], place)
    assert sender.put(payload(50, 9), 1) is None, "the other has not read it again"
    assert taken(readers[0], place) == bytes(same)
    assert sender.put(payload(50, 9), 1) is not None


def test_nothing_is_put_for_a_reader_that_has_not_mapped_the_memory() -> None:
    sender = Outbox(WORD)
    assert sender.put(payload(50, 1), 1) is None
    Inbox(sender.address, 1, WORD)
    assert sender.put(payload(50, 1), 2) is None
    taken(Inbox(sender.address, 0, WORD), put(sender, 50, 1, 0))
    assert sender.put(payload(50, 1), module.READERS) is None, "where the mark of a slot is"
    assert sender.put(payload(50, 1), 1) is not None


def test_much_that_has_been_read_goes_back_and_what_has_not_stays() -> None:
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 1, WORD)
    first, size = put(sender, 1000, 6), 4 * module.KEPT
    large = put(sender, size, 1)
    assert held(sender) >= size
    late = put(sender, 1000, 2)
    assert taken(reader, large) == bytes([1]) * size
    small = put(sender, 10, 3)  # what is read is free, but `late` lies behind it
    assert taken(reader, late) == bytes([2]) * 1000
    again = put(sender, 10, 4)
    assert held(sender) <= module.KEPT + BEGIN + 2**16
    for place, fill in ((first, 6), (small, 3), (again, 4)):
        assert taken(reader, place) == bytes([fill]) * place.size
    once_more = put(sender, size, 5)
    assert taken(reader, once_more) == bytes([5]) * size


@pytest.mark.parametrize("size", [module.FILED - 1, module.FILED, 5 * module.FILED + 3])
def test_a_payload_fills_its_places_one_after_the_other(size: int) -> None:
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 1, WORD)
    data, sizes = random.Random(0).randbytes(size), (size // 3, 0, size - size // 3)
    places = [bytearray(part) for part in sizes]
    for _ in range(2):
        place = sender.put(memoryview(data), 1)
        assert place is not None
        reader.take(place, *map(memoryview, places))
        assert b"".join(places) == data
    with pytest.raises(ValueError, match="places for 7"):
        reader.take(put(sender, size, 1), memoryview(bytearray(7)))
    assert place.start != put(sender, size, 2).start, "what has not been read keeps its room"


def test_pages_of_a_large_payload_are_in_the_memory_of_its_sender_alone() -> None:
    sender = Outbox(WORD)
    reader, size = Inbox(sender.address, 1, WORD), 2**23
    place, into = put(sender, size, 1), memoryview(bytearray(size))
    before = shared_bytes()
    reader.take(place, into)
    assert shared_bytes() - before < size // 16


def test_a_system_that_takes_no_memory_back_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_REMOVE", 9999)
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 1, WORD)
    taken(reader, put(sender, 2 * module.KEPT, 1))
    assert taken(reader, put(sender, 10, 2)) == bytes([2]) * 10


SENDER = """
import sys
from zfunc.ranks.shared_memory import Outbox
sender = Outbox(bytes(range(16)))
print(sender.address, flush=True)
sys.stdin.readline()
place = sender.put(memoryview(b"x" * 5000), 3)
print(place.start, place.size, place.slot, flush=True)
"""


def test_a_payload_outlives_its_sender() -> None:
    ran = warm.Popen([sys.executable, "-c", SENDER], stdin=warm.PIPE, stdout=warm.PIPE, text=True)
    assert ran.stdin is not None and ran.stdout is not None
    reader = Inbox(ran.stdout.readline().strip(), 3, WORD)
    place = ran.communicate("go\n")[0]
    assert ran.returncode == 0
    assert taken(reader, Posted(*map(int, place.split()))) == b"x" * 5000


def test_memory_of_another_one_is_not_read() -> None:
    sender = Outbox(WORD)
    process, file, rights = sender.address.split(" ", 2)
    with pytest.raises(OSError, match="it is gone"):
        Inbox(sender.address, 0, bytes(16))
    with open(os.devnull) as other, pytest.raises(OSError, match="it is gone"):
        Inbox(f"{process} {other.fileno()} {rights}", 0, WORD)
    with pytest.raises(OSError, match="no mark"):
        Inbox(sender.address, module.READERS, WORD)
    sender.close()
    with pytest.raises(OSError):
        Inbox(f"{process} {file} {rights}", 0, WORD)


@pytest.mark.parametrize("what", ["Uid:", "Gid:", "CapPrm:", "CapEff:"])
def test_only_ranks_of_the_same_rights_share(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = Outbox(WORD).address, Outbox(WORD).address
    assert is_open_to(mine, theirs)
    told = Path("/proc/self/status").read_text().splitlines()
    other = "\n".join(f"{what}\t4242" if x.startswith(what) else x for x in told)
    monkeypatch.setattr(Path, "read_text", lambda self: other)
    assert not is_open_to(mine, Outbox(WORD).address)


@pytest.mark.parametrize("kind", ["pid", "user"])
def test_only_ranks_of_one_container_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, read = Outbox(WORD).address, os.readlink
    monkeypatch.setattr(os, "readlink", lambda x: "4" if x.endswith(f"ns/{kind}") else read(x))
    assert not is_open_to(mine, Outbox(WORD).address)


def test_one_may_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Outbox(WORD).address
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", "0")
    without = Outbox(WORD)
    assert without.address == NOWHERE and without.put(payload(5, 1), 0) is None
    assert not is_open_to(mine, NOWHERE) and not is_open_to(NOWHERE, NOWHERE)


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's file descriptors")
def test_a_closed_outbox_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    sender = Outbox(WORD)
    reader = Inbox(sender.address, 0, WORD)
    reader.close()
    sender.close()

    def refused(*_: int) -> None:
        raise OSError

    monkeypatch.setattr(os, "truncate", refused)
    assert Outbox(WORD).address == NOWHERE
    assert set(os.listdir("/proc/self/fd")) <= before
