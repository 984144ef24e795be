"""Ranks that part ways, die or fall silent: an error that says so, on every rank, and no hang."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import time
from typing import Any

import pytest
import torch

from tests import warm
from zfunc.errors import DesyncError
from zfunc.ranks import simulation
from zfunc.ranks.axes import group
from zfunc.ranks.launching import launch
from zfunc.ranks.simulation import simulate


def everyone():  # type: ignore[no-untyped-def]
    return group(None, "data")


def another_unit() -> str:
    """Rank 1 runs another layer than the others."""
    ranks = everyone()
    ranks.barrier()
    full = torch.ones(600_000)
    handle = ranks.reduce_scatter(full, label="layers.0" if ranks.rank != 1 else "layers.1")
    with pytest.raises(DesyncError) as caught:
        handle.wait()
    with pytest.raises(DesyncError, match="failed before"):
        ranks.barrier()
    return str(caught.value)


def one_more() -> str:
    """Rank 1 runs one collective more; the others go on to the next."""
    ranks = everyone()
    handles = [ranks.all_reduce(torch.ones(9), label="loss")]
    if ranks.rank == 1:  # it may be told before it waits, and then issues nothing any more
        handles.append(ranks.all_reduce(torch.ones(50_000), label="layers.7"))
    else:
        own = torch.ones(6 // ranks.size)
        handles.append(ranks.all_gather(torch.ones(6), own, label="root"))
    assert handles[0].wait()[0] == ranks.size
    with pytest.raises(DesyncError) as caught:
        handles[1].wait()
    return str(caught.value)


def another_size() -> str:
    """Rank 1 has another number of elements."""
    ranks = everyone()
    x = torch.ones(60_000 + ranks.rank % 2)
    with pytest.raises(DesyncError) as caught:
        ranks.all_reduce(x, label="embedding").wait()
    return str(caught.value)


def another_dtype() -> str:
    """Rank 1 computes in another precision."""
    ranks = everyone()
    dtype = torch.float64 if ranks.rank == 1 else torch.float32
    with pytest.raises(DesyncError) as caught:
        ranks.broadcast(torch.ones(4, dtype=dtype), 0, label="embedding").wait()
    return str(caught.value)


MISMATCHES = [
    (another_unit, "layers.0", "layers.1"),
    (one_more, "'root'", "'layers.7'"),
    (another_size, "60000", "60001"),
    (another_dtype, "float32", "float64"),
]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("body", "most", "rank_1"), MISMATCHES)
def test_simulated_ranks_that_part_ways_are_told(body, most: str, rank_1: str, n: int) -> None:  # type: ignore[no-untyped-def]
    for rank, message in enumerate(simulate(n)(body)()):
        here, there = (rank_1, most) if rank == 1 else (most, rank_1)
        before, after = message.split("but rank")
        assert here in before and there in after, message
        # Rank 1 is told of whichever of the others came first.
        assert int(after.split()[0]) in ({1} if rank != 1 else set(range(n)) - {1})


def every_mismatch_of_two() -> list[str]:
    """All the cases above in one launch, each on a group of its own."""
    messages = []
    for body, *_ in MISMATCHES:
        messages.append(body())
        fresh_group()
    return messages


def fresh_group() -> None:
    """A group that has not failed, over new connections."""
    from zfunc.ranks.connected import ConnectedGroup
    from zfunc.ranks.gloo import PointToPoint
    from zfunc.ranks.world import current

    joined: Any = current()
    place = joined._place((0, 1), f"after {len(joined.groups)} groups")
    transport = PointToPoint(place, joined.timeout)
    made = ConnectedGroup("data", joined, (0, 1), lambda: transport)
    joined.memo["group", (0, 1)] = made
    for key in [key for key in joined.memo if key[1] == "data"]:
        del joined.memo[key]


def test_real_ranks_that_part_ways_are_told_which_unit_the_other_is_in() -> None:
    start = time.monotonic()
    for rank, messages in enumerate(launch(every_mismatch_of_two, nprocs=2, timeout=120)):
        for message, (_, most, rank_1) in zip(messages, MISMATCHES, strict=True):
            here, there = (rank_1, most) if rank == 1 else (most, rank_1)
            before, after = message.split(f"but rank {1 - rank}")
            assert here in before and there in after, message
    assert time.monotonic() - start < 60, "found by waiting, not by looking"


def test_a_simulated_rank_that_returns_early_is_missed() -> None:
    def body() -> None:
        if everyone().rank != 1:
            everyone().all_reduce(torch.ones(2), label="layers.3").wait()

    with pytest.raises(DesyncError, match=r"'layers.3'.*rank 1 has returned"):
        simulate(3)(body)()


def test_a_simulated_rank_that_sleeps_is_named_after_the_timeout() -> None:
    heard = []

    def body() -> None:
        ranks = everyone()
        if ranks.rank == 1:
            time.sleep(30)
        try:
            ranks.all_gather(torch.ones(6), torch.ones(2), label="layers.3").wait()
        except DesyncError as error:
            heard.append((ranks.rank, str(error)))
            raise

    start = time.monotonic()
    with pytest.raises(DesyncError, match=r"'layers.3'.*rank 1 did not take part within 0.3 s"):
        simulate(3, timeout=0.3)(body)()
    assert time.monotonic() - start < 10
    assert sorted(rank for rank, _ in heard) == [0, 2]


def test_launch_raises_the_cause_and_not_its_consequences() -> None:
    def body() -> None:
        ranks = everyone()
        ranks.barrier()
        if ranks.rank == 1:
            raise ZeroDivisionError("on purpose")
        ranks.all_reduce(torch.ones(100_000), label="layers.3").wait()

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        launch(body, nprocs=2)
    note = "".join(caught.value.__notes__)
    assert "raised on rank 1" in note and "in body" in note


def test_launch_tells_of_a_rank_that_died() -> None:
    def body() -> None:
        ranks = everyone()
        ranks.barrier()
        if ranks.rank == 1:
            os._exit(7)
        ranks.all_reduce(torch.ones(100_000), label="layers.3").wait()

    with pytest.raises(DesyncError, match="rank 1 exited with status 7"):
        launch(body, nprocs=2)


PLAIN = """
    import os, sys, time, torch
    from zfunc.ranks.launching import init
    from zfunc.ranks.axes import group
    joined = init(timeout={timeout})
    ranks = group(None, "data")
    x = torch.ones(3_000_000)
    ranks.all_reduce(x, label="first").wait()
    print("ready", flush=True)
    if joined.rank == 1:
        {fault}
    handles = [ranks.reduce_scatter(x, label="layers.%d" % k) for k in range(3)]
    for handle in handles:
        handle.wait()
