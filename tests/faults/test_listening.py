"""Who can talk to a launched world: nobody off this machine, and nobody in pickles."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

import zfunc as zf
from zfunc import optim
from zfunc.errors import DesyncError
from zfunc.ranks.axes import group
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.control_channel import TOKEN_BYTES, ControlChannel
from zfunc.ranks.gloo import Place, PointToPoint
from zfunc.ranks.messages import read, written
from zfunc.ranks.transport import Collective
from zfunc.ranks.world import World

LISTENING = "0A"  # in the kernel's tables
LOOPBACK = ("0100007F", "00000000000000000000000001000000")

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/net"), reason="reads Linux's tables")


def heard_under() -> list[str]:
    """The addresses under which this process listens, as the kernel writes them."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue  # closed meanwhile
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in mine:
                found.append(local.partition(":")[0])
    return found


def world_of_many_groups() -> list[str]:
    """What a rank listens to once it has trained, cut its world up, and made groups of torch's."""
    params = {"w": torch.ones(4, 4)}
    tx = optim.sgd(0.1)
    step = zf.shard(zf.train_step(lambda p, x: (x @ p["w"]).square().mean(), tx), stage=3)
    state = step.place(zf.TrainState.create(params, tx))
    state, _ = step(state, torch.ones(2, 4))
    grid = zf.mesh(data=2, tensor=2)
    for axis in ("data", "tensor"):
        group(grid, axis).all_reduce(torch.ones(3)).wait()
    theirs = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(3), group=theirs)
    group(None, "data").barrier()
    return heard_under()


@linux
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_launched_world_listens_on_the_loopback_only(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if everywhere:  # as an image for clusters may say it for all programs
        other = next((n for _, n in socket.if_nameindex() if n not in ("lo", "lo0")), "lo")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", other)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", other)
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.extend(heard_under())

    before = set(heard_under())
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        ranks = zf.launch(world_of_many_groups, nprocs=4, timeout=60)
    finally:
        over.set()
        watching.join()
    assert set(seen) - before <= set(LOOPBACK) and seen, "the parent's store"
    for rank in ranks:
        assert len(rank) >= 4 and set(rank) <= set(LOOPBACK)


class Harmful:
    """Runs something where it is unpickled."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return Harmful.ran.append, ("ran",)


def test_what_comes_from_gloo_is_never_unpickled() -> None:
    store, told = HashStore(), []

    def rank(r: int) -> None:
        transport = PointToPoint(Place(r, (0, 1), PrefixStore("g", store)), 20.0)
        ranks = ConnectedGroup("data", World(r, 2, 20.0), (0, 1), lambda: transport)
        if r == 1:  # a peer that sends a pickle for a message
            ranks._exchanged("exchange", "x", pickle.dumps(Harmful()))
        else:
            with pytest.raises(DesyncError, match=r"exchange\('x'\).*no message") as caught:
                ranks.exchange("mine", label="x")
            told.append(str(caught.value))
        meet.wait()

    meet = threading.Barrier(2)
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told and not Harmful.ran


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [True, 1, 2**80, 1.5, float("inf"), "text", "\ud800", b"\x00\xff"],
        ("a", (1, ()), []),
        {"a": {1: ("x",), ("k", 0): None}, "dict": [], "tuple": {"bytes": "00"}},
        [(3, Path("/a/step-3"))],
    ],
)
def test_messages_come_out_as_they_went_in(obj: Any) -> None:
    assert read(written(obj)) == obj
    assert repr(read(written(obj))) == repr(obj)


def test_what_is_no_plain_data_is_refused_by_name() -> None:
    for obj, where in (
        ({"a": [0, torch.ones(1)]}, r"\['a'\]\[1\] is a Tensor"),
        (Collective, "type"),
    ):
        with pytest.raises(TypeError, match=where):
            zf.simulate(2)(lambda obj=obj: group(None, "data").exchange(obj))()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"{}", b'{"x":1}', b'{"tuple":1}', b"[" * 10**5, b'{"bytes":"x"}']
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        read(data)


def test_silent_strangers_hold_nobody_up() -> None:
    cards: list[bytes] = []
    channel = ControlChannel(0, cards.append, lambda peer: b"", 30.0)
    port = int(cards[0][TOKEN_BYTES:].decode().split("\n")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with socket.create_connection(("127.0.0.1", port)) as caller:
        word = cards[0][:TOKEN_BYTES] + (1).to_bytes(8, "little")
        caller.sendall(word[:5])
        threading.Timer(0.2, lambda: caller.sendall(word[5:] + bytes(16))).start()
        start = time.monotonic()
        assert channel.receive(1, 1) == (0, 0)
        assert time.monotonic() - start < 5
    for stranger in strangers:
        stranger.close()
    channel.close()
