"""Meshes, collectives over their axes, and simulated ranks."""

from __future__ import annotations

import functools
import itertools
import pickle
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim
from zfunc.engine.batches import local_batch
from zfunc.engine.hooks import Order
from zfunc.engine.meshed import Meshed
from zfunc.ranks import comm, world
from zfunc.ranks.axes import group
from zfunc.ranks.collectives import axis_index, pmean, psum
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.meshes import ORDER, Mesh, mesh
from zfunc.ranks.simulation import simulate
from zfunc.ranks.world import MESH


def test_meshes_are_values() -> None:
    grid = Mesh((("data", 2), ("tensor", 3), ("pipe", 2)))
    assert grid == pickle.loads(pickle.dumps(grid)) and len({grid, Mesh(grid.axes)}) == 1
    assert grid.size(("data", "pipe")) == 4 and grid.world_size == 12
    assert [tuple(grid.coordinates(rank).values()) for rank in range(12)] == [
        (d, t, p) for d in range(2) for t in range(3) for p in range(2)
    ]
    assert grid.members("pipe", 5) == (4, 5)
    assert grid.members(("tensor", "data"), 5) == (1, 3, 5, 7, 9, 11)
    with pytest.raises(ValueError, match="axis 'model'"):
        grid.size("model")


def test_a_mesh_may_be_made_anywhere_and_fills_the_world_that_it_meets() -> None:
    grid = mesh(tensor=3)
    assert grid.axes == (("pipe", 1), ("replica", 1), ("data", -1), ("tensor", 3))
    assert grid.batch == ("replica", "data") and hash(grid) == hash(mesh(tensor=3))
    assert repr(grid) == "mesh(data=-1, tensor=3)" and repr(mesh(data=1)) == (
        "mesh(pipe=1, replica=1, data=1, tensor=1)"
    )
    assert grid.closed(12).sizes == {"pipe": 1, "replica": 1, "data": 4, "tensor": 3}
    assert grid.closed(12).closed() == mesh(data=4, tensor=3)

    def body() -> None:
        assert grid.size("data") == 2 and grid.world_size == 6
        assert mesh(data=2, tensor=-1).size("tensor") == 3
        assert mesh().closed() == mesh(data=6)

    simulate(6)(body)()
    assert mesh().size("data") == 1


def test_sizes_that_mean_nothing_raise_where_they_are_given() -> None:
    wrong: list[dict[str, Any]] = [{"data": 0}, {"tensor": -1}, {"data": -2}, {"pipe": 1.0}]
    for sizes in (*wrong, {"data": True}):
        with pytest.raises(ValueError, match=r"mesh\(.*positive sizes, at most one of them -1"):
            mesh(**sizes)
    with pytest.raises(ValueError, match="expected pipe, replica, data, tensor in some order"):
        mesh(order=("data", "tensor"))


def test_sizes_that_do_not_fit_a_world_raise_where_they_meet_it() -> None:
    def body() -> None:
        for wrong in (mesh(tensor=4), mesh(data=2, tensor=2), Mesh((("data", 4),))):
            with pytest.raises(ValueError, match=r"mesh\(.* needs .* ranks, this world has 6"):
                group(wrong, "data")

    simulate(6)(body)()


def test_groups_follow_the_axes() -> None:
    def body() -> tuple[float, float, float]:
        grid = mesh(data=2, tensor=2, pipe=2)
        rank = float(world.rank())
        sums = []
        for axis in ("data", "tensor", ("data", "pipe")):
            sums.append(group(grid, axis).all_reduce(torch.tensor(rank)).wait().item())
        assert group(grid, "data") is group(grid, "data")
        assert group(grid, ("data", "pipe")) is group(grid, ("pipe", "data"))
        assert group(grid, ("data", "tensor", "pipe")) is group(None, "data")
        return sums[0], sums[1], sums[2]

    for rank, sums in enumerate(simulate(8)(body)()):
        pipe, data, tensor = rank // 4, rank // 2 % 2, rank % 2
        along_data = sum(4 * pipe + 2 * d + tensor for d in range(2))
        along_tensor = sum(4 * pipe + 2 * data + t for t in range(2))
        along_both = sum(4 * p + 2 * d + tensor for d in range(2) for p in range(2))
        assert sums == (along_data, along_tensor, along_both)


