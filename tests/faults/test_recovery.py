"""After an error in which ranks parted ``recover_world`` makes new groups, and training goes on."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests import warm
from tests.laws.cases import regression
from tests.laws.models import stack, stack_loss
from zfunc import optim
from zfunc.layout.replicated import Replicated
from zfunc.ranks.axes import group
from zfunc.ranks.transport import Collective, announced

F64 = torch.float64
TX = optim.adamw(0.02, weight_decay=0.1)
STEPS = 4
ERRORS = (zf.DesyncError, ZeroDivisionError)
HEARD = threading.Event()  # an error, on a simulated rank that has waited for a silent one


def faulty_loss(params: Any, batch: Any) -> Tensor:
    """Rank 1 does something else, or fails, at the beginning or at the end."""
    how, late = batch["fault"], batch["late"]
    if not late:
        _fault(how)
    loss = stack_loss(params, batch)
    if late:
        _fault(how)
    return loss


def _fault(how: str) -> None:
    if zf.rank() != 1:
        return
    if how == "parts":
        zf.psum(torch.ones(3))
    elif how == "raises":
        raise ZeroDivisionError("on purpose")


def trained(faults: dict[int, Any], wrap: Any) -> Any:
    """The numbers after a few steps; ``faults`` are by step, and each comes once."""
    step = wrap(zf.train_step(faulty_loss, TX))
    state = step.place(zf.TrainState.create(stack(F64), TX, key=3))
    losses, faults, errors = [], dict(faults), []
    while int(state.step) < STEPS:
        i = int(state.step)
        how, late = faults.get(i, [("", False)])[0]
        batch = {**zf.local_batch(regression(i, F64)), "fault": how, "late": late}
        if how == "sleeps" and zf.rank() == 1:
            assert HEARD.wait(60)
        try:
            new, metrics = step(state, batch)
        except ERRORS as error:
            HEARD.set()
            errors.append(f"{type(error).__name__}: {error}")
            faults[i] = faults[i][1:]
            faults[i] or faults.pop(i)
            zf.recover_world(state)
            continue
        state = new
        losses.append(metrics["loss"].item())
    text = step.describe()
    assert "state on this rank" in text
    whole = zf.full(step.unplace(state))
    return losses, [x.tolist() for x in zf.tree.leaves(whole.params)], errors


def stage(n: int) -> Any:
    return lambda step: zf.shard(step, stage=n, unit_bytes=1)


FAULTS = {2: [("parts", False)]}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_training_goes_on_as_if_nothing_had_happened(kind: int, n: int) -> None:
    """The fault comes first thing in a step, while the last one's gathers are under way."""
    right = zf.simulate(n, timeout=20)(trained)({}, stage(kind))
    found = zf.simulate(n, timeout=20)(trained)(FAULTS, stage(kind))
    for (losses, params, errors), (losses2, params2, none) in zip(found, right, strict=True):
        assert losses == losses2 and params == params2
        assert len(errors) == 1 and not none


TWICE = {0: [("raises", True)], 2: [("parts", True), ("raises", False)], 3: [("parts", False)]}


def test_again_and_again_and_after_an_exception_of_ones_own() -> None:
    """In the first step, twice in one, and in two that follow each other; nobody waits long."""
    right = zf.simulate(2, timeout=60)(trained)({}, stage(3))
    start = time.monotonic()
    found = zf.simulate(2, timeout=60)(trained)(TWICE, stage(3))
    assert [row[:2] for row in found] == [row[:2] for row in right]
    assert [len(errors) for *_, errors in found] == [4, 4]
    assert "on purpose" in found[0][2][0] and found[1][2][0].startswith("ZeroDivisionError")
    assert time.monotonic() - start < 60


def test_after_a_timeout() -> None:
    right = zf.simulate(2, timeout=20)(trained)({}, stage(2))
    HEARD.clear()
    found = zf.simulate(2, timeout=3)(trained)({1: [("sleeps", False)]}, stage(2))
    assert [row[:2] for row in found] == [row[:2] for row in right]
    assert "rank 1 did not take part within 3 s" in found[0][2][0]


def real_ranks() -> list[bool]:
    """Several runs in one world, whose groups fail and begin anew time and again."""
    out = []
    for kind in (1, 3):
        right = trained({}, stage(kind))
        found = trained(TWICE, stage(kind))
        assert len(found[2]) == 4, found[2]
        out.append(found[:2] == right[:2])
    return out


