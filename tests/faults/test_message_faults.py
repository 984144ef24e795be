"""Messages that nobody expects, and ranks that die or fall silent: an error on every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zfunc as zf
from zfunc.errors import DesyncError
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.launching import launch
from zfunc.ranks.point_to_point import receive, send
from zfunc.ranks.transfers import TensorSpec

PAIR = TensorSpec((2,), torch.float32)
LARGE = TensorSpec((6_000_000,), torch.float32)
WAYS = ["1", "0"]  # through shared memory, or over sockets and gloo


def parting(ranks: Group, ours: tuple[str, TensorSpec], theirs: tuple[str, TensorSpec]) -> None:
    """Rank 1 expects something else than rank 0 sends; rank 2 waits for rank 1.

    Ranks 1 and 2 have no connection but the one that the receive makes.
    """
    if ranks.rank == 2:
        coming = receive(ranks, PAIR, 1, label="next")
    dist.barrier()  # torch's
    if ranks.rank == 2:
        coming.wait()
    if ranks.rank == 1:
        receive(ranks, theirs[1], 0, label=theirs[0]).wait()
    send(ranks, torch.zeros(ours[1].shape, dtype=ours[1].dtype), 1, label=ours[0])
    receive(ranks, PAIR, 1, label="answer").wait()


def all_parting() -> list[tuple[str, float]]:
    """Each case on a world that has recovered from the one before."""
    found = []
    for ours, theirs in MISMATCHES:
        ranks = group(None, "data")
        began = time.monotonic()
        with pytest.raises(DesyncError) as caught:
            parting(ranks, ours, theirs)
        took = time.monotonic() - began
        with pytest.raises(DesyncError, match="failed before"):
            send(ranks, torch.ones(1), 0)
        found.append((str(caught.value), took))
        dist.barrier()  # nobody hears of it because another one goes on
        zf.recover_world()
    ranks = group(None, "data")
    coming = receive(ranks, PAIR, (ranks.rank + 1) % 3, label="anew")
    send(ranks, torch.full((2,), float(ranks.rank)), (ranks.rank - 1) % 3, label="anew")
    assert coming.wait()[0].tolist() == [(ranks.rank + 1) % 3] * 2
    return found


MISMATCHES = [
    (("act 1", PAIR), ("act 2", PAIR)),
    (("act", LARGE), ("act", PAIR)),
    (("act", PAIR), ("act", LARGE)),
    (("act", LARGE), ("act", TensorSpec(LARGE.shape, torch.int32))),
]


@pytest.mark.parametrize("shared", WAYS)
def test_a_message_that_was_not_expected_is_told_on_all_ranks(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    for rank, found in enumerate(launch(all_parting, nprocs=3, timeout=60)):
        for (message, took), ((label, spec), (other, another)) in zip(
            found, MISMATCHES, strict=True
        ):
            assert f"message({label!r}) of {spec}" in message, (rank, message)
            assert f"message({other!r}) of {another}" in message, (rank, message)
            assert took < 20, "found by waiting, not by looking"


def in_a_line(folder: str, how: str, numel: int) -> None:
    """The last rank ends while the others wait: each for the next one, and it sends much."""
    ranks = group(None, "data")
    last, like = ranks.size - 1, TensorSpec((numel,), torch.float32)
    try:
        handles = []
        if ranks.rank < last:
            handles.append(send(ranks, torch.ones(numel), ranks.rank + 1, label="act"))
        if ranks.rank:
            receive(ranks, like, ranks.rank - 1, label="act").wait()
        if ranks.rank == last:
            if how == "dies":
                os._exit(7)
            if how == "raises":
                raise ZeroDivisionError("on purpose")
            if how == "returns":
                return
            time.sleep(30)
        receive(ranks, like, ranks.rank + 1, label="grad").wait()
    except DesyncError as error:
        Path(folder, str(ranks.rank)).write_text(f"{time.time()} {error}")
        time.sleep(3)  # the others hear of it from this rank, not from its end
        raise


@pytest.mark.parametrize("shared", WAYS)
@pytest.mark.parametrize(("how", "timeout"), [("dies", 60), ("raises", 60), ("returns", 60)])
def test_when_one_rank_goes_all_others_hear_of_it(
    how: str, timeout: float, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFUNC_SHARED_MEMORY", shared)
    cause: Any = {
        "dies": (DesyncError, "rank 3 exited with status 7"),
        "raises": (ZeroDivisionError, "on purpose"),
        "returns": (DesyncError, "rank 3 has returned and will not take part"),
    }[how]
    numel = 6_000_000 if shared == "0" else 1000
    with pytest.raises(cause[0], match=cause[1]):
        launch(in_a_line, str(tmp_path), how, numel, nprocs=4, timeout=timeout)
    if how == "raises":  # which ends the others
        return
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(told) == ["0", "1", "2"]
    assert all("receive('grad')" in text for text in told.values()), told
    times = [float(text.split()[0]) for text in told.values()]
    assert max(times) - min(times) < 3


def silent() -> str:
    ranks = group(None, "data")
    ranks.barrier()
    if ranks.rank == 1:
        time.sleep(5)
        return ""
    with pytest.raises(DesyncError) as caught:
        receive(ranks, LARGE, 1, label="grad").wait()
    return str(caught.value)


def test_a_rank_that_sleeps_is_named_after_the_timeout() -> None:
    message = launch(silent, nprocs=2, timeout=1.5)[0]
    assert message.startswith("receive('grad'): rank 1 did not take part within 1.5 s")


def unasked() -> str:
    """Rank 0 waits until what it sends may change; rank 1 never asks for it, and dies."""
    ranks = group(None, "data")
    ranks.barrier()
    if ranks.rank == 1:
        time.sleep(1)
        return ""
    handle = send(ranks, torch.ones(LARGE.shape), 1, label="act")
    assert not handle.done
    with pytest.raises(DesyncError) as caught:
        handle.wait()
    return str(caught.value)


def test_a_send_that_nobody_asks_for_is_an_error() -> None:
    began = time.monotonic()
    message = launch(unasked, nprocs=2, timeout=120)[0]
    assert message.startswith("send('act'): rank 1 has returned and will not take part"), message
    assert time.monotonic() - began < 60
