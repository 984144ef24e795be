"""Meshes, collectives over their axes, and simulated ranks."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from zfunc.ranks import world
from zfunc.ranks.axes import Mesh, group, mesh
from zfunc.ranks.collectives import axis_index, pmean, psum
from zfunc.ranks.comm import even_cuts
from zfunc.ranks.simulation import simulate
from zfunc.ranks.world import MESH


def test_meshes_are_values() -> None:
    grid = Mesh((("data", 2), ("tensor", 3), ("pipe", 2)))
    assert grid == pickle.loads(pickle.dumps(grid)) and len({grid, Mesh(grid.axes)}) == 1
    assert grid.size(("data", "pipe")) == 4 and grid.world_size == 12
    for rank in range(12):
        assert grid.rank(grid.coordinates(rank)) == rank
    assert grid.members("pipe", 5) == (4, 5)
    assert grid.members(("tensor", "data"), 5) == (1, 3, 5, 7, 9, 11)
    with pytest.raises(ValueError, match="axis 'model'"):
        grid.size("model")


def test_mesh_fills_the_world_or_says_why_not() -> None:
    def body() -> None:
        assert mesh().axes == (("data", 6), ("tensor", 1), ("pipe", 1))
        assert mesh(tensor=3).size("data") == 2
        assert mesh(data=2, tensor=-1).size("tensor") == 3
        for wrong in ({"tensor": 4}, {"data": 2, "tensor": 2}, {"data": 0}, {"tensor": -1}):
            with pytest.raises(ValueError, match=r"mesh\("):
                mesh(**wrong)
        with pytest.raises(ValueError, match="covers 4 ranks, this world has 6"):
            group(Mesh((("data", 4),)), "data")

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
        tensor, pipe = rank // 2 % 2, rank % 2
        data_only = sum(4 * d + 2 * tensor + pipe for d in range(2))
        tensor_only = sum(4 * (rank // 4) + 2 * t + pipe for t in range(2))
        flattened = sum(4 * d + 2 * tensor + p for d in range(2) for p in range(2))
        assert sums == (data_only, tensor_only, flattened)


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
    assert psum(torch.ones(2), "tensor").tolist() == [1.0, 1.0]


def test_collectives_are_their_own_transposes() -> None:
    def body() -> tuple[Tensor, ...]:
        weight = float(world.rank() + 1)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (summed,) = torch.autograd.grad((psum(x) * weight).sum(), x)
        (mean,) = torch.autograd.grad((pmean({"x": x})["x"] * weight).sum(), x)
        twice = torch.autograd.grad(psum(x).square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            twice.sum().backward()
        return summed, mean

    for summed, mean in simulate(3)(body)():
        assert summed.tolist() == [6.0] * 3  # 1 + 2 + 3
        assert mean.tolist() == [2.0] * 3


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
