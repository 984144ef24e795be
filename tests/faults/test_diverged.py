"""Ranks that hold different numbers where they should hold the same are told, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, numbers
from tests.laws.models import CASES
from zfunc import tree
from zfunc.files import checkpoint, replicas

F64 = torch.float64
CASE = CASES["mixed dtypes"]


def permuted(x: Any) -> Any:
    """The same numbers in another order."""
    return x.flip(0) if torch.is_tensor(x) and x.ndim else x


def on_rank(rank: int, change: Any, node: Any) -> Any:
    return tree.map(change, node) if zf.rank() == rank else node


def errors(ranks: int, body: Any, kind: Any) -> set[str]:
    """What all ranks are told; each has to be told something."""

    def told() -> str:
        with pytest.raises(kind) as caught:
            body()
        return str(caught.value)

    return set(zf.simulate(ranks, timeout=20)(told)())


@pytest.mark.parametrize("stage", range(4))
def test_permuted_parameters_are_not_placed(stage: int) -> None:
    """The sum of their bits is the same."""

    def body() -> None:
        state = CASE.state(ADAMW, F64)
        state = state.replace(params=on_rank(2, permuted, state.params))
        zf.shard(CASE.step(ADAMW), stage=stage).place(state)

    (said,) = errors(3, body, zf.PlacementError)
    assert said.startswith("ranks 0 and 2 start from different params: params.")
    assert "has other values" in said and "Seed all ranks alike" in said


MINE: dict[str, Any] = {
    "buffers.mean": lambda: {"buffers": {"mean": torch.arange(3.0) + zf.rank()}},
    "aux.seen": lambda: {"aux": {"n": 3, "seen": torch.arange(5).roll(zf.rank())}},
    "aux.n": lambda: {"aux": {"n": zf.rank()}},
    "aux.name": lambda: {"aux": {"name": f"rank {zf.rank()}", "w": torch.ones(1)}},
    "aux.w": lambda: {"aux": {"w": torch.ones(2 + zf.rank())}},
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("leaf", MINE)
def test_buffers_and_aux_of_each_rank_name_pmean(leaf: str, stage: int, tmp_path: Path) -> None:
    """When they are placed; and when they are saved, if they have come to differ since."""

    def place() -> None:
        state = CASE.state(ADAMW, F64).replace(**MINE[leaf]())
        zf.shard(CASE.step(ADAMW), stage=stage).place(state)

    (said,) = errors(2, place, zf.PlacementError)
    assert leaf in said and "zf.pmean" in said and "ranks 0 and 1" in said

    def save() -> None:
        placed = zf.shard(CASE.step(ADAMW), stage=stage).place(CASE.state(ADAMW, F64))
        zf.save(tmp_path / "x", placed.replace(**MINE[leaf]()))

    (said,) = errors(2, save, zf.CheckpointError)
    assert leaf in said and "rank 0" in said and "rank 1" in said
    if leaf in ("buffers.mean", "aux.seen"):
        assert f"ranks hold {leaf} in common" in said and "zf.pmean" in said
    assert not (tmp_path / "x").exists()


def test_a_mean_over_ranks_can_be_placed_and_saved(tmp_path: Path) -> None:
    """What the error says to do."""

    def body() -> None:
        mean = zf.pmean(torch.arange(3.0) + zf.rank())
        step = zf.shard(CASE.step(ADAMW), stage=1)
        state = step.place(CASE.state(ADAMW, F64).replace(buffers={"mean": mean}))
        zf.save(tmp_path, state)

    zf.simulate(3)(body)()
    assert zf.checkpoints(tmp_path)[0].good


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize(
    ("stage", "entry"), [(0, "params"), (0, "opt_state"), (1, "params"), (2, "params")]
)
def test_replicas_that_have_diverged_are_not_saved(
    stage: int, entry: str, block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts would make up a state that no rank has, with digests that fit."""
    written: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        written.append(zf.rank())
        return real(fd, data, offset)

    def body() -> None:
        step = zf.donate(zf.shard(CASE.step(ADAMW), stage=stage))
        state = step.place(CASE.state(ADAMW, F64).replace(step=torch.tensor(1)))
        zf.save(tmp_path / "good", state)
        state, _ = step(state, zf.local_batch(CASE.batch(0, F64)))
        zf.ranks.axes.group(None, "data").barrier()
        monkeypatch.setattr(os, "pwrite", pwrite)
        apart = state.replace(**{entry: on_rank(1, permuted, getattr(state, entry))})
        zf.save(tmp_path / "good", apart, block=block)

    (said,) = errors(3, body, zf.CheckpointError)
    assert f"ranks hold {entry}." in said and "have diverged" in said
    assert "one on ranks 0, 2 and one on rank 1" in said
    assert not written
    assert sorted(p.name for p in (tmp_path / "good").iterdir()) == [".lock", "step-00000001"]
    assert zf.checkpoints(tmp_path / "good")[0].good


