"""Messages between GPUs that are not there: no race, no host wait, a communicator per direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cuda import active
from zfunc.errors import DesyncError, DeviceError
from zfunc.ranks.axes import group
from zfunc.ranks.comm import ledger
from zfunc.ranks.point_to_point import connect, receive, send
from zfunc.ranks.transfers import TensorSpec
from zfunc.ranks.world import unchecked

SHAPES = [TensorSpec((64, 8), torch.float32), TensorSpec((0,), torch.int64)]
SHAPES += [TensorSpec((5,), torch.bool), TensorSpec((), torch.complex64)]


def contents(rank: int, k: int) -> list[Tensor]:
    """Made on the device, without a wait."""
    return [torch.full(x.shape, rank + k, dtype=x.dtype, device="cuda") for x in SHAPES]


def traded(steps: int, keep: bool) -> dict[str, Any]:
    """A step in which both ranks send before they receive, with work before and behind."""
    pipe = group(None, "data")
    peer = 1 - pipe.rank
    connect(pipe, [(0, 1), (1, 0)])
    weight, came, handles = torch.ones(8, 8, device="cuda"), [], []
    active().take()
    with ledger() as led:
        for step in range(steps):
            with unchecked():
                coming = [receive(pipe, SHAPES, peer, label=f"act {k}") for k in range(4)]
                for k in range(4):
                    act, *more = contents(pipe.rank, k + step)
                    handles.append(send(pipe, [act @ weight, *more], peer, label=f"act {k}"))
                for handle in coming:
                    [x, _, flags, number] = handle.wait()
                    came.append((x @ weight).sum() + flags.sum() + number.real)
                if not keep:  # what was sent is written over
                    for handle in handles:
                        handle.wait()
                    handles.clear()
    report = active().take()
    return {
        "came": torch.stack(came).tolist(),
        "faults": [str(row) for row in report.faults()],
        "waits": [str(row) for row in report.host_waits()],
        "groups": {(row.what, row.group) for row in report.collectives()},
        "labels": {row.label for row in report.collectives()},
        "bytes": dict(led.by_kind),
    }


@pytest.mark.parametrize("keep", [False, True])
def test_messages_have_streams_of_their_own_and_no_host_waits(keep: bool) -> None:
    steps = 3
    found = ranks.launch(traded, steps, keep)
    for rank, it in enumerate(found):
        values = [1 - rank + k + step for step in range(steps) for k in range(4)]
        assert it["came"] == [64 * 64 * 8.0 * v + 5 * (v > 0) + v for v in values]
        assert it["faults"] == [] and it["waits"] == []
        sends = {where for what, where in it["groups"] if what == "send"}
        comes = {where for what, where in it["groups"] if what == "recv"}
        assert len(sends) == len(comes) == 1 and not sends & comes
        assert it["labels"] == {f"act {k}" for k in range(4)}
        nbytes = sum(x.nbytes for x in SHAPES)
        assert it["bytes"] == {"send": 4 * steps * nbytes, "header": 4 * steps * 16}
    # Rank 0's communicator for what goes out is rank 1's for what comes in: made in one order.
    (there, back), (back_1, there_1) = (
        [{where for what, where in it["groups"] if what == kind} for kind in ("send", "recv")]
        for it in found
    )
    assert there == there_1 and back == back_1


def overwritten() -> int:
    """A sender that does not wait writes over what it sends."""
    pipe = group(None, "data")
    connect(pipe, [(0, 1), (1, 0)])
    active().take()
    coming = receive(pipe, SHAPES[0], 1 - pipe.rank)
    x = torch.ones(64, 8, device="cuda")
    handle = send(pipe, x, 1 - pipe.rank)
    x.zero_()
    coming.wait()
    handle.wait()
    return active().take().count("race")


def test_the_harness_sees_what_is_written_over_before_it_was_sent() -> None:
    assert all(races > 0 for races in ranks.launch(overwritten, alone=True))


def early() -> int:
    """A receiver that does not wait reads what has not come."""
    pipe = group(None, "data")
    connect(pipe, [(0, 1), (1, 0)])
    active().take()
    coming = receive(pipe, SHAPES[0], 1 - pipe.rank)
    handle = send(pipe, torch.ones(64, 8, device="cuda"), 1 - pipe.rank)
    [x] = coming._transfer.tensors  # type: ignore[attr-defined]
    x.sum()
    coming.wait()
    handle.wait()
    return active().take().count("race")


def test_the_harness_sees_what_is_read_before_it_has_come() -> None:
    assert all(races > 0 for races in ranks.launch(early, alone=True))


def parted() -> list[str]:
    pipe = group(None, "data")
    told = []
    if pipe.rank == 0:
        with pytest.raises(DeviceError, match=r"send\('x'\): no communicator.*from rank 0 to 1"):
            send(pipe, torch.ones(2, device="cuda"), 1, label="x").wait()
    connect(pipe, [(0, 1), (1, 0)])
    # On the host, as without NCCL.
    coming = receive(pipe, torch.ones(3), 1 - pipe.rank, device="cpu", label="host")
    send(pipe, torch.ones(3), 1 - pipe.rank, label="host")
    assert not coming.wait()[0].is_cuda
    # To itself, on the device.
    send(pipe, torch.ones(3, device="cuda"), pipe.rank, label="mine")
    assert receive(pipe, torch.ones(3), pipe.rank, label="mine").wait()[0].is_cuda
    for late in (False, True):
        coming = receive(pipe, SHAPES, 1 - pipe.rank, label=f"expected by {pipe.rank}")
        send(pipe, contents(pipe.rank, 0), 1 - pipe.rank, label=f"sent by {pipe.rank}")
        with pytest.raises(DesyncError) as caught:
            _wait(coming, late)
        told.append(str(caught.value))
        zf.recover_world()
        pipe = group(None, "data")
        connect(pipe, [(1, 0), (0, 1)])
    return told


def _wait(coming: Any, late: bool) -> None:
    if late:
        with unchecked():
            coming.wait()
    coming.wait()


def test_what_was_not_expected_is_told_now_or_at_the_end_of_the_step() -> None:
    for rank, told in enumerate(ranks.launch(parted, alone=True)):
        for text in told:
            assert f"'expected by {rank}'" in text and f"'sent by {1 - rank}'" in text, text
