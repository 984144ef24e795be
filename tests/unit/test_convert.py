"""``zfunc convert``: each kind of checkpoint into each other, without loss."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, bits, numbers
from tests.laws.models import CASES
from zfunc import tree
from zfunc.commands import cli
from zfunc.files import chunks, conversion

# dcp's own remark that it runs in one process, where this file calls it itself
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
F64 = torch.float64
CASE = CASES["mixed dtypes"]


def full() -> Any:
    state = CASE.state(ADAMW, F64)
    return state.replace(step=torch.tensor(17), aux={"note": "ü", "n": 3, "gap": None})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def write() -> None:
        zf.save(tmp_path / "zfunc", zf.shard(CASE.step(ADAMW), stage=3).place(full()))

    zf.simulate(3)(write)()
    return tmp_path / "zfunc"


def run(*words: Any) -> int:
    return cli.main(["convert", *map(str, words)])


def test_to_safetensors_and_back(saved: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(saved, tmp_path / "hf") == 0
    assert "zfunc -> safetensors: 8 tensors" in capsys.readouterr().out
    params = tree.flatten_names(full().params)
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), params)
    assert run(tmp_path / "hf", tmp_path / "again") == 0
    like = {"params": tree.map(torch.zeros_like, full().params)}
    assert_same(zf.restore(tmp_path / "again", like), {"params": full().params})


def test_to_dcp_and_back(saved: Path, tmp_path: Path) -> None:
    """The whole state, numbers and strings included; torch itself reads what was written."""
    assert run(saved, tmp_path / "dcp", "--to", "dcp") == 0
    w = torch.zeros(6, 6, dtype=F64)
    dcp.load({"params.wide": w}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(w, full().params["wide"])
    assert run(tmp_path / "dcp", tmp_path / "again", "--to", "zfunc", "--from", "dcp") == 0
    like = tree.map(lambda x: torch.zeros_like(x) if torch.is_tensor(x) else x, full())
    assert_same(zf.restore(tmp_path / "again", like, step=17), full())
    assert run(tmp_path / "dcp", tmp_path / "hf", "--from", "dcp") == 0
    assert_same(load_file(tmp_path / "hf/model.safetensors"), tree.flatten_names(full().params))


def test_from_dcp_as_others_write_it(tmp_path: Path) -> None:
    state = {"params.w": numbers((5, 4), 1), "opt_state.m": numbers((5, 4), 2), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert run(tmp_path / "dcp", tmp_path / "z", "--to", "zfunc", "--from", "dcp") == 0
    like = {
        "params": {"w": torch.zeros(5, 4, dtype=F64)},
        "opt_state": {"m": torch.zeros(5, 4, dtype=F64)},
        "epoch": 0,
    }
    got = zf.restore(tmp_path / "z", like)
    assert_same(got["params"]["w"], state["params.w"])
    assert_same(got["opt_state"]["m"], state["opt_state.m"])
    assert got["epoch"] == 3


def test_from_deepspeeds_universal_form(tmp_path: Path) -> None:
    """Tensors alone or in a dict beside what tells how to cut them."""
    parts = {"fp32": 1, "exp_avg": 2, "exp_avg_sq": 3}
    for name in ("block.0.w", "head"):
        folder = tmp_path / "ds" / "zero" / name
        folder.mkdir(parents=True)
        for kind, seed in parts.items():
            x = numbers((3, 2), seed + len(name), torch.float32)
            torch.save({"param": x, "cat_dim": 0} if name == "head" else x, folder / f"{kind}.pt")
    assert run(tmp_path / "ds", tmp_path / "z", "--to", "zfunc", "--from", "deepspeed") == 0

    def one() -> Any:
        return {"block": [{"w": torch.zeros(3, 2)}], "head": torch.zeros(3, 2)}

    got = zf.restore(tmp_path / "z", {"params": one(), "exp_avg": one(), "exp_avg_sq": one()})
    assert_same(got["exp_avg"]["block"][0]["w"], numbers((3, 2), 2 + 9, torch.float32))
    assert_same(got["params"]["head"], numbers((3, 2), 1 + 4, torch.float32))
    assert run(tmp_path / "ds", tmp_path / "hf", "--from", "deepspeed") == 0
    assert load_file(tmp_path / "hf/model.safetensors").keys() == {"block.0.w", "head"}


def test_what_is_left_out_is_said(tmp_path: Path, capsys: Any) -> None:
    """A form for one process has no place for a value of each rank."""
    zf.simulate(2)(lambda: zf.save(tmp_path / "z", {"w": torch.ones(2)}, 1, extra=zf.rank()))()
    assert run(tmp_path / "z", tmp_path / "dcp", "--to", "dcp") == 0
    assert "not the `extra` of 2 rank(s)" in " ".join(capsys.readouterr().out.split())
    assert run(tmp_path / "dcp", tmp_path / "hf", "--from", "dcp") == 0
    assert "extra" not in capsys.readouterr().out


def test_the_newest_good_one_is_converted(tmp_path: Path) -> None:
    for n in (1, 2):
        zf.save(tmp_path / "z", {"params": {"w": torch.full((2,), float(n))}}, step=n)
    (tmp_path / "z" / "step-00000002" / "manifest.json").write_text("")
    assert run(tmp_path / "z", tmp_path / "hf") == 0
    assert load_file(tmp_path / "hf/model.safetensors")["w"].tolist() == [1.0, 1.0]


def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    assert run(tmp_path, tmp_path / "x", "--from", "dcp") == 1
    assert "CheckpointError" in capsys.readouterr().err
    assert run(tmp_path / "nothing", tmp_path / "x") == 1
    assert "no such file or folder" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", tmp_path / "x") == 1
    assert "is no checkpoint that zfunc can read" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "ds/zero/w").mkdir(parents=True)
    torch.save([1], tmp_path / "ds/zero/w/fp32.pt")
    assert run(tmp_path / "ds", tmp_path / "x", "--from", "deepspeed") == 1
    assert "holds a list, expected a tensor" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match="expected one of zfunc, safetensors, dcp"):
        conversion.convert(tmp_path / "ds", tmp_path / "x", to="pickle", kind="deepspeed")
    with pytest.raises(ValueError, match="expected one of zfunc, safetensors, dcp, deepspeed"):
        conversion.convert(tmp_path / "ds", tmp_path / "x", kind="pickle")


class Trap:
    """Whoever unpickles it runs it."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sprung),)