def test_another_order_of_ranks() -> None:
    """What talks most is near by default; who numbers ranks otherwise says so."""

    def body(order: Any) -> Any:
        grid = mesh(data=2, tensor=2, replica=2, order=order)
        batch = local_batch(torch.arange(8), grid)
        return group(grid, "tensor").members, group(grid, "replica").members, batch.tolist()

    usual = simulate(8)(body)(ORDER)
    assert usual[0] == ((0, 1), (0, 4), [0, 1]) and usual[1] == ((0, 1), (1, 5), [0, 1])
    assert usual[2] == ((2, 3), (2, 6), [2, 3]) and usual[7] == ((6, 7), (3, 7), [6, 7])
    other = simulate(8)(body)(("tensor", "data", "pipe", "replica"))
    assert other[0] == ((0, 4), (0, 1), [0, 1]) and other[4] == ((0, 4), (4, 5), [0, 1])
    assert other[1] == ((1, 5), (0, 1), [2, 3])


def test_what_a_ledger_counts_by_axis() -> None:
    def body() -> Any:
        grid = mesh(replica=2, data=2)
        with comm.ledger() as led:
            group(None, "data").all_reduce(torch.ones(2)).wait()
            for axis in ("data", "replica", ("replica", "data"), "tensor"):
                group(grid, axis).all_reduce(torch.ones(2)).wait()
        assert sum(led.by_axis.values()) == led.payload_bytes
        return dict(led.by_axis)

    for found in simulate(4)(body)():
        assert found == {"data": 24 + 8, "replica": 8, "replica+data": 24}


TX = optim.sgd(0.1)


def squares(params: Any, batch: Tensor) -> Tensor:
    return (params["w"] * batch).square().mean()


@dataclass(frozen=True)
class OnMesh(Meshed):
    """Stands for what will cut a step along other axes."""

    mesh: Mesh | None = None
    position: ClassVar[int] = Order.OTHERS
    name: ClassVar[str] = "on mesh"


@dataclass(frozen=True)
class Asks(Meshed):
    """Stands for what asks for the size of an axis, and leaves the others to the step."""

    size: int = 2
    mesh: Mesh | None = None
    position: ClassVar[int] = 430
    axis: ClassVar[str] = ""

    @property
    def axes(self) -> Mapping[str, int]:
        return {self.axis: self.size}


@dataclass(frozen=True)
class Tensors(Asks):
    axis: ClassVar[str] = "tensor"


@dataclass(frozen=True)
class Pipes(Asks):
    axis: ClassVar[str] = "pipe"
    position: ClassVar[int] = 435


@dataclass(frozen=True)
class MoreTensors(Asks):
    axis: ClassVar[str] = "tensor"
    position: ClassVar[int] = 440


def test_a_step_has_one_mesh() -> None:
    """Whoever it was given to, and in whichever order the step was wrapped."""
    grid, bare = mesh(data=2, tensor=2), zf.train_step(squares, TX)
    assert bare.mesh is None and zf.donate(bare).mesh is None
    steps = [
        zf.shard(bare.wrap(OnMesh()), mesh=grid),
        zf.shard(bare, mesh=grid).wrap(OnMesh()),
        zf.shard(bare.wrap(OnMesh(grid))),
        zf.shard(bare).wrap(OnMesh(grid)),
        zf.shard(bare.wrap(OnMesh(grid)), mesh=grid),
    ]
    for step in steps:
        assert step == steps[0] and zf.remat(step).mesh == grid
        assert [t.mesh for t in step.transforms] == [grid, grid]
    for wrong in (
        lambda: zf.shard(bare.wrap(OnMesh(grid)), mesh=mesh(data=4)),
        lambda: zf.shard(bare, mesh=mesh(data=4)).wrap(OnMesh(grid)),
    ):
        with pytest.raises(zf.CompositionError, match=r"one mesh, but shard has mesh\(data=4\)"):
            wrong()


def test_sizes_that_transforms_ask_for_make_one_mesh() -> None:
    """In every order of wrapping; data fills what is left."""
    bare = zf.train_step(squares, TX)
    assert bare.wrap(Tensors()).mesh == mesh(tensor=2)
    wraps: list[Any] = [
        zf.shard,
        lambda f: f.wrap(Tensors(2)),
        lambda f: f.wrap(Pipes(3)),
        lambda f: f.wrap(OnMesh()),
    ]
    steps = [
        functools.reduce(lambda f, wrap: wrap(f), order, bare)
        for order in itertools.permutations(wraps)
    ]
    for step in steps:
        assert step == steps[0] and {t.mesh for t in step.transforms} == {mesh(tensor=2, pipe=3)}
        assert zf.donate(step).mesh == mesh(pipe=3, data=-1, tensor=2)
    assert zf.simulate(12)(lambda: steps[0].mesh.closed().size("data"))() == [2] * 12


