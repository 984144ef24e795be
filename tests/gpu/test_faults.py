"""The harness proves that it sees: each fault that is put into a step is reported.

Faults are put in at torch's boundary (an event that nobody waits for, a copy that is not page-
locked), so that they stay where the project's own files change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.gpu import collectives, ranks, streams
from tests.gpu.cuda import Cuda, active
from tests.gpu.record import Report
from tests.gpu.training import GPT, Trained, trained
from zfunc import optim

TX = optim.adamw(1e-3)


def stage3(step: Any) -> Any:
    return zf.shard(zf.donate(step), stage=3, unit_bytes=1 << 12)


def offloaded(step: Any) -> Any:
    return zf.offload(stage3(step))


@contextlib.contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    had = vars(place)[name]
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, had)


def run(wrap: Callable[[Any], Any], fault: Any = None) -> list[Report]:
    with Cuda(strict=False), fault or contextlib.nullcontext():
        return trained(wrap, TX).reports


def races(reports: list[Report]) -> int:
    return sum(report.count("race") for report in reports)


def no_event_wait() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(replaced(streams.Event, "wait", lambda self, stream=None: None))
    stack.enter_context(replaced(streams.Event, "synchronize", lambda self: None))
    return stack


def no_stream_wait() -> Any:
    return replaced(streams.Stream, "wait_stream", lambda self, other: None)


def no_synchronisation() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(replaced(streams.Stream, "synchronize", lambda self: None))
    stack.enter_context(replaced(streams.Event, "synchronize", lambda self: None))
    return stack


def no_record_stream() -> Any:
    """Set where torch's own method would be; the harness has put its own there already."""
    return replaced(Tensor, "record_stream", lambda self, stream: None)


FAULTS = {
    "event wait": no_event_wait,
    "stream wait": no_stream_wait,
    "stream synchronisation": no_synchronisation,
    "record_stream": no_record_stream,
}


def test_without_a_fault_there_is_no_race() -> None:
    assert races(run(offloaded)) == races(run(stage3)) == 0


def captured(step: Any) -> Any:
    """Whose state was made on another stream than the one that the step runs on."""
    return zf.captured(stage3(step))


@pytest.mark.parametrize("name", FAULTS)
def test_a_missing_order_is_a_race(name: str) -> None:
    wrap, tx = (captured, optim.sgd(0.1)) if name == "record_stream" else (offloaded, TX)
    with Cuda(strict=False):
        assert races(trained(wrap, tx).reports) == 0
    with Cuda(strict=False), FAULTS[name]():
        assert races(trained(wrap, tx).reports) > 0


def _without_work_wait() -> int:
    def done(self: Any, timeout: Any = None) -> bool:
        self.finish()
        return True

    with replaced(collectives.Issued, "wait", done):
        return races(trained(stage3, TX).reports)


def test_a_missing_wait_for_a_collective_is_a_race() -> None:
    assert min(ranks.launch(_without_work_wait)) > 0


def test_memory_freed_under_another_stream_is_a_race() -> None:
    with Cuda() as cuda:
        side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        del x
        assert cuda.take().count("race") == 1
        kept = torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y += kept
        kept.record_stream(side)
        del kept
        assert cuda.take().count("race") == 0


def test_the_host_must_not_write_what_is_still_being_copied() -> None:
    with Cuda() as cuda:
        host = torch.ones(8).pin_memory()
        up = host.to("cuda", non_blocking=True)
        host.zero_()
        assert cuda.take().count("race") == 1
        up = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        host.zero_()
        assert cuda.take().count("race") == 0 and up.is_cuda


def test_parts_of_an_arena_are_apart() -> None:
    with Cuda() as cuda:
        arena = torch.zeros(64, pin_memory=True)
        up = arena[:32].to("cuda", non_blocking=True)
        arena[32:].fill_(1.0)
        assert cuda.take().count("race") == 0
        arena[31:].fill_(1.0)
        assert cuda.take().count("race") == 1 and up.is_cuda


def test_registered_memory_is_page_locked() -> None:
    with Cuda() as cuda:
        plain = torch.zeros(64)
        torch.cuda.cudart().cudaHostRegister(plain.data_ptr(), plain.nbytes, 0)
        assert plain[3:].is_pinned() and cuda.report.pinned_bytes() == 256
        plain.to("cuda", non_blocking=True)
        assert cuda.report.host_waits() == []
        plain.zero_()
        assert cuda.report.count("race") == 1


def with_loss(loss: Callable[..., Any]) -> Trained:
    from dataclasses import replace

    with Cuda():
        return trained(stage3, TX, replace(GPT, loss=loss))


def test_a_hidden_item_is_a_wait() -> None:
    def hidden(params: Any, batch: Any) -> Any:
        loss = GPT.loss(params, batch)
        return loss * (1.0 if float(loss.detach()) > 0 else 2.0)

    plain, found = with_loss(GPT.loss), with_loss(hidden)
    for before, report in zip(plain.reports, found.reports, strict=True):
        assert len(report.host_waits()) == len(before.host_waits()) + 1


def test_a_pageable_copy_is_a_wait() -> None:
    weights = torch.ones(5)

    def pageable(params: Any, batch: Any) -> Any:
        return GPT.loss(params, batch) * weights.to("cuda", non_blocking=True).mean()

    plain, found = with_loss(GPT.loss), with_loss(pageable)
    assert len(found.reports[1].host_waits()) == len(plain.reports[1].host_waits()) + 1
    assert found.reports[1].count("pageable") == 1


def test_a_tensor_left_on_the_host_raises() -> None:
    weights = torch.ones(8)

    def mixed(params: Any, batch: Any) -> Any:
        return GPT.loss(params, batch) + (batch[0, :8].float() * weights).mean() * 0

    with pytest.raises(RuntimeError, match="same device"):
        with_loss(mixed)


def test_a_kernel_is_not_launched_on_the_host() -> None:
    from zfunc import kernels

    with Cuda():
        x = torch.ones(4, 8, device="cuda")
        with pytest.raises((RuntimeError, ValueError), match="device"):
            kernels.rms_norm(x, torch.ones(8), 1e-6)


def test_what_changes_from_step_to_step_is_named() -> None:
    with Cuda(arguments=True) as cuda:
        x, reports = torch.ones(4, device="cuda"), []
        for factor in (2.0, 2.0, 3.0):
            cuda.take()
            x.mul_(factor)
            reports.append(cuda.take())
        assert reports[0].difference(reports[1]) == ""
        assert "2.0, then 3.0" in reports[1].difference(reports[2])


def test_a_batch_in_other_memory_is_named() -> None:
    with Cuda(arguments=True) as cuda:
        reports, held = [], []
        for _ in range(2):
            held.append(torch.ones(4, device="cuda"))
            cuda.take()
            held[-1].mul_(2.0)
            reports.append(cuda.take())
        assert "argument 0" in reports[0].difference(reports[1])


def test_backward_knows_no_context_variable() -> None:
    import contextvars

    var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=0)
    var.set(3)
    seen: list[int] = []
    with Cuda():
        x = torch.ones(2, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(var.get()))
        y.sum().backward()
        assert seen == [0] and active().report.launches() > 0