def plain() -> dict[str, torch.Tensor]:
    return {"w": numbers((5, 4), 1)}


def trapped(folder: Path, sprung: Path, where: str) -> Path:
    """A checkpoint of torch.distributed.checkpoint in which something is hidden."""
    state = {"params": plain(), "note": Trap(sprung) if where == "leaf" else "x"}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    elif where == "deep in the metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = {"x": [Trap(sprung)]}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize("where", ["metadata", "deep in the metadata", "leaf"])
def test_nothing_that_is_hidden_in_a_pickle_is_run(where: str, tmp_path: Path, capsys: Any) -> None:
    """Neither beside safetensors, nor by itself, nor when it is asked for."""
    sprung = tmp_path / "sprung"
    folder = trapped(tmp_path / "dcp", sprung, where)
    assert run(folder, tmp_path / "a") == 1  # nobody has asked for a pickle
    said = " ".join(capsys.readouterr().err.split())
    assert "is partly pickle" in said and "--from dcp" in said
    assert run(folder, tmp_path / "b", "--from", "dcp", "--to", "zfunc") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert ("note cannot be read" if where == "leaf" else "posix.mkdir") in said
    if where == "leaf":  # whose tensors are what was asked for
        assert run(folder, tmp_path / "c", "--from", "dcp") == 0
        assert_same(load_file(tmp_path / "c" / "model.safetensors"), plain())
    save_file(plain(), folder / "model.safetensors")
    assert run(folder, tmp_path / "d") == 0
    like = {"params": tree.map(torch.zeros_like, plain())}
    assert_same(zf.restore(tmp_path / "d", like), {"params": plain()})
    assert not sprung.exists()
    with pytest.raises(SystemExit):
        run(folder, tmp_path / "e", "--from", "pickle")


def test_nothing_that_is_hidden_in_deepspeeds_files_is_run(tmp_path: Path, capsys: Any) -> None:
    sprung, folder = tmp_path / "sprung", tmp_path / "ds" / "zero" / "w"
    folder.mkdir(parents=True)
    (folder / "fp32.pt").write_bytes(pickle.dumps(Trap(sprung)))
    assert run(tmp_path / "ds", tmp_path / "x") == 1
    assert "--from deepspeed" in " ".join(capsys.readouterr().err.split())
    torch.save({"param": Trap(sprung)}, folder / "fp32.pt")
    assert run(tmp_path / "ds", tmp_path / "x", "--from", "deepspeed") == 1
    assert "cannot be read" in " ".join(capsys.readouterr().err.split())
    assert not sprung.exists()


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/hostname", "a/../../outside.distcp"])
def test_metadata_lead_to_no_file_outside(path: str, tmp_path: Path, capsys: Any) -> None:
    folder = trapped(tmp_path / "dcp", tmp_path / "sprung", "nowhere")
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(folder, tmp_path / "x", "--from", "dcp") == 1
    assert "outside the folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("dtype", chunks.NAMES, ids=str)
def test_every_dtype_from_dcp(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(3, 2).to(dtype)
    dcp.save({"x": x, "none": None, "s": "ü", "f": 0.5}, checkpoint_id=tmp_path, no_dist=True)
    source = conversion.open_source(tmp_path, "dcp")
    assert source.tensors["x"].dtype == dtype
    assert bits(source.read("x")) == bits(x)
    assert source.static() == {"none": None, "s": "ü", "f": 0.5}
