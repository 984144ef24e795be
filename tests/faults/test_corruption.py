"""Files that are damaged, missing, foreign or newer: always ``CheckpointError``, never bad numbers.

Bits are flipped, bytes changed, inserted and lost, files cut, emptied, swapped and removed,
at random; every damage must be seen, and the checkpoint before it must come back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import assert_same, numbers
from zfunc.files import chunks, manifest

Damage = Callable[[random.Random, Path], None]
CORRUPTIONS = 1000


def state(step: int) -> dict[str, Any]:
    return {
        "params": {"w": numbers((7, 9), step), "b": numbers((5,), step, torch.float32)},
        "key": torch.arange(2) + step,
        "note": "ü" * step,
        "step": step,
    }


def blank() -> dict[str, Any]:
    return {
        "params": {"w": torch.zeros(7, 9, dtype=torch.float64), "b": torch.zeros(5)},
        "key": torch.zeros(2, dtype=torch.int64),
        "note": "",
        "step": 0,
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 1 and 2, written by 2 ranks in chunks of 128 bytes."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 128)
    monkeypatch.setattr("zfunc.files.inventory.SHARE", 8)
    for n in (1, 2):
        zf.simulate(2)(lambda n=n: zf.save(tmp_path, state(n)).step)()
    return tmp_path


def flip(rng: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def overwrite(rng: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    at, n = rng.randrange(len(data)), rng.randint(1, 40)
    new = rng.choice([bytes(n), rng.randbytes(n), b"9" * n, b"[" * n])
    data[at : at + n] = new[: len(data) - at]
    file.write_bytes(data)


def insert(rng: random.Random, file: Path) -> None:
    data = file.read_bytes()
    at = rng.randrange(len(data) + 1)
    file.write_bytes(data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:])


def lose(rng: random.Random, file: Path) -> None:
    data = file.read_bytes()
    at = rng.randrange(len(data))
    file.write_bytes(data[:at] + data[at + rng.randint(1, 20) :])


def cut(rng: random.Random, file: Path) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def remove(rng: random.Random, file: Path) -> None:
    file.unlink()


def swap(rng: random.Random, file: Path) -> None:
    """The file of the same name of the other checkpoint: whole, but not this one's."""
    shutil.copy(file.parent.parent / "step-00000001" / file.name, file)


def replace(rng: random.Random, file: Path) -> None:
    """Something else under its name."""
    file.unlink()
    rng.choice([file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to("/nowhere")])()


DAMAGES: dict[Damage, int] = {
    flip: 8, overwrite: 4, insert: 2, lose: 2, cut: 2, remove: 1, swap: 1, replace: 1
}  # fmt: skip


def read(path: Path, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zf.restore(path, blank(), **how)


def test_a_thousand_corruptions_are_all_seen(root: Path, tmp_path_factory: Any) -> None:
    rng = random.Random(20261121)
    work = tmp_path_factory.mktemp("damaged")
    ways, weights = list(DAMAGES), list(DAMAGES.values())
    seen = 0
    while seen < CORRUPTIONS:
        copy = work / str(seen)
        shutil.copytree(root, copy)
        folder = copy / "step-00000002"
        file = rng.choice(sorted(folder.iterdir()))
        before = file.read_bytes()
        (way,) = rng.choices(ways, weights)
        way(rng, file)
        if file.is_file() and file.read_bytes() == before:
            shutil.rmtree(copy)
            continue  # zeros over zeros: nothing was damaged
        seen += 1
        where = f"{seen}: {way.__name__} in {file.name}"
        with pytest.raises(zf.CheckpointError) as caught:
            read(copy, step=2)
        assert "step-00000002" in str(caught.value), where
        assert not zf.checkpoints(copy)[0].good, where
        assert_same(read(copy), state(1), where)
        shutil.rmtree(copy)


def test_every_single_bit_has_a_digest(root: Path) -> None:
    folder = root / "step-00000002"
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        for at in range(len(data)):
            for bit in range(0, 8, 3):
                broken = bytearray(data)
                broken[at] ^= 1 << bit
                file.write_bytes(broken)
                assert not zf.checkpoints(folder)[0].good, (file.name, at, bit)
        file.write_bytes(data)
    assert zf.checkpoints(folder)[0].good


def test_ranks_agree_on_what_is_damaged(root: Path) -> None:
    """One rank alone meets the bad chunk; all pass over the checkpoint, one of them says so."""
    file = root / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    tx = zf.optim.sgd(0.1)

    def body(**how: Any) -> Any:
        step = zf.shard(zf.train_step(lambda p, b: p["w"].sum(), tx), stage=3)
        return zf.full(zf.restore(root, step.place(blank()), **how))

    with pytest.warns(UserWarning, match=r"restored step 1: later.*step 2: .*rank-00001") as said:
        states = zf.simulate(3)(body)()
    assert len(said) == 1
    for each in states:
        assert_same(each, state(1))
    with pytest.raises(zf.CheckpointError, match=r"rank-00001.*do not fit their digest"):
        zf.simulate(3)(body)(step=2)


def test_no_good_one_is_left(root: Path) -> None:
    for file in root.glob("step-*/manifest.json"):
        file.unlink()
    with pytest.raises(zf.CheckpointError, match=r"no good checkpoint. step 2: .*step 1: "):
        zf.restore(root, blank())


def test_foreign_folders(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path, "holds no checkpoint"),
        (tmp_path / "none", "No such file"),
        (Path("/etc/hostname"), "Not a directory"),
    ):
        with pytest.raises(zf.CheckpointError, match=said):
            zf.restore(path, blank())
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text('{"hello": "world"}')
    with pytest.raises(zf.CheckpointError, match="truncated or no manifest"):
        zf.restore(tmp_path, blank())


