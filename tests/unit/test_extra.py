"""``zf.save(..., extra=)`` and ``zf.extra``: a JSON value of each rank, with the checkpoint."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zfunc as zf
from zfunc.files import manifest

VALUE = {"position": [1, 2.5, None, True, "ü\ud800"], "rest": {"": [[]], "a.b": -(2**70)}}


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((40,), float(step)), "step": step}


@pytest.mark.parametrize("block", [True, False])
def test_every_rank_gets_what_every_rank_gave(block: bool, tmp_path: Path) -> None:
    """On any number of ranks, of any step, as it was when it was saved."""

    def write() -> None:
        value = {"rank": zf.rank(), **VALUE, "seen": [zf.rank()]}
        for step in (1, 2):
            zf.save(tmp_path, state(step), block=block, extra=value).wait()
            value["seen"] += [step]  # type: ignore[operator]

    zf.simulate(3)(write)()
    for ranks in (1, 2, 4):
        for step, seen in ((1, []), (2, [1]), (None, [1])):
            read = zf.simulate(ranks)(lambda step=step: zf.extra(tmp_path, step))()
            assert read == [[{"rank": r, **VALUE, "seen": [r, *seen]} for r in range(3)]] * ranks
    assert zf.extra(tmp_path / "step-00000001") == zf.extra(tmp_path, 1)


def test_a_copy_is_taken_when_save_is_called(tmp_path: Path) -> None:
    value = {"seen": [1]}
    saving = zf.save(tmp_path, state(1), block=False, extra=value)
    value["seen"].append(2)
    saving.wait()
    assert zf.extra(tmp_path) == [{"seen": [1]}]


def test_a_save_that_is_under_way_is_waited_for(tmp_path: Path) -> None:
    zf.save(tmp_path, state(1), block=False, extra=7)
    assert zf.extra(tmp_path) == [7]


def test_some_ranks_have_nothing_to_say(tmp_path: Path) -> None:
    zf.simulate(2)(lambda: zf.save(tmp_path, state(1), extra=zf.rank() or None))()
    assert zf.extra(tmp_path) == [None, 1]


class Kind(enum.IntEnum):
    ONE = 1


DEEP: list[Any] = []
for _ in range(10**4):
    DEEP = [DEEP]
REFUSED: dict[str, tuple[Any, str]] = {
    "tensor": ({"loader": [0, torch.ones(1)]}, r"extra\['loader'\]\[1\] is a torch\.Tensor"),
    "numpy": ({"x": np.float64(1)}, r"extra\['x'\] is .*float64"),
    "enum": (Kind.ONE, r"extra is a .*Kind, which JSON cannot hold"),
    "nan": ([float("nan")], r"extra\[0\] is nan"),
    "infinity": ({"a": -float("inf")}, r"extra\['a'\] is -inf"),
    "key": ({"a": {3: 1}}, r"extra\['a'\] has the key 3 \(int\): keys of JSON are strings"),
    "set": ({1, 2}, r"extra is a set"),
    "bytes": (b"x", r"extra is a bytes"),
    "depth": (DEEP, r"extra is no JSON value: maximum recursion"),
    "digits": (10**5000, r"extra is no JSON value: .*digits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_json_cannot_hold_is_named_on_all_ranks(name: str, tmp_path: Path) -> None:
    value, said = REFUSED[name]
    zf.simulate(2)(lambda: zf.save(tmp_path, state(1), extra="good"))()

    def write() -> str:
        with pytest.raises(zf.CheckpointError) as caught:
            zf.save(tmp_path, state(2), block=False, extra=value if zf.rank() else 1)
        return str(caught.value)

    first, second = zf.simulate(2)(write)()
    assert first == f"on rank 1: {second}"
    with pytest.raises(zf.CheckpointError, match=said):
        zf.save(tmp_path, state(2), extra=value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]
    assert zf.extra(tmp_path) == ["good"] * 2


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match="holds no checkpoint"):
        zf.extra(tmp_path)
    zf.save(tmp_path, state(1), extra=1)
    zf.save(tmp_path, state(2))
    with pytest.raises(zf.CheckpointError, match="step-00000002 was saved without extra"):
        zf.extra(tmp_path)
    with pytest.raises(zf.CheckpointError, match="no checkpoint of step 3, but of 2, 1"):
        zf.simulate(2)(lambda: zf.extra(tmp_path, 3))()
    assert zf.extra(tmp_path, 1) == [1]


def test_a_damaged_one_is_passed_over_as_restore_does(tmp_path: Path) -> None:
    for step in (1, 2):
        zf.save(tmp_path, state(step), extra=step)
    with (tmp_path / "step-00000002" / "rank-00000.safetensors").open("ab") as file:
        file.write(b"?")
    with pytest.warns(UserWarning, match="restored step 1: later checkpoints are damaged"):
        assert zf.restore(tmp_path, state(0))["step"] == 1
    with pytest.warns(UserWarning, match="read step 1: later checkpoints are damaged"):
        assert zf.extra(tmp_path) == [1]
    with pytest.raises(zf.CheckpointError, match=r"step 2: .* has .* bytes"):
        zf.extra(tmp_path, 2)


def test_it_is_gone_with_its_checkpoint_and_written_anew(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        zf.save(tmp_path, state(step), keep=2, extra=step)
    zf.save(tmp_path, state(3), extra="again")
    assert zf.extra(tmp_path, 3) == ["again"] and zf.extra(tmp_path, 2) == [2]
    with pytest.raises(zf.CheckpointError, match="no checkpoint of step 1"):
        zf.extra(tmp_path, 1)


def test_the_format_of_before_is_the_format_without_it(tmp_path: Path) -> None:
    """No new version: who does not know the entry reads the rest, and without it nothing is new."""
    zf.save(tmp_path, state(1))
    zf.save(tmp_path, state(2), extra={"a": 1})
    old, new = (
        json.loads((tmp_path / f"step-0000000{n}" / "manifest.json").read_bytes()) for n in (1, 2)
    )
    assert new.keys() - old.keys() == {"extra"} and new["extra"] == [{"a": 1}]
    assert new["version"] == old["version"] == manifest.WITHOUT_ROWS
    assert zf.restore(tmp_path, state(0))["step"] == 2
