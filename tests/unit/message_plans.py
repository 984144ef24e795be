"""Random programs of messages that are valid, and what every rank must get from them.

A plan is one order of all that happens: receives are posted, messages sent and waited for, and now
and then all ranks add something up. In this order whatever waits comes behind what it waits for; a
rank runs its own part of it. So no rank may hang, however fast the others are.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from zfunc.ranks.axes import group
from zfunc.ranks.comm import ledger
from zfunc.ranks.point_to_point import message_bytes, receive, send
from zfunc.ranks.transfers import TensorSpec

__all__ = ["Plan", "carry_out", "check", "drawn"]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
POST, SEND, WAIT, SENT, SUM = "post", "send", "wait", "sent", "sum"


@dataclass(frozen=True)
class Packet:
    """One message of a plan."""

    source: int
    to: int
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Plan:
    """What happens, in one order.

    Attributes:
        events: a kind, and the message, or the number of a sum.
    """

    ranks: int
    packets: tuple[Packet, ...]
    events: tuple[tuple[str, int], ...]


def drawn(random: Random, ranks: int, packets: int, numels: list[int]) -> Plan:
    """A plan; some messages are never waited for by their senders or receivers."""
    made = tuple(_packet(random, ranks, numels) for _ in range(packets))
    after: dict[tuple[str, int], set[tuple[str, int]]] = {}
    latest: dict[tuple[str, int, int], tuple[str, int]] = {}
    for i, packet in enumerate(made):
        for kind in (POST, SEND):  # those of one direction in their order
            key = kind, packet.source, packet.to
            after[kind, i] = {latest[key]} if key in latest else set()
            latest[key] = kind, i
        if random.random() < 0.9:
            after[WAIT, i] = {(POST, i), (SEND, i)}
        if random.random() < 0.5:
            after[SENT, i] = {(POST, i), (SEND, i)}
    for k in range(random.randrange(3)):
        after[SUM, k] = {(SUM, k - 1)} if k else set()
    events: list[tuple[str, int]] = []
    while after:
        ready = sorted(event for event, before in after.items() if before <= set(events))
        event = random.choice(ready)
        del after[event]
        events.append(event)
    return Plan(ranks, made, tuple(events))


def _packet(random: Random, ranks: int, numels: list[int]) -> Packet:
    shapes = [
        (random.choice(numels),) if random.random() < 0.8 else random.choice([(), (2, 0), (3, 5)])
        for _ in range(random.choice([0, 1, 1, 2, 3]))
    ]
    specs = tuple(TensorSpec(shape, random.choice(DTYPES)) for shape in shapes)
    return Packet(random.randrange(ranks), random.randrange(ranks), specs)


def contents(plan: Plan, i: int) -> list[Tensor]:
    """What message ``i`` carries; other bits for each."""
    found = []
    for k, spec in enumerate(plan.packets[i].specs):
        n = spec.nbytes // spec.dtype.itemsize
        x = torch.sin(torch.arange(n, dtype=torch.float64) + 7 * i + k) * 100
        x = x > 0 if spec.dtype is torch.bool else x.abs() if spec.dtype is torch.uint8 else x
        found.append(x.to(spec.dtype).view(spec.shape))
    return found


def carry_out(plan: Plan) -> tuple[dict[int, list[Tensor]], dict[str, Any]]:
    """Run this rank's part; what came, by message, and what the ledger has counted."""
    ranks = group(None, "data")
    coming: dict[int, Any] = {}
    going: dict[int, Any] = {}
    came: dict[int, list[Tensor]] = {}
    memory: dict[int, list[Tensor]] = {}
    with ledger() as led:
        for kind, i in plan.events:
            if kind == SUM:
                total = torch.full((3,), float(ranks.rank + i))
                ranks.all_reduce(total, label=f"sum {i}").wait()
                assert total[0] == sum(rank + i for rank in range(plan.ranks))
                continue
            packet = plan.packets[i]
            if kind == POST and packet.to == ranks.rank:
                like = list(packet.specs)
                coming[i] = receive(ranks, like, packet.source, label=f"packet {i}")
            elif kind == SEND and packet.source == ranks.rank:
                memory[i] = contents(plan, i)
                going[i] = send(ranks, memory[i], packet.to, label=f"packet {i}")
            elif kind == WAIT and packet.to == ranks.rank:
                came[i] = coming[i].wait()
                assert coming[i].done and coming[i].wait() is came[i]
            elif kind == SENT and packet.source == ranks.rank:
                assert going[i].wait() is None
                for x in memory[i]:  # it may change from now on
                    x.zero_()
        ranks.barrier()  # whoever returns earlier is not there for what it did not wait for
    counted = {
        "send": led.by_kind["send"],
        "labels": {k: v for k, v in led.by_label.items() if k.startswith("packet")},
        "calls": sum(led.calls_by_label[k] for k in led.calls_by_label if k.startswith("packet")),
        "headers": sum(v for k, v in led.headers_by_label.items() if k.startswith("packet")),
    }
    return came, counted


def expected(plan: Plan, rank: int) -> tuple[dict[int, list[Tensor]], dict[str, Any]]:
    """The same, from the plan alone."""
    waited = {i for kind, i in plan.events if kind == WAIT}
    packets = list(enumerate(plan.packets))
    came = {i: contents(plan, i) for i, p in packets if p.to == rank and i in waited}
    sent = {i: message_bytes(p.specs) for i, p in packets if p.source == rank != p.to}
    return came, {
        "send": sum(sent.values()),
        "labels": {f"packet {i}": nbytes for i, nbytes in sent.items()},
        "calls": len(sent),
        "headers": 16 * len(sent),
    }


def check(plan: Plan, rank: int, found: tuple[dict[int, list[Tensor]], dict[str, Any]]) -> None:
    """Every bit, and every byte."""
    came, counted = found
    should, count = expected(plan, rank)
    assert counted == count
    assert came.keys() == should.keys()
    for i, tensors in should.items():
        assert [(x.dtype, x.shape) for x in came[i]] == [(x.dtype, x.shape) for x in tensors]
        assert all(torch.equal(x, y) for x, y in zip(came[i], tensors, strict=True)), i