def test_sizes_that_transforms_ask_for_agree_with_a_mesh_that_is_given() -> None:
    bare, grid = zf.train_step(squares, TX), mesh(data=2, tensor=2, pipe=2)
    wraps: list[Any] = [
        lambda f: zf.shard(f, mesh=grid),
        lambda f: f.wrap(Tensors()),
        lambda f: f.wrap(Pipes()),
        lambda f: f.wrap(OnMesh()),
    ]
    for order in itertools.permutations(wraps):
        step = functools.reduce(lambda f, wrap: wrap(f), order, bare)
        assert {t.mesh for t in step.transforms} == {grid}
    own = bare.wrap(Tensors(mesh=grid)).wrap(Pipes())
    assert own.mesh == grid and zf.shard(own).mesh == grid


OTHERS = [mesh(), mesh(tensor=3), mesh(data=2, tensor=-1), Mesh((("data", 4),))]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_sizes_that_do_not_agree_raise_and_name_both(other: Mesh) -> None:
    bare = zf.train_step(squares, TX)
    text = re.escape(f"one mesh, but shard has {other} and tensors asks for tensor=2.")
    for wrong in (
        lambda: zf.shard(bare.wrap(Tensors()), mesh=other),
        lambda: zf.shard(bare, mesh=other).wrap(Tensors()),
        lambda: zf.shard(bare.wrap(Pipes(1)).wrap(Tensors()), mesh=other),
    ):
        with pytest.raises(zf.CompositionError, match=text):
            wrong()


def test_two_sizes_of_one_axis_raise_and_name_both() -> None:
    bare = zf.train_step(squares, TX)
    told = "one mesh, but tensors asks for tensor=2 and moretensors asks for tensor=4."
    for first, second in ((Tensors(), MoreTensors(4)), (MoreTensors(4), Tensors())):
        with pytest.raises(zf.CompositionError, match=told):
            bare.wrap(first).wrap(second)
        with pytest.raises(zf.CompositionError, match=told):
            zf.shard(bare.wrap(first)).wrap(second)
    assert bare.wrap(Tensors()).wrap(MoreTensors(2)).mesh == mesh(tensor=2)


def test_a_mesh_along_which_rows_differ_needs_shard() -> None:
    """What averages over nothing would let its ranks drift apart, and is refused before it runs."""
    state = zf.TrainState.create({"w": torch.ones(4)}, TX)
    bare, made = zf.train_step(squares, TX), list[int]()

    def init() -> Any:
        made.append(1)
        return state

    def body() -> list[str]:
        told = []
        for step in (bare.wrap(Tensors()), bare.wrap(OnMesh(mesh(replica=2, tensor=2)))):
            for use in (
                functools.partial(step.place, state),
                functools.partial(step.init, init),
                functools.partial(step, state, torch.ones(2, 4)),
            ):
                with pytest.raises(zf.CompositionError, match=r"Wrap the step in zf\.shard") as e:
                    use()
                told.append(str(e.value))
        sharded = zf.shard(bare.wrap(Tensors()))
        sharded(sharded.place(state), torch.ones(2, 4))
        return told

    assert len({tuple(told) for told in simulate(4)(body)()}) == 1 and not made

    def alone() -> Any:  # all ranks have the same rows: nothing is to be averaged
        step = bare.wrap(Tensors())
        return step(step.place(state), torch.ones(2, 4))[0].params["w"]

    assert torch.equal(*simulate(2)(alone)())


def test_a_step_whose_mesh_does_not_cover_the_world_raises_before_it_does_anything() -> None:
    step = zf.shard(zf.train_step(squares, TX), mesh=mesh(data=2, tensor=2))
    state = zf.TrainState.create({"w": torch.ones(4)}, TX)
    made: list[int] = []

    def init() -> Any:
        made.append(1)
        return state

    def body() -> list[str]:
        told = []
        for use in (lambda: step.place(state), lambda: step.init(init), lambda: step(state, 0)):
            with pytest.raises(
                ValueError, match=r"mesh\(data=2, tensor=2\) needs 4 ranks"
            ) as error:
                use()
            told.append(str(error.value))
        return told

    assert len({text for told in simulate(6)(body)() for text in told}) == 1 and not made


def test_a_step_cuts_batches_along_data_and_replica_alone() -> None:
    grid = mesh(data=-1, tensor=2, replica=2)
    step = zf.shard(zf.train_step(squares, TX), stage=0, mesh=grid)

    def body() -> Any:
        mine = step.local_batch({"x": torch.arange(11)})["x"]
        assert torch.equal(mine, local_batch(torch.arange(11), grid))
        return mine.tolist()

    rows = simulate(12)(body)()
    assert rows[::2] == rows[1::2] and [x for part in rows[::2] for x in part] == list(range(11))


