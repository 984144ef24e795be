"""``zf.save`` and ``zf.restore`` on one process and on few simulated ranks: what they promise."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, numbers, regression
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.test_shard_laws import odd_values
from zfunc import tree
from zfunc.files import chunks, manifest
from zfunc.layout.freezing import is_frozen
from zfunc.trees.nodes import boxes_in

F64 = torch.float64
STACK = READY_MADE["stack"]
CASES = {**HAND_WRITTEN, **READY_MADE}


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ".lock")


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_state_comes_back(name: str, tmp_path: Path) -> None:
    """From stage 3 on 3 ranks, to stage 1 on 2, to none: in every bit, with every mark."""
    case = CASES[name]
    full = odd_values(case.state(ADAMW, F64))
    blank = tree.map(lambda x: torch.zeros_like(x) if torch.is_tensor(x) else x, full)

    def shard(stage: int) -> Any:
        return zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600, roles=case.roles)

    def write() -> None:
        zf.save(tmp_path, shard(3).place(full), step=4)

    def move() -> None:
        like = shard(1).place(blank)
        state = zf.restore(tmp_path, like)
        assert_same(shard(1).unplace(state), full)
        assert_same(shard(1).unplace(like), blank, "like was changed")
        shard(1)._check(state, {})
        zf.save(tmp_path, state, step=5)

    zf.simulate(3)(write)()
    zf.simulate(2)(move)()
    assert_same(zf.restore(tmp_path, blank), full)


def test_leaves_lie_and_are_marked_as_place_made_them(tmp_path: Path) -> None:
    case = CASES["frozen"]
    full = case.state(ADAMW, F64)

    def body(stage: int) -> None:
        step = zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600)
        like = step.place(full)
        zf.save(tmp_path, like, step=stage)
        state = zf.restore(tmp_path, like, step=stage)
        for x, y in zip(tree.leaves(state), tree.leaves(like), strict=True):
            assert is_frozen(x) == is_frozen(y)
            assert x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
            assert not x.numel() or x.data_ptr() != y.data_ptr()
        assert [type(x) for x in boxes_in(state)] == [type(x) for x in boxes_in(like)]
        for box, other in zip(boxes_in(state), boxes_in(like), strict=True):
            assert box.layout == other.layout and box.flat is not None
        together = [
            len({x.untyped_storage().data_ptr() for x in tree.leaves(s)}) for s in (state, like)
        ]
        assert together[0] == together[1]

    for stage in range(4):
        zf.simulate(2)(body)(stage)


def test_what_is_no_tensor_comes_from_the_file(tmp_path: Path) -> None:
    static = {"a": None, "b": 3, "c": -0.0, "d": float("inf"), "e": "ü\n", "f": True, "g": 10**30}
    state = {"aux": static, "step": 7, "w": torch.ones(2)}
    zf.save(tmp_path, state)
    like = {"aux": dict.fromkeys(static), "step": 0, "w": torch.zeros(2)}
    assert repr(zf.restore(tmp_path, like)) == repr(state)


@pytest.mark.parametrize("dtype", chunks.NAMES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (40 * dtype.itemsize,), dtype=torch.uint8)
    x = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(5, 8)
    zf.save(tmp_path, {"x": x, "odd": torch.ones(3, dtype=torch.int8)}, step=1)
    back = zf.restore(
        tmp_path,
        {
            "x": x * 0 == 1 if dtype == torch.bool else torch.zeros_like(x),
            "odd": torch.zeros(3, dtype=torch.int8),
        },
    )
    assert torch.equal(back["x"].view(torch.uint8), x.view(torch.uint8))


def test_paths_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "1": torch.ones(3)}
    state |= {"L": {1: torch.ones(4), "1": torch.ones(5)}}
    zf.save(tmp_path, state, step=0)
    assert_same(zf.restore(tmp_path, tree.map(torch.zeros_like, state)), state)


def test_the_files_can_be_read_without_this_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    full = CASES["mixed dtypes"].state(ADAMW, F64)

    def write() -> None:
        step = zf.shard(CASES["mixed dtypes"].step(ADAMW), stage=2)
        zf.save(tmp_path, step.place(full), step=3)

    zf.simulate(2)(write)()
    folder = tmp_path / "step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    named = {tree.dotted(*k): v for k, v in _leaves(full) if torch.is_tensor(v)}
    assert manifest["leaves"].keys() == named.keys()
    assert {f["name"] for f in manifest["files"]} == {p.name for p in folder.iterdir()} - {
        "manifest.json"
    }
    for name, leaf in manifest["leaves"].items():
        flat = []
        for file, start, count, _, _ in leaf["chunks"]:
            with safe_open(folder / manifest["files"][file]["name"], "pt") as opened:
                flat.append(opened.get_tensor(f"{name}[{start}:{start + count}]"))
        x = torch.cat(flat) if flat else torch.zeros(0, dtype=named[name].dtype)
        assert torch.equal(x.view(leaf["shape"]), named[name]), name


def _leaves(state: Any) -> list[Any]:
    import optree

    keys, values, _ = optree.tree_flatten_with_path(state, namespace="zfunc")
    return list(zip(keys, values, strict=True))


def test_each_element_is_written_once(tmp_path: Path) -> None:
    """Whatever the ranks hold in common is shared out; on a mesh of two axes, too."""
    full = {"params": {"w": numbers((300, 100), 1)}, "step": torch.tensor(1)}

    def write(stage: int) -> None:
        mesh = zf.mesh(data=2, tensor=2)
        loss = lambda p, b: p["w"].sum()  # noqa: E731
        step = zf.shard(zf.train_step(loss, zf.optim.sgd(0.1)), stage=stage, mesh=mesh)
        zf.save(tmp_path / str(stage), step.place(full))

    for stage in (0, 3):
        zf.simulate(4)(write)(stage)
        sizes = [f.stat().st_size for f in tmp_path.glob(f"{stage}/step-*/rank-*")]
        assert len(sizes) == 4
        assert 240_000 < sum(sizes) < 242_000
        assert max(sizes) < 70_000


def test_the_last_saved_is_found_and_steps_are_listed(tmp_path: Path) -> None:
    for n in (3, 12, 7):
        zf.save(tmp_path, {"step": torch.tensor(n)})
    assert [c.step for c in zf.checkpoints(tmp_path)] == [7, 12, 3]
    assert all(c.good for c in zf.checkpoints(tmp_path))
    like = {"step": torch.tensor(0)}
    assert int(zf.restore(tmp_path, like)["step"]) == 7
    assert int(zf.restore(tmp_path, like, step=3)["step"]) == 3
    assert int(zf.restore(tmp_path / "step-00000012", like)["step"]) == 12


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("keep", [None, 1, 2])
def test_who_goes_back_and_saves_again_goes_on_from_there(
    keep: int | None, block: bool, tmp_path: Path
) -> None:
    """Steps of the branch that was left do not come back, however high."""

    def body() -> tuple[int, list[int]]:
        for n in range(1, 5):
            zf.save(tmp_path, {"step": n, "branch": 0})
        state = zf.restore(tmp_path, {"step": 0, "branch": 0}, step=2)
        zf.save(tmp_path, {"step": 1 + state["step"], "branch": 1}, block=block, keep=keep)
        found = zf.restore(tmp_path, {"step": 0, "branch": 0})
        assert found["branch"] == 1
        return found["step"], [c.step for c in zf.checkpoints(tmp_path)]

    for step, left in zf.simulate(2)(body)():
        assert step == 3
        assert left == {None: [3, 4, 2, 1], 1: [3], 2: [3, 4]}[keep]


def test_the_order_of_saving_survives_copies_and_damage(tmp_path: Path) -> None:
    """It lies in the checkpoints themselves, and what is damaged is not taken for an old one."""
    a, b, like = tmp_path / "a", tmp_path / "b", {"step": 0}
    for n in (1, 2, 3, 4, 2):
        zf.save(a, {"step": n})
    b.mkdir()
    for n in (2, 4, 1, 3):  # also in another order, with other times
        shutil.copytree(a / f"step-0000000{n}", b / f"step-0000000{n}", copy_function=shutil.copy)
    assert zf.restore(b, like) == {"step": 2}
    file = b / "step-00000002" / "manifest.json"
    whole = file.read_bytes()
    for at in range(whole.index(b'"serial"'), whole.index(b'"files"')):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = [(c.step, c.good) for c in zf.checkpoints(b)]
        assert found == [(2, False), (4, True), (3, True), (1, True)]
        with pytest.warns(UserWarning, match="restored step 4: later"):
            assert zf.restore(b, like) == {"step": 4}
    file.write_bytes(whole)
    zf.save(b, {"step": 3})
    assert [c.step for c in zf.checkpoints(b)] == [3, 2, 4, 1]


def test_checkpoints_from_before_saves_were_counted(tmp_path: Path) -> None:
    """In order of their steps, and all of them before the first that is saved now."""
    for n in (5, 6, 9):
        zf.save(tmp_path, {"step": n})
        file = tmp_path / f"step-{n:08d}" / "manifest.json"
        body = re.sub(rb'"serial": \d+,\n"head": "\w+",\n', b"", file.read_bytes())
        body = body[: -manifest.SEAL_BYTES]
        file.write_bytes(body + f',\n"digest": "{chunks.digest(body)}"}}\n'.encode())
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [(9, True), (6, True), (5, True)]
    zf.save(tmp_path, {"step": 7})
    assert [c.step for c in zf.checkpoints(tmp_path)] == [7, 9, 6, 5]
    assert zf.restore(tmp_path, {"step": 0}) == {"step": 7}
    zf.save(tmp_path, {"step": 8}, keep=2)
    assert [c.step for c in zf.checkpoints(tmp_path)] == [8, 7]


def test_keep_removes_earlier_ones_but_never_the_last_good(tmp_path: Path) -> None:
    for n in range(1, 6):
        zf.save(tmp_path, {"step": n}, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    (tmp_path / "step-00000005" / "manifest.json").write_text("{}")
    zf.save(tmp_path, {"step": 6}, keep=2)  # a damaged one does not count
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [
        (6, True),
        (5, False),
        (4, True),
    ]
    zf.save(tmp_path, {"step": 5}, keep=1)  # an earlier step again: it was saved last
    assert [(c.step, c.good) for c in zf.checkpoints(tmp_path)] == [(5, True)]
    with pytest.raises(ValueError, match="keep=0: expected a whole number from 1 on"):
        zf.save(tmp_path, {"step": 7}, keep=0)


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        zf.save(tmp_path, {"step": 4, "w": torch.full((3,), value)})
    assert names(tmp_path) == ["step-00000004"]
    assert zf.restore(tmp_path, {"step": 0, "w": torch.zeros(3)})["w"].tolist() == [2.0] * 3


def test_killed_between_two_renamings(tmp_path: Path) -> None:
    """The old one counts as long as there is no new one, and gets its name back."""
    zf.save(tmp_path, {"step": 4})
    (tmp_path / "step-00000004").rename(tmp_path / ".replaced-step-00000004")
    assert zf.restore(tmp_path, {"step": 0}) == {"step": 4}
    zf.save(tmp_path, {"step": 5})
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_the_step_is_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no entry `step` that is a number"):
        zf.save(tmp_path, {"w": torch.ones(1)})


def test_numbers_of_steps_are_whole(tmp_path: Path) -> None:
    """A checkpoint of another step than was asked for would be taken for that one."""
    state: Any = {"w": torch.ones(1)}
    bad: Any
    for bad in (-1, 1.5, True, "2", torch.ones(2), float("nan")):
        with pytest.raises(ValueError, match=r"step=.*: expected a whole number from 0 on"):
            zf.save(tmp_path, state, step=bad)
    zf.save(tmp_path, state, step=torch.tensor(2))  # type: ignore[arg-type]
    assert names(tmp_path) == ["step-00000002"]
    for bad in (1.5, "2"):
        with pytest.raises(ValueError, match=r"step=.*: expected a whole number from 0 on"):
            zf.restore(tmp_path, state, step=bad)
    for bad in (0, 1.5, True, "1"):
        with pytest.raises(ValueError, match=r"keep=.*: expected a whole number from 1 on"):
            zf.save(tmp_path, state, step=3, keep=bad)
    assert names(tmp_path) == ["step-00000002"]


def test_every_differing_path_is_listed(tmp_path: Path) -> None:
    zf.save(tmp_path, {"a": torch.ones(2), "b": torch.ones(3), "c": 1, "d": torch.ones(1)}, step=1)
    like = {"a": torch.ones(3), "b": torch.ones(3).double(), "c": torch.ones(()), "e": None}
    with pytest.raises(zf.CheckpointError) as caught:
        zf.restore(tmp_path, like)
    said = str(caught.value)
    for part in (
        "Only in the checkpoint: d.",
        "Only in this state: e.",
        "a (F32 [2] there, F32 [3] here)",
        "b (F32 [3] there, F64 [3] here)",
        "c (no tensor there, F32 [] here)",
    ):
        assert part in said


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match=r"aux.f is a builtins.function"):
        zf.save(tmp_path, {"aux": {"f": lambda: 0}}, step=1)
    with pytest.raises(zf.CheckpointError, match=r"z has dtype torch\.complex128"):
        zf.save(tmp_path, {"z": torch.zeros(1, dtype=torch.complex128)}, step=1)
    assert not list(tmp_path.iterdir())


def test_states_that_differ_between_ranks_are_not_saved(tmp_path: Path) -> None:
    def write() -> None:
        zf.save(tmp_path, {"w": torch.ones(2), "n": zf.rank()}, step=1)

    with pytest.raises(zf.CheckpointError, match="n is 0 on rank 0 and 1 on rank 1"):
        zf.simulate(2)(write)()


def test_a_donated_state_is_neither_saved_nor_restored_into(tmp_path: Path) -> None:
    step = zf.donate(STACK.step(ADAMW))
    old = step.place(STACK.state(ADAMW, F64))
    zf.save(tmp_path, old)
    step(old, regression(0, F64))
    for use in (lambda: zf.save(tmp_path, old, step=1), lambda: zf.restore(tmp_path, old)):
        with pytest.raises(zf.DonatedStateError):
            use()


def test_restoring_is_silent_where_nothing_is_damaged(tmp_path: Path) -> None:
    zf.save(tmp_path, {"step": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zf.restore(tmp_path, {"step": 1})