def test_real_ranks_go_on() -> None:
    start = time.monotonic()
    assert zf.launch(real_ranks, nprocs=2, timeout=300) == [[True, True]] * 2
    assert time.monotonic() - start < 250, "somebody waited for who had stopped"


def small(kind: int = 3, wrap: Any = None) -> tuple[Any, Any, Any]:
    """A step, its state after one call, and a batch."""
    step = (wrap or (lambda step: step))(stage(kind)(zf.train_step(faulty_loss, TX)))
    state = step.place(zf.TrainState.create(stack(F64), TX, key=3))
    batch = {**zf.local_batch(regression(0, F64)), "fault": "", "late": False}
    state, _ = step(state, batch)
    return step, state, batch


def refused(state: Any = None, **how: Any) -> str:
    with pytest.raises((zf.DesyncError, zf.DonatedStateError)) as caught:
        zf.recover_world(state, **how)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_hold_other_steps_are_named_and_may_come_again() -> None:
    def body() -> tuple[str, float]:
        step, state, batch = small()
        newer, _ = step(state, batch)
        text = refused(newer if zf.rank() == 2 else state)
        with pytest.raises(zf.DesyncError, match="failed before"):
            step(state, batch)
        zf.recover_world(state)
        again, _ = step(state, batch)
        return text, float(zf.tree.global_norm(zf.tree.map(torch.sub, again.params, newer.params)))

    for text, apart in zf.simulate(3, timeout=30)(body)():
        assert "ranks 0, 1: step 1" in text and "rank 2: step 2" in text
        assert apart == 0.0


def test_a_rank_that_gives_another_state_or_none_is_named() -> None:
    def body() -> tuple[str, str]:
        _, state, _ = small(0)
        other = state.replace(params={**state.params, "more": torch.zeros(1)})
        one = refused(state if zf.rank() else None)
        return one, refused(other if zf.rank() else state)

    for without, other in zf.simulate(2, timeout=30)(body)():
        assert "rank 0 gave no state" in without
        assert "different states (rank 0: kind" in other


def test_a_rank_that_does_not_come_is_named_and_may_come_to_the_next_meeting() -> None:
    """One that is late finds that the others have given that meeting up."""
    told = threading.Event()

    def body() -> str:
        ranks, text = group(None, "data"), ""
        ranks.barrier()
        if zf.rank() == 1:
            assert told.wait(60)
        else:
            text = refused(timeout=2)
            told.set()
        zf.recover_world()
        assert ranks.exchange(zf.rank()) == [0, 1, 2]
        return text

    found = zf.simulate(3, timeout=30)(body)()
    assert "rank 1 did not come" in found[0] and "rank 1 did not come" in found[2]


def test_a_rank_that_has_returned_is_named_at_once() -> None:
    def body() -> str:
        return "" if zf.rank() == 1 else refused({"step": 1})

    assert "rank 1 has returned" in zf.simulate(2, timeout=300)(body)()[0]


def test_not_within_a_step() -> None:
    step = zf.train_step(lambda params, batch: zf.recover_world() or stack_loss(params, batch), TX)
    with pytest.raises(zf.CompositionError, match="inside a step"):
        step(zf.TrainState.create(stack(F64), TX), regression(0, F64))


def test_a_state_that_was_written_over_on_a_rank_is_spent_on_all() -> None:
    """Rank 1 fails behind the step in which rank 0 does not: rank 0's old state is spent."""

    def body() -> str:
        step, state, batch = small(2, zf.donate)
        spoilt = {**batch, "fault": "raises"}
        with suppress(*ERRORS):
            step(state, spoilt if zf.rank() else batch)
        if zf.rank() == 0:  # where the step had gone further
            zf.transforms.donation.blank(state.step)
        text = refused(state)
        zf.recover_world()
        assert float(zf.psum(torch.ones(()))) == 2.0
        return text

    for text in zf.simulate(2, timeout=30)(body)():
        assert text.startswith("DonatedStateError") and "rank 0 no longer holds the state" in text
        assert "zf.restore" in text