"""

FAULTS = {
    # how rank 1 fails, the timeout, and what the others say
    "dies": ("os._exit(3)", 60.0, r"DesyncError: reduce_scatter\('layers.\d'\): rank 1 is gone"),
    "sleeps": (
        "time.sleep(600)",
        2.0,
        r"DesyncError: reduce_scatter\('layers.0'\): rank 1 did not take part within 2 s",
    ),
    "parts": (
        "ranks.all_gather(x, x[1_500_000:], label='root').wait()",
        60.0,
        r"but rank 1 is in all_gather\('root'\)",
    ),
    "raises": ("raise KeyError('mine')", 60.0, "rank 1 is gone"),
}


def start_ranks(fault: str, timeout: float, n: int = 2) -> list[warm.Popen]:
    """Processes as torchrun starts them: nobody looks after them but themselves."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    script = textwrap.dedent(PLAIN).replace("{timeout}", str(timeout)).replace("{fault}", fault)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n)}
    shared["PYTHONPATH"] = os.pathsep.join(sys.path)
    return [
        warm.Popen(
            [sys.executable, "-c", script],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=warm.PIPE,
            stderr=warm.PIPE,
            text=True,
        )
        for rank in range(n)
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_a_plain_process_says_what_happened_and_exits_promptly(name: str) -> None:
    fault, timeout, expected = FAULTS[name]
    ranks = start_ranks(fault, timeout)
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        start = time.monotonic()
        _, complaint = ranks[0].communicate(timeout=50)
        took = time.monotonic() - start
        assert ranks[0].returncode == 1
        assert re.search(expected, complaint), complaint  # whichever collective met it first
        # Loaded machines are slow, but nothing here may have waited for the long timeout.
        assert took < 25
        if name in ("dies", "parts", "raises"):
            ranks[1].communicate(timeout=50)
            assert ranks[1].returncode == (3 if name == "dies" else 1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_chunk_longer_than_expected_is_an_error_that_says_so() -> None:
    """Gloo would end the process that it is sent to."""

    def body() -> str:
        ranks = everyone()
        chunks = [torch.ones(3 + 50 * (ranks.rank == 1)) for _ in range(2)]
        try:
            ranks.all_to_all(chunks, sizes=[3, 53 if ranks.rank == 1 else 3]).wait()
        except DesyncError as error:
            return str(error)
        return ""

    message = launch(body, nprocs=2, timeout=5)[0]
    assert "rank 1 sends 53 elements, this rank expects 3" in message


def test_a_rank_that_leaves_while_a_meeting_closes_is_not_missed_there(monkeypatch: Any) -> None:
    """The last to come has done the collective for all, and has not said so yet."""
    hold = simulation.Fabric._hold

    def held(self: simulation.Fabric, meeting: simulation.Meeting, serve: Any) -> None:
        hold(self, meeting, serve)
        self._time_out(meeting)
        self.stop(1, "for good")

    monkeypatch.setattr(simulation.Fabric, "_hold", held)

    def body() -> list[float]:
        return everyone().all_reduce(torch.ones(2), label="ones").wait().tolist()

    assert simulate(2)(body)() == [[2.0, 2.0]] * 2
