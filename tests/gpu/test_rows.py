"""Rows that differ among ranks that share work: seen without a wait, on the pretended GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import zfunc as zf
from tests.gpu import ranks
from tests.gpu.cuda import Cuda, active
from tests.gpu.training import GPT
from zfunc import optim
from zfunc.engine.meshed import Meshed
from zfunc.ranks.meshes import Mesh


@dataclass(frozen=True)
class Tensors(Meshed):
    """Asks for a tensor axis, and does nothing."""

    mesh: Mesh | None = None
    position: ClassVar[int] = 430

    @property
    def axes(self) -> Mapping[str, int]:
        return {"tensor": 2}


def run(bad: int | None, read: bool, tx: Any, wrap: Any = lambda f: f, steps: int = 5) -> Any:
    """What the host waited for in each step, what was wrong, and where the step raised."""
    cuda = active()
    assert cuda is not None
    step = zf.shard(zf.donate(wrap(zf.train_step(GPT.loss, tx))), stage=3, unit_bytes=1 << 12)
    step = step.wrap(Tensors())
    params = zf.tree.map(lambda x: x.to("cuda", non_blocking=False), GPT.params())
    state, waits, faults = step.place(zf.TrainState.create(params, tx)), [], []
    for i in range(steps):
        batch = GPT.batch(i)
        given = batch.flip(0) if i == bad and zf.rank() == 1 else batch
        given = given.to("cuda")
        cuda.take()
        try:
            state, metrics = step(state, given)
        except zf.PlacementError as error:
            return waits, faults, (i, str(error))
        report = cuda.take()
        waits.append([f"{row.what} at {row.where}" for row in report.host_waits()])
        faults += [str(row) for row in report.faults()]
        if read:
            float(metrics["loss"])
    torch.cuda.synchronize()
    return waits, faults, None


def _all() -> Any:
    tx = optim.adamw(1e-3)
    guarded = optim.skip_nonfinite(tx)
    return {
        "read": run(None, True, tx),
        "unread": run(None, False, tx),
        "guarded": run(None, True, guarded),
        "fp16": run(None, True, tx, lambda f: zf.precision(f, torch.float16, loss_scale=64.0)),
        "first": run(0, True, tx),
        "later": run(2, True, tx),
    }


def test_rows_are_looked_at_without_a_wait() -> None:
    for found in ranks.launch(_all):
        for name in ("read", "unread", "guarded", "fp16"):
            waits, faults, raised = found[name]
            assert (waits[1:], faults, raised) == ([[]] * 4, [], None), name


def test_other_rows_raise_on_all_ranks() -> None:
    told = [(found["first"][2], found["later"][2]) for found in ranks.launch(_all)]
    assert told[0] == told[1]
    (first, text), (later, _) = told[0]
    assert first == 0 and "step.local_batch" in text
    assert later == 3  # the call after: when the metrics of the one before had been read


def test_digests_where_tensors_lie_see_each_bit_and_place() -> None:
    from zfunc.ranks.digests import mixed_digest

    xs = [
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([2.0, 1.0], dtype=torch.float64),
        torch.tensor([1.0, 4.0], dtype=torch.float64),
        torch.tensor([1, 2]),
        torch.tensor([1, 2 + (1 << 40)]),
        torch.zeros(0),
    ]
    with Cuda() as cuda:
        there = [x.to("cuda") for x in xs]
        cuda.take()
        digests = [mixed_digest(x) for x in there]
        assert not cuda.take().host_waits()
        found = [int(d) for d in digests]
    assert len(set(found)) == len(found) and found == [int(mixed_digest(x)) for x in xs]