def test_a_file_where_the_folder_would_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(zf.CheckpointError, match=r"a file of this name.* a folder"):
            zf.save(path, state(1), step=1)
    assert (tmp_path / "run").read_text() == "no folder"


def test_a_newer_version_is_not_passed_over(root: Path) -> None:
    """It is no damage, and an older state is not what was asked for."""
    file = root / "step-00000002" / "manifest.json"
    reseal(file, lambda text: text.replace('"version": 1,', '"version": 3,'))
    with pytest.raises(zf.CheckpointError, match=r"version 3, this zfunc reads up to 2.*install"):
        zf.restore(root, blank())
    assert_same(zf.restore(root, blank(), step=1), state(1))


def reseal(file: Path, change: Callable[[str], str]) -> None:
    """Change a manifest, and give it a digest that fits: what a hostile hand would do."""
    body = file.read_bytes()[: -manifest.SEAL_BYTES]
    new = change(body.decode()).encode()
    assert new != body
    file.write_bytes(new + f',\n"digest": "{chunks.digest(new)}"}}\n'.encode())


def absurd(key: str, value: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        document = json.loads(text + "}")
        where: Any = document
        *way, last = key.split("/")
        for part in way:
            where = where[int(part) if isinstance(where, list) else part]
        where[int(last) if isinstance(where, list) else last] = value
        return json.dumps(document, indent=0)[:-1].rstrip()

    return change


HOSTILE = {
    "deep": lambda text: text.replace('"step": 2', '"step": ' + "[" * 100_000),
    "twice": lambda text: text.replace('"step": 2', '"step": 2, "step": 2'),
    "not a number": lambda text: text.replace('"step": 2', '"step": NaN'),
    "digits": lambda text: text.replace('"step": 2', '"step": ' + "9" * 5000),
    "another format": absurd("format", "something else"),
    "version": absurd("version", True),
    "another step": absurd("step", 3),
    "negative": absurd("leaves/params.w/chunks/0/1", -1),
    "far away": absurd("leaves/params.w/chunks/0/3", 1 << 60),
    "huge": absurd("leaves/params.w/shape/0", 1 << 61),
    "dimensions": absurd("leaves/params.w/shape", [1] * 1000),
    "a word": absurd("leaves/params.w/chunks/0/2", "many"),
    "no such file": absurd("leaves/params.w/chunks/0/0", 7),
    "half a chunk": absurd("leaves/params.w/chunks/0", [0, 0]),
    "dtype": absurd("leaves/params.w/dtype", "F32"),
    "no dtype": absurd("leaves/params.w/dtype", "float"),
    "upwards": absurd("files/0/name", "../step-00000001/rank-00000.safetensors"),
    "the same file": absurd("files/1/name", "rank-00000.safetensors"),
    "header": absurd("files/0/header", 1 << 40),
    "size": absurd("files/0/size", 1 << 40),
    "no leaves": absurd("leaves", []),
    "no files": absurd("files", {}),
    "static": absurd("static/note", {"float": "x"}),
    "both": absurd("static/params.w", 1),
    "a third rank": absurd("extra", [1, 2, 3]),
    "no list": absurd("extra", {"0": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_manifests_that_lie(name: str, root: Path) -> None:
    reseal(root / "step-00000002" / "manifest.json", HOSTILE[name])
    with pytest.raises(zf.CheckpointError, match="manifest"):
        zf.restore(root, blank(), step=2)
    assert_same(read(root), state(1))
