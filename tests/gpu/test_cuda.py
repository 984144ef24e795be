"""What the pretended device answers, and that nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.cuda import Cuda


def test_tensors_say_where_they_are() -> None:
    with Cuda() as cuda:
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = (x * 2).sum()
        assert [str(z.device) for z in (x, y, y.detach(), x[1:])] == ["cuda:0"] * 4
        assert type(y) is Tensor and y.is_cuda and not y.cpu().is_cuda
        y.backward()
        assert x.grad is not None and x.grad.is_cuda and x.grad.tolist() == [2.0] * 3
        assert torch.empty_like(x).is_cuda and not torch.empty_like(x, device="cpu").is_cuda
        assert torch.vmap(lambda row: row.device.type == "cuda" and row)(x).is_cuda
        assert cuda.report.faults() == []
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0


def test_nothing_stays_behind() -> None:
    def names() -> list[object]:
        places = (Tensor, torch, torch.cuda, torch.accelerator, torch.autograd, torch.distributed)
        return [sorted((k, id(v)) for k, v in vars(place).items()) for place in places]

    before = names()
    with pytest.raises(RuntimeError, match="same device"), Cuda():
        torch.ones(2, device="cuda") + torch.ones(2)
    assert names() == before


def test_mixed_devices_raise_as_on_cuda() -> None:
    with Cuda() as cuda:
        x, host = torch.ones(3, device="cuda"), torch.ones(3)
        for mixes in (
            lambda: x + host,
            lambda: torch.cat([x, host]),
            lambda: torch.stack([x.sum(), host.sum()]),
            lambda: torch._foreach_add([x], [host]),
            lambda: torch.where(x > 0, x, host),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixes()
        assert (x * host.sum()).tolist() == [3.0] * 3  # a number of the host travels along
        assert cuda.report.count("mixed") == 5


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "down to pageable memory": lambda x: x.to("cpu", non_blocking=True),
    "up, blocking": lambda x: torch.ones(3).to("cuda"),
    "a tensor made there": lambda x: torch.tensor([1.0], device="cuda"),
    "a number made there": lambda x: torch.as_tensor(1.0, device="cuda"),
    "a mask as an index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "copied down": lambda x: torch.empty(3).copy_(x),
    "a list": lambda x: x.tolist(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "a stream's": lambda x: torch.cuda.current_stream().synchronize(),
    "pageable": lambda x: torch.ones(3).to("cuda", non_blocking=True),
}
NO_WAITS = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "made there": lambda x: torch.full((3,), 2.0, device="cuda"),
    "a mask that is filled": lambda x: x.masked_fill_(x > 2, 0.0),
    "set by a mask": lambda x: x.__setitem__(x > 2, 0.0),
    "indices": lambda x: x[torch.arange(2, device="cuda")],
    "pinned up": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "pinned down": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "sorted": lambda x: x.sort(),
}


@pytest.mark.parametrize("name", [*WAITS, *NO_WAITS])
def test_what_waits_for_the_device_is_seen_and_nothing_else(name: str) -> None:
    with Cuda() as cuda:
        x = torch.ones(3, device="cuda")
        cuda.take()
        (WAITS | NO_WAITS)[name](x)
        report = cuda.take()
        assert len(report.host_waits()) == (name in WAITS) and report.faults() == []


def test_a_stream_of_an_earlier_session_knows_nothing_of_this_one() -> None:
    """The project keeps its streams; what they saw in one session is no order in the next."""
    side: Any = None

    def races(waits: bool, times: int) -> int:
        nonlocal side
        with Cuda() as cuda:
            side = side or torch.cuda.Stream()
            assert cuda.actors[side.name] is side
            for _ in range(times):
                x = torch.ones(3, device="cuda")
                if waits:
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.add_(1)
                torch.cuda.current_stream().wait_stream(side)
            return cuda.report.count("race")

    assert [races(False, 3), races(True, 30), races(False, 3)] == [3, 0, 3]