def test_nothing_of_an_earlier_epoch_reaches_a_later_one() -> None:
    def body() -> list[Any]:
        ranks = group(None, "data")
        ranks.barrier()
        old, late = ranks._transport, torch.full((4,), float(zf.rank()))
        handle = ranks.all_reduce(late, label="before") if zf.rank() == 0 else None
        zf.recover_world()
        assert ranks._transport is not old and ranks is group(None, "data")
        if handle is not None:
            with pytest.raises(zf.DesyncError, match=r"zf\.recover_world"):
                handle.wait()
        if zf.rank() == 0:  # says something in the old group
            call = Collective("exchange", "late", announced("exchange", "late", ()), 1)
            with pytest.raises((zf.DesyncError, OSError)):
                for _ in old.exchange(call, b"late"):
                    pass
        return ranks.exchange(["new", zf.rank()])

    both = [[["new", 0], ["new", 1]]] * 2
    assert zf.simulate(2, timeout=20)(body)() == both
    assert zf.launch(body, nprocs=2, timeout=60) == both


def test_every_axis_of_a_mesh_goes_on() -> None:
    def body(fails: bool) -> Any:
        mesh = zf.mesh(data=2, tensor=2)
        step = zf.shard(zf.train_step(stack_loss, TX), stage=2, mesh=mesh, unit_bytes=1)
        state = step.place(zf.TrainState.create(stack(F64), TX))
        batch = zf.local_batch(regression(0, F64), mesh)
        state, _ = step(state, batch)
        beside = group(mesh, "tensor")
        beside.barrier()
        if fails:
            with pytest.raises(zf.DesyncError):
                beside.exchange(1, label=f"by {zf.rank()}")
            zf.recover_world(state)
        assert beside is group(mesh, "tensor") and len(beside.exchange(1)) == 2
        state, metrics = step(state, batch)
        return metrics["loss"].item(), [x.tolist() for x in zf.tree.leaves(zf.full(state).params)]

    assert zf.simulate(4, timeout=30)(body)(True) == zf.simulate(4, timeout=30)(body)(False)


@pytest.mark.parametrize("waits", [False, True])
def test_gathers_that_were_under_way_are_done_again(waits: bool) -> None:
    """Where no rank has waited for them, and where one has: it sends what it has."""

    def body(fails: bool) -> list[Any]:
        step, state, batch = small(1)
        new, _ = step(state, batch)
        assert new.params.under_way
        if waits and zf.rank() == 1:
            assert zf.tree.leaves(new.params) and not new.params.under_way
        if fails:
            group(None, "data").barrier()  # who comes last to a gather writes for the others, too
            spoil(new.params)
            zf.recover_world(new)
            assert not new.params.under_way
        again, _ = step(new, batch)
        return [x.tolist() for x in zf.tree.leaves((new.params, again.params))]

    right = zf.simulate(2, timeout=30)(body)(False)
    assert zf.simulate(2, timeout=30)(body)(True) == right


def spoil(params: Replicated) -> None:
    """As if of what nobody has waited for only the own part were there, and the gather dead."""
    for arrival in params.under_way.values():
        full, own = arrival.again.args[:2]  # type: ignore[attr-defined]
        if not arrival.handle.done:
            mine = own.clone()
            full.fill_(float("nan"))
            own.copy_(mine)
            arrival.handle._abandon(zf.DesyncError("on purpose"))


TORCHRUN = """
import os, sys, time, torch
import torch.distributed as dist
import zfunc as zf
from zfunc.ranks.axes import group
dist.init_process_group("gloo")  # the user's own
joined = zf.init(timeout={timeout})
ranks = group(None, "data")
ranks.barrier()
x = torch.ones(2) * (1 + zf.rank())
try:
    ranks.exchange(1, label=f"by {zf.rank()}")
except zf.DesyncError as error:
    print("parted", flush=True)
if zf.rank() == 1:
    {fault}
try:
    zf.recover_world({"step": 3}, timeout={timeout})
    dist.all_reduce(x)
    print("on", ranks.exchange(zf.rank()), x.tolist(), flush=True)
except zf.DesyncError as error:
    print("told", error, flush=True)
if zf.rank() == 0:
    time.sleep(1)  # it serves the store
"""


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("pass", "on [0, 1] [3.0, 3.0]"),
        ("os._exit(3)", "told zf.recover_world(): rank 1 did not come within"),
    ],
)
def test_under_a_process_group_of_the_user(fault: str, expected: str) -> None:
    """It goes on as it is; a rank that has died is named."""
    seconds = "20" if fault == "pass" else "3"
    script = TORCHRUN.replace("{timeout}", seconds).replace("{fault}", fault)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [
        warm.Popen(
            [sys.executable, "-c", script],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=warm.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=200)[0]
        assert said.startswith("parted\n") and expected in said, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
