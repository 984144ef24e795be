"""Collectives run while something is computed: what is done between their issue and their wait."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zfunc as zf
from zfunc import optim
from zfunc.ranks.connected import ConnectedGroup, PendingHandle

Tree = Any
WIDTH = 16
UNIT = WIDTH * WIDTH * 4
FREE = ("view", "detach", "alias", "as_strided", "slice", "select", "t", "transpose", "empty")
FEW = 3  # as much goes by where nothing is computed: an index, a scale


@dataclass
class Span:
    """One collective: how many operations had run when it was issued, and when it was awaited."""

    what: str
    issued: int
    awaited: int | None = None

    @property
    def beside(self) -> int:
        assert self.awaited is not None, f"nobody waited for {self.what}"
        return self.awaited - self.issued


@dataclass
class Record:
    """What one rank does."""

    operations: int = 0
    spans: list[Span] = field(default_factory=list)
    of: dict[int, Span] = field(default_factory=dict)
    silent: bool = False


class Counted(TorchDispatchMode):
    """Counts the operations of one rank that a device would have to run."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.record.silent and func._overloadpacket.__name__ not in FREE:
            self.record.operations += 1
        return func(*args, **(kwargs or {}))


HERE = threading.local()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles that tell the record of their rank when they are issued and awaited."""
    init, wait, call = PendingHandle.__init__, PendingHandle.wait, ConnectedGroup._call

    def named(self: Any, kind: str, label: str, *rest: Any) -> Any:
        HERE.label = f"{kind} {label}"
        return call(self, kind, label, *rest)

    def issued(self: Any, *args: Any) -> None:
        record: Record = HERE.record
        span = Span(HERE.label, record.operations)
        record.spans.append(span)
        record.of[id(self)] = span
        self._kept = record.of  # so that no other handle gets its number
        record.silent = True
        init(self, *args)
        record.silent = False

    def awaited(self: Any) -> Any:
        record: Record = HERE.record
        span = record.of.get(id(self))
        if span is not None and span.awaited is None:
            span.awaited = record.operations
        record.silent = True
        try:
            return wait(self)
        finally:
            record.silent = False

    monkeypatch.setattr(ConnectedGroup, "_call", named)
    monkeypatch.setattr(PendingHandle, "__init__", issued)
    monkeypatch.setattr(PendingHandle, "wait", awaited)


def params(depth: int) -> Tree:
    def matrix(seed: int) -> Tensor:
        return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / 4

    layers = [{name: matrix(4 * i + k) for k, name in enumerate("abcd")} for i in range(depth)]
    return {"first": matrix(1000), "blocks": zf.Layers(layers), "last": matrix(1001)}


def block(p: Tree, x: Tensor) -> Tensor:
    for name in "abcd":
        x = torch.tanh(x @ p[name]) + x * 0.5
    return x


def loss(params: Tree, x: Tensor) -> Tensor:
    x = torch.tanh(x @ params["first"]).relu() * 0.5
    return (zf.scan(block, params["blocks"], x) @ params["last"]).square().mean()


def third_step(stage: int, depth: int, **how: Any) -> tuple[list[Span], str]:
    """The collectives that a third step ends on rank 0, in the order of issue, and what it says."""

    def run() -> tuple[list[Span], str]:
        record = HERE.record = Record()
        tx = optim.adamw(0.01)
        plain = zf.donate(zf.train_step(loss, tx))
        step = zf.shard(plain, stage=stage, unit_bytes=UNIT, **how)
        with Counted(record):
            state = step.place(zf.TrainState.create(params(depth), tx))
            for i in range(3):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))
                before = {id(span) for span in record.spans if span.awaited is not None}
                state, _ = step(state, x)
        ended = [s for s in record.spans if s.awaited is not None and id(s) not in before]
        return ended, str(step.describe())

    return zf.simulate(2)(run)()[0]


def exposed(spans: list[Span]) -> list[str]:
    """What has hardly anything beside it; losses and norms do not count."""
    labels = ("gather", "reduce", "join")
    found = [s.what for s in spans if s.what.split()[1] in labels and s.beside <= FEW]
    return list(dict.fromkeys(found))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("depth", [4, 12])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_units_of_a_layer_travel_together_at_stage_3(depth: int, prefetch: int) -> None:
    spans, text = third_step(3, depth, prefetch=prefetch)
    gathers = [s for s in spans if " gather " in s.what]
    assert sum(" gather blocks.0[" in s.what for s in gathers) == 8  # forward and backward
    last = [s for s in gathers if f" gather blocks.{depth - 1}[" in s.what]
    assert len(last) == 4  # backward begins with it: it is kept
    for what in exposed(spans):
        forward = ("all_gather gather root", "all_gather gather blocks.0[")
        backward = ("reduce_scatter reduce root", "reduce_scatter reduce blocks.0[")
        assert what.startswith((*forward, *backward)), what
    backward = [s for s in gathers if " gather blocks.0[" in s.what][4:]
    assert all(s.beside > FEW for s in backward)
    ahead, leaving = (int(word) for word in text.split("under way at most:")[1].split()[0:4:3])
    assert 4 * UNIT <= ahead <= 4 * UNIT * (prefetch + 1)
    assert UNIT <= leaving <= (4 * depth + 2) * UNIT


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_of_new_parameters_run_beside_the_next_forward_pass(stage: int) -> None:
    spans, _ = third_step(stage, 4)
    joins = [s for s in spans if " join " in s.what]
    assert len(joins) == 2 + 4 * 4  # the second step's, each awaited once
    for what in exposed(spans):
        root = ("all_gather join root", "reduce_scatter reduce root")
        assert what.startswith((*root, "reduce_scatter reduce blocks.0[")), what
    assert [s.awaited for s in joins] == sorted(s.awaited or 0 for s in joins)  # as each enters
    assert len({s.awaited for s in joins}) > 4


def test_what_is_under_way_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two units ahead, and two on their way to their owners."""
    from zfunc.engine import passes, plans

    monkeypatch.setattr(plans, "AHEAD_BYTES", 2 * UNIT)
    monkeypatch.setattr(passes, "IN_FLIGHT_BYTES_LEAN", 2 * UNIT)
    HERE.record = Record()
    text = third_step(3, 4, prefetch=3)[1]
    assert f"under way at most: {2 * UNIT} bytes ahead, {2 * UNIT} of gradients" in text