def test_what_is_whole_at_stage_3_is_compared_too(tmp_path: Path) -> None:
    """Small leaves that every rank keeps, the key, and copies along another axis of the mesh."""

    def small(state: Any) -> Any:
        return state.replace(params=on_rank(0, lambda x: x + 1, state.params))

    def key(state: Any) -> Any:
        return state.replace(key=state.key + (zf.rank() == 3))

    def body(change: Any, **how: Any) -> None:
        mesh = zf.mesh(data=2, tensor=2)
        step = zf.shard(CASE.step(ADAMW), stage=3, mesh=mesh, **how)
        zf.save(tmp_path / "x", change(step.place(CASE.state(ADAMW, F64))))

    (said,) = errors(4, lambda: body(key), zf.CheckpointError)
    assert "ranks hold key in common" in said and "one on ranks 0, 1, 2 and one on rank 3" in said
    (said,) = errors(4, lambda: body(small), zf.CheckpointError)
    assert "ranks hold params." in said and "one on rank 0 and one on rank 1." in said
    (said,) = errors(4, lambda: body(small, persist_below=1000), zf.CheckpointError)
    assert "one on rank 0 and one on ranks 1, 2, 3" in said
    zf.simulate(4)(lambda: body(lambda state: state))()
    zf.simulate(4)(lambda: body(lambda state: state, persist_below=1000))()


def test_what_lies_on_disk_is_compared_too(tmp_path: Path) -> None:
    def body() -> None:
        step = zf.shard(CASE.step(ADAMW), stage=1)
        step = zf.offload(step, to="disk", path=tmp_path / "tier")
        state = step.place(CASE.state(ADAMW, F64))
        zf.save(tmp_path / "x", state)
        zf.save(tmp_path / "x", state.replace(params=on_rank(1, lambda x: -x, state.params)))

    (said,) = errors(2, body, zf.CheckpointError)
    assert "ranks hold params." in said and "have diverged" in said


def test_a_mixture_is_not_exported(tmp_path: Path) -> None:
    def body() -> None:
        state = zf.shard(CASE.step(ADAMW), stage=2).place(CASE.state(ADAMW, F64))
        zf.export_safetensors(tmp_path / "x", on_rank(1, permuted, state.params))

    (said,) = errors(2, body, zf.CheckpointError)
    assert "in common" in said and "one on rank 0 and one on rank 1" in said
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("apart", [False, True])
def test_replicas_on_devices_of_two_kinds_are_compared(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of hosts and devices have nothing in common: all are taken again, of one kind."""
    real = replicas.look_at

    def look_at(stock: Any, weighed: bool = False) -> Any:
        if zf.rank() == 0:
            return real(stock, weighed)
        seen = real(stock, weighed=True)
        seen.devices.update(dict.fromkeys(seen.devices, "cuda"))
        return seen

    monkeypatch.setattr(checkpoint, "look_at", look_at)
    monkeypatch.setattr(replicas, "look_at", look_at)

    def body() -> None:
        w = numbers((300, 50), 1)
        state = {"w": permuted(w) if apart and zf.rank() else w, "b": torch.ones(3), "step": 1}
        zf.save(tmp_path, state)

    if apart:
        (said,) = errors(2, body, zf.CheckpointError)
        assert "ranks hold w in common" in said
    else:
        zf.simulate(2)(body)()
        like = {"w": torch.zeros(300, 50, dtype=F64), "b": torch.zeros(3), "step": 0}
        assert_same(zf.restore(tmp_path, like)["w"], numbers((300, 50), 1))


def test_start_on_devices_of_two_kinds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from zfunc.engine import agreement

    real, kind = agreement.digests, agreement._kind

    def digests(xs: Any, weighed: bool = False) -> list[str]:
        return real(xs, weighed or zf.rank() == 1)

    def kind_of(leaf: Any) -> tuple[str, str]:
        what, device = kind(leaf)
        return what, "cuda" if device and zf.rank() == 1 else device

    monkeypatch.setattr(agreement, "digests", digests)
    monkeypatch.setattr(agreement, "_kind", kind_of)

    def body(change: Any) -> None:
        state = CASE.state(ADAMW, F64)
        state = state.replace(params=on_rank(1, change, state.params))
        zf.shard(CASE.step(ADAMW), stage=3).place(state)

    zf.simulate(2)(body)(torch.clone)
    (said,) = errors(2, lambda: body(permuted), zf.PlacementError)
    assert "has other values" in said


def _launched(folder: str) -> str:
    step = zf.shard(CASE.step(ADAMW), stage=0)
    state = step.place(CASE.state(ADAMW, F64))
    zf.save(folder, state)
    try:
        zf.save(folder, state.replace(params=on_rank(1, permuted, state.params)), step=1)
    except zf.CheckpointError as error:
        return str(error)
    return ""


def test_on_real_ranks(tmp_path: Path) -> None:
    one, other = zf.launch(_launched, str(tmp_path), nprocs=2)
    assert one == other and "have diverged" in one
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [(0, True)]