def test_psum_and_pmean_on_trees_follow_the_current_mesh() -> None:
    def body() -> None:
        rank = world.rank()
        token = MESH.set(mesh(data=2, tensor=2))
        tree = {"a": torch.tensor([float(rank)]), "n": torch.tensor(rank)}
        summed = psum(tree, "tensor")
        assert summed["n"].item() == summed["a"].item() == 4 * (rank // 2) + 1
        assert tree["n"].item() == rank
        assert pmean(torch.tensor(float(rank)), ("data", "tensor")).item() == 1.5
        assert (axis_index("data"), axis_index("tensor")) == divmod(rank, 2)
        with pytest.raises(TypeError, match="int64"):
            pmean(tree["n"])
        MESH.reset(token)

    simulate(4)(body)()

    def over_replicas() -> None:
        token = MESH.set(mesh(data=2, tensor=2, replica=2))
        rank = torch.tensor(float(world.rank()))
        assert pmean(rank) == 3 + world.rank() % 2 and pmean(rank, "data") == rank // 4 * 4 + (
            1 + world.rank() % 2
        )
        assert axis_index() == world.rank() // 2
        MESH.reset(token)

    simulate(8)(over_replicas)()
    assert psum(torch.ones(2), "tensor").tolist() == [1.0, 1.0]


def test_collectives_are_their_own_transposes() -> None:
    def body() -> tuple[Tensor, ...]:
        weight = float(world.rank() + 1)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (summed,) = torch.autograd.grad((psum(x) * weight).sum(), x)
        (mean,) = torch.autograd.grad((pmean({"x": x})["x"] * weight).sum(), x)
        twice = torch.autograd.grad(psum(x).square().sum(), x, create_graph=True)[0]
        (second,) = torch.autograd.grad(twice.sum(), x)
        return summed, mean, second

    for summed, mean, second in simulate(3)(body)():
        assert summed.tolist() == [6.0] * 3  # 1 + 2 + 3
        assert mean.tolist() == [2.0] * 3
        assert second.tolist() == [18.0] * 3  # a sum of twice a sum


def test_simulated_ranks_see_their_callers_context_and_grad_mode() -> None:
    with torch.no_grad():
        assert simulate(2)(torch.is_grad_enabled)() == [False, False]
    assert simulate(2)(lambda x, *, k: x + k + world.rank())(1, k=2) == [3, 4]
    assert simulate(2)(lambda: [len(simulate(3)(world.rank)()), world.world_size()])() == [
        [3, 2],
        [3, 2],
    ]
    with pytest.raises(ValueError, match="at least one rank"):
        simulate(0)
    with pytest.raises(TypeError, match=r"Write simulate\(4\)\(fn\)"):
        simulate(torch.is_grad_enabled)  # type: ignore[arg-type]


def test_a_waiting_rank_gives_up_what_on_wait_says(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    @contextmanager
    def released() -> Iterator[None]:
        lock.release()
        try:
            yield
        finally:
            lock.acquire()

    monkeypatch.setattr(world, "on_wait", [released])

    def body() -> float:
        with lock:  # only one rank at a time gets past here, unless waiting releases it
            return group(None, "data").all_reduce(torch.ones(1)).wait().item()

    assert simulate(4, timeout=20)(body)() == [4.0] * 4


class Mine(Exception):
    pass


def test_an_exception_in_one_rank_is_raised_as_it_is_and_ends_the_others() -> None:
    ended = []

    def body() -> None:
        ranks = group(None, "data")
        try:
            if ranks.rank == 1:
                raise Mine("rank 1")
            ranks.all_reduce(torch.ones(1), label="u").wait()
        finally:
            ended.append(ranks.rank)

    start = time.monotonic()
    with pytest.raises(Mine, match="rank 1"):
        simulate(4)(body)()
    assert sorted(ended) == [0, 1, 2, 3]
    assert time.monotonic() - start < 2


def test_timeouts_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_TIMEOUT", "12.5")
    assert world.default_timeout() == 12.5
    monkeypatch.setenv("ZFUNC_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="ZFUNC_TIMEOUT='soon'"):
        world.default_timeout()


def test_even_cuts_cover_everything() -> None:
    assert even_cuts(2, 4) == (0, 1, 2, 2, 2)
    assert even_cuts(0, 2) == (0, 0, 0)
