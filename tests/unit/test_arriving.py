"""New parameters of stages 1 and 2 are returned under way: whoever looks waits, nobody else."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.unit.test_overlap import UNIT, WIDTH, loss, params
from zfunc import comm, optim
from zfunc.engine import context
from zfunc.errors import DesyncError, DonatedStateError

Tree = Any
TX = optim.adamw(0.01)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of new parameters bring garbage until somebody waits: a reader who does not sees it.

    Simulated ranks would often have filled the memory already.
    """
    gather = comm.Group.all_gather

    def garbled(self: Any, full: Tensor, shard: Tensor, *, label: str = "", **how: Any) -> Any:
        if not label.startswith("join"):
            return gather(self, full, shard, label=label, **how)
        real = torch.empty_like(full)
        handle = gather(self, real, shard, label=label, **how)
        full.fill_(float("nan"))
        wait = handle.wait
        filled: list[bool] = []

        def arrive() -> Tensor:
            wait()
            if not filled:
                filled.append(True)
                full.copy_(real)
            return full

        handle.wait = arrive  # type: ignore[method-assign]
        return handle

    monkeypatch.setattr(comm.Group, "all_gather", garbled)


def arriving(state: Any) -> int:
    """How many of a state's flats nobody has waited for."""
    params = state["params"] if isinstance(state, dict) else state.params
    return len(params.under_way)


def batch(i: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


def made(stage: int, *wraps: Any) -> tuple[Any, Any]:
    step = zf.shard(zf.train_step(loss, TX), stage=stage, unit_bytes=UNIT)
    for wrap in wraps:
        step = wrap(step)
    return step, step.place(zf.TrainState.create(params(3), TX))


def stepped(stage: int, *wraps: Any, steps: int = 2) -> tuple[Any, Any]:
    step, state = made(stage, *wraps)
    for i in range(steps):
        state, _ = step(state, batch(i))
    return step, state


@functools.cache
def expected(steps: int = 2) -> Tree:
    state = zf.TrainState.create(params(3), TX)
    for i in range(steps):
        state, _ = zf.train_step(loss, TX)(state, batch(i))
    return state.params


def same(a: Tree, b: Tree) -> None:
    pairs = zip(zf.tree.leaves(a), zf.tree.leaves(b), strict=True)
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH, WIDTH))


READERS: dict[str, Callable[[Tree], Any]] = {
    "an operator": lambda p: p["first"] * 1.0,
    "item": lambda p: torch.tensor([[v.item() for v in row] for row in p["first"][:2]]),
    "numpy": lambda p: torch.tensor(p["first"].numpy()),
    "clone": lambda p: p["first"].clone(),
    "detach": lambda p: p["first"].detach(),
    "data": lambda p: p["first"].data,
    "stack": lambda p: torch.stack([p["first"], p["last"]]),
    "out": lambda p: torch.add(p["first"], 0, out=torch.empty(WIDTH, WIDTH)),
    "copy": lambda p: copy.copy(p)["first"] + 0,
    "deepcopy": lambda p: copy.deepcopy(p)["first"],
    "pickle": lambda p: pickle.loads(pickle.dumps(p["first"])),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p["first"]),
    "compile": lambda p: torch.compile(lambda x: x + 1, backend="eager")(p["first"]),
    "parameter": lambda p: nn.Parameter(p["first"]).detach(),
    "state dict": lambda p: (
        (net := Net()).load_state_dict({"first": p["first"]}) and net.first.detach()
    ),
    "functional call": lambda p: torch.func.functional_call(
        nn.Linear(WIDTH, WIDTH, bias=False), {"weight": p["first"]}, torch.ones(1, WIDTH)
    ),
    "leaves": lambda p: [x + 0 for x in zf.tree.leaves(p)],
    "map": lambda p: zf.tree.map(lambda x: x * 2, p),
    "norm": zf.tree.global_norm,
    "flatten": lambda p: torch.cat([x.reshape(-1) for x in optree.tree_leaves(p["blocks"][1])]),
    "full": zf.full,
    "get": lambda p: zf.tree.get(p, "blocks.1.c") + 0,
    "set": lambda p: zf.tree.set(p, "first", torch.zeros(WIDTH, WIDTH)),
    "torch's tree_map": lambda p: torch.utils._pytree.tree_map(torch.neg, p),
    "a layer": lambda p: loss(p, batch(9)),
    "evaluate": lambda p: zf.evaluate(loss)(p, batch(9)),
    "grad": lambda p: torch.func.grad(loss)(p, batch(9)),
    "vjp": lambda p: torch.func.vjp(lambda q: loss(q, batch(9)), p)[1](torch.ones(())),
    "jacrev": lambda p: torch.func.jacrev(lambda w, q: (w @ q["last"]).sum(0))(p["first"], p),
    "grad by vmap": lambda p: torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(p, batch(9)),
    "captured by grad": lambda p: torch.func.grad(lambda w: (w * p["first"]).sum())(
        torch.ones(WIDTH, WIDTH)
    ),
    "functionalize": lambda p: torch.func.functionalize(loss)(p, batch(9)),
    "value_and_grad": lambda p: torch.autograd.grad(
        p["first"].requires_grad_().square().sum(), p["first"]
    ),
}


@pytest.mark.usefixtures("late")
def test_readers_wait() -> None:
    wanted = {name: read(expected()) for name, read in READERS.items()}

    def run() -> None:
        step, before = stepped(2, steps=1)
        for name, read in READERS.items():
            state, _ = step(before, batch(1))
            assert arriving(state) == 4 * 3 + 2, name
            same(read(state.params), wanted[name])

    zf.simulate(2)(run)()


SECRETLY: dict[str, Callable[[Any], Any]] = {
    "torch.tensor": lambda s: torch.tensor(s.params["first"]),
    "data": lambda s: read_into(lambda x: setattr(x, "data", s.params["first"])),
    "set_": lambda s: read_into(lambda x: x.set_(s.params["first"])),
    "subclass": lambda s: torch.Tensor._make_subclass(nn.Parameter, s.params["first"]).detach(),
    "dlpack": lambda s: torch.from_dlpack(torch.utils.dlpack.to_dlpack(s.params["first"])),
    "deepcopy": lambda s: copy.deepcopy(s).params,
    "copy": lambda s: copy.copy(s).params,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)).params,
    "replace": lambda s: torch.tensor(s.replace(step=s.step + 1).params["first"]),
    "asdict": lambda s: copy.deepcopy(dataclasses.asdict(s)["params"]),
}
"""Readers that ask no torch function."""


def read_into(write: Callable[[Tensor], Any]) -> Tensor:
    x = torch.zeros(WIDTH, WIDTH)
    write(x)
    return x + 0


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.usefixtures("late")
def test_between_steps_a_state_gives_what_has_arrived() -> None:
    plain = zf.TrainState.create(expected(), TX)
    wanted = {name: read(plain) for name, read in SECRETLY.items()}

    def run() -> None:
        step, before = stepped(2, steps=1)
        for name, read in SECRETLY.items():
            state, _ = step(before, batch(1))
            assert arriving(state), name
            same(read(state), wanted[name])
        same(step(copy.deepcopy(before), batch(1))[0].params, expected())

    zf.simulate(2)(run)()


@pytest.mark.usefixtures("late")
def test_other_states_wait_likewise_and_metrics_have_arrived() -> None:
    def plain(state: Any, x: Tensor) -> Any:
        _, grads = zf.value_and_grad(loss)(state["params"], x)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, params["first"]

    def run() -> None:
        step = zf.shard(plain, stage=2, unit_bytes=UNIT)
        state = step.place({"params": params(3), "opt_state": TX.init(params(3))})
        state, metric = step(state, batch(0))
        assert not arriving(state)  # the step has read a leaf itself
        assert torch.equal(metric, state["params"]["first"])
        same(state["params"], expected(1))

    zf.simulate(2)(run)()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "wraps",
    [
        (),
        (zf.donate,),
        (lambda f: zf.accumulate(f, 2),),
        (zf.remat,),
        (zf.precision,),
        (lambda f: zf.offload(f), zf.donate),
    ],
    ids=["plain", "donate", "accumulate", "remat", "precision", "offload"],
)
def test_the_next_steps_see_what_arrives(stage: int, wraps: tuple[Any, ...]) -> None:
    def run(late: int) -> list[Tensor]:
        step, state = stepped(late, *wraps, steps=4)
        return zf.tree.leaves(step.unplace(state).params)

    stage0, found = zf.simulate(2)(run)(0)[0], zf.simulate(2)(run)(stage)[0]
    assert all(
        torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-6)
        for a, b in zip(stage0, found, strict=True)
    )


@pytest.mark.usefixtures("late")
def test_it_belongs_to_the_state() -> None:
    """Twice a step from it, a step of another kind, unused leaves; dropping it; donating it."""
    wanted = expected(3)

    def run() -> None:
        step, state = stepped(2)
        other = zf.shard(zf.train_step(loss, TX), stage=2, unit_bytes=UNIT)
        same(step(state, batch(2))[0].params, wanted)
        same(step(state, batch(2))[0].params, wanted)
        same(other(stepped(2)[1], batch(2))[0].params, wanted)
        _, dropped = stepped(2)
        del dropped  # its gathers are completed by the group
        donating, state = stepped(2, zf.donate)
        new, _ = donating(state, batch(2))
        with pytest.raises(DonatedStateError):
            zf.tree.global_norm(state.params)
        same(new.params, wanted)

    zf.simulate(2)(run)()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("block", [False, True])
def test_it_can_be_saved(block: bool, tmp_path: Path) -> None:
    wanted = expected()

    def run() -> None:
        _, state = stepped(2)
        zf.save(tmp_path, state, block=block).wait()
        same(zf.restore(tmp_path, made(2)[1]).params, wanted)

    zf.simulate(2)(run)()


def test_threads_wait_for_the_same_leaves() -> None:
    """A thread that logs or saves a state, and the training that goes on with it."""

    def run() -> list[BaseException]:
        _, state = stepped(2)
        params, meet = state.params, threading.Barrier(2, timeout=20)
        wrong: list[BaseException] = []
        arrival = next(iter(params.under_way.values()))
        handle = arrival.handle

        def together() -> None:
            handle.wait()
            meet.wait()  # both threads have seen that they must wait

        def read() -> None:
            try:
                _ = params["first"] + 0
            except BaseException as error:
                wrong.append(error)

        arrival.finish = together
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not arriving(state)
        same(params, expected())
        return wrong

    assert zf.simulate(2)(run)() == [[], []]


def test_handing_a_state_on_waits_for_nothing() -> None:
    def run() -> None:
        _, state = stepped(2)
        other = state.replace(step=state.step + 1)
        assert arriving(other) == 4 * 3 + 2
        assert type(other.params["first"]) is Tensor
        assert not arriving(other)

    zf.simulate(2)(run)()


def test_nothing_is_under_way_on_one_rank_or_where_gathers_are_to_end() -> None:
    def run() -> None:
        _, state = stepped(2)
        assert not arriving(state)

    zf.simulate(1)(run)()

    def inside() -> None:
        def plain(state: Any, x: Tensor) -> Any:
            running = context.current()
            assert running is not None
            running.complete = True
            _, grads = zf.value_and_grad(loss)(state.params, x)
            updates, opt_state = TX.update(grads, state.opt_state, state.params)
            params = optim.apply_updates(state.params, updates)
            return state.replace(params=params, opt_state=opt_state), {}

        step = zf.shard(plain, stage=2, unit_bytes=UNIT)
        state, _ = step(step.place(zf.TrainState.create(params(3), TX)), batch(0))
        assert not arriving(state)

    zf.simulate(2)(inside)()


def test_an_error_names_the_unit() -> None:
    """One rank leaves the step without gathering."""

    def run() -> str:
        _, state = stepped(2)
        if zf.rank() == 1:
            return ""
        first = next(iter(state.params.under_way.values()))
        first.finish = lambda: (_ for _ in ()).throw(DesyncError("all_gather('join root[0]')"))
        for _ in range(2):
            with pytest.raises(DesyncError, match="join root"):
                state.params["first"] + 1
        with pytest.raises(DesyncError, match="join root"):
            zf.tree.leaves(state)
        return "raised"

    assert zf.simulate(2)(run)()[0] == "raised"


def alone_reads(path: str) -> None:
    """Rank 1 is done and gone while rank 0 still reads; nobody calls a collective any more."""
    _, state = stepped(2)
    if zf.rank() == 1:
        del state
        return
    time.sleep(1.0)
    torch.save(state.params["blocks"][2]["d"] + 0, path)


def test_ranks_that_leave_end_what_their_peers_wait_for(tmp_path: Path) -> None:
    zf.launch(alone_reads, str(tmp_path / "leaf"), nprocs=2)
    assert torch.allclose(torch.load(tmp_path / "leaf"), expected()["blocks"][2]["d"], atol=1e-6)
