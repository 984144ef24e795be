"""Headers of tensor files that no honest writer writes, and names that no such file can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zfunc as zf
from tests.laws.cases import assert_same
from zfunc import quant
from zfunc.commands import cli
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.quant.files import stored_bits
from zfunc.quant.trees import quantize_tree

HONEST = '{"w":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]}}'


def written(file: Path, header: str | bytes, data: bytes = bytes(32)) -> Path:
    text = header if isinstance(header, bytes) else header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def shaped(shape: str, offsets: str = "[0,32]", dtype: str = '"F32"') -> str:
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


NUMBERS = ["Infinity", "-Infinity", "NaN", "1e400", "-1e400", "9" * 30, "9" * 5000, "1e3", "2.0",
           "2.5", '"2"', "true", "null", "-4", "[2]", "{}", str(2**63)]  # fmt: skip
HOSTILE: dict[str, str | bytes] = {
    **{f"shape [{n:.12}, 2]": shaped(f"[{n},2]") for n in NUMBERS},
    **{f"an empty one of {n:.12}": shaped(f"[0,{n}]", "[0,0]") for n in NUMBERS},
    **{f"from {n:.12}": shaped("[4,2]", f"[{n},32]") for n in NUMBERS},
    **{f"to {n:.12}": shaped("[4,2]", f"[0,{n}]") for n in NUMBERS},
    "a shape that overflows": shaped(f"[{2**32},{2**32},0]", "[0,0]"),
    "many dimensions": shaped(f"[{'1,' * 5000}8]"),
    "shape is a number": shaped("8"),
    "shape is a text": shaped('"42"'),
    "three offsets": shaped("[4,2]", "[0,16,32]"),
    "one offset": shaped("[4,2]", "[32]"),
    "backwards": shaped("[4,2]", "[32,0]"),
    "dtype is a list": shaped("[4,2]", dtype='["F32"]'),
    "dtype is a number": shaped("[4,2]", dtype="Infinity"),
    "a row is a number": '{"w":Infinity}',
    "all of it is": "Infinity",
    "a name twice": HONEST[:-1] + "," + HONEST[1:],
    "a key twice": HONEST.replace('"shape"', '"shape":[4,2],"shape"'),
    "deep": '{"w":' + "[" * 100_000,
    "a lone surrogate": HONEST.replace('"w"', '"\\ud800"'),
    "a raw one": HONEST.encode().replace(b'"w"', b'"\xed\xa0\x80"'),
    "utf-16": HONEST.encode("utf-16-le"),
    "a mark in front": b"\xef\xbb\xbf" + HONEST.encode(),
    "no text": HONEST.encode().replace(b'"w"', b'"\xff"'),
}


def test_an_honest_one_is_read(tmp_path: Path) -> None:
    """What the hostile ones are made of."""
    file = written(tmp_path / "model.safetensors", HONEST)
    assert SafetensorsFiles(file).read("w").tolist() == [[0.0, 0.0]] * 4
    names = ('"\\ud83d\\ude00"', '"ü"', '""')  # a pair of surrogates is text
    for name in names:
        file = written(tmp_path / "model.safetensors", HONEST.replace('"w"', name))
        assert list(SafetensorsFiles(file).tensors) == [json.loads(name)]
    written(file, '{"w":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]}}', b"")
    assert SafetensorsFiles(file).read("w").shape == (0, 7)
    written(file, '{"__metadata__":{"x":"y"},' + HONEST[1:])
    assert list(SafetensorsFiles(file).tensors) == ["w"]


@pytest.mark.parametrize("how", HOSTILE)
def test_a_header_that_lies_is_refused(how: str, tmp_path: Path, capsys: Any) -> None:
    """On all ranks alike, from Python and from the shell, before any memory is asked for."""
    file = written(tmp_path / "model.safetensors", HOSTILE[how])

    def body() -> str:
        with pytest.raises(zf.CheckpointError, match=r"model\.safetensors") as caught:
            zf.import_safetensors(file, {"w": torch.ones(4, 2)})
        return str(caught.value)

    for said in zf.simulate(2)(body)():
        assert len(said) < 1000
        said.encode()  # can be printed
    assert cli.main(["convert", str(file), str(tmp_path / "x")]) == 1
    assert "CheckpointError" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a\udfffb"], ids=ascii)
def test_names_that_no_file_can_have_are_not_written(name: str, tmp_path: Path) -> None:
    def export(**how: Any) -> None:
        zf.export_safetensors(tmp_path / "x", {"w": torch.ones(2), name: torch.ones(2)}, **how)

    for ranks in (1, 2):
        with pytest.raises(zf.CheckpointError, match="a leaf cannot be written") as caught:
            zf.simulate(ranks)(export)()
        str(caught.value).encode()
    with pytest.raises(zf.CheckpointError, match="a leaf cannot be written"):
        quant.save(tmp_path / "q", {name: torch.ones(2)})
    low = quantize_tree({name: torch.ones(2, 4)}, bits=4)
    if name == "__metadata__":  # whose parts have names of their own
        assert str(quant.load(quant.save(tmp_path / "q", low))) == str(low)
    else:
        with pytest.raises(zf.CheckpointError, match="a leaf cannot be written"):
            quant.save(tmp_path / "q", low)
    assert not (tmp_path / "x").exists()


def test_checkpoints_bear_what_they_can(tmp_path: Path) -> None:
    """Chunks have names of their own; numbers and strings lie in the manifest."""
    state = {"__metadata__": torch.ones(3), "\ud800": 3, "s": "\udfff", "step": 1}
    zf.save(tmp_path / "a", state)
    like = {"__metadata__": torch.zeros(3), "\ud800": 0, "s": "", "step": 0}
    assert_same(zf.restore(tmp_path / "a", like), state)
    assert load_file(tmp_path / "a/step-00000001/rank-00000.safetensors").keys() == {
        "__metadata__[0:3]"
    }

    def body() -> None:
        with pytest.raises(zf.CheckpointError, match=r"a leaf cannot be written: 'x\.\\ud800"):
            zf.save(tmp_path / "b", {"x": {"\ud800": torch.ones(2)}, "step": 1})

    zf.simulate(2)(body)()
    assert not (tmp_path / "b").exists()


def test_an_index_names_files_alone(tmp_path: Path) -> None:
    for name in ("a\\u0000b", "\\ud800", "..", "/etc/hostname", "a/../b", ""):
        (tmp_path / "model.safetensors.index.json").write_text(
            f'{{"weight_map": {{"w": "{name}"}}}}'
        )
        with pytest.raises(zf.CheckpointError) as caught:
            zf.import_safetensors(tmp_path, {"w": torch.ones(2)})
        str(caught.value).encode()


ABSURD = ["Infinity", "1e400", "NaN", "-1", "9" * 30, "9" * 5000, "[]", '"x"', "2.0"]


@pytest.mark.parametrize("value", ABSURD, ids=lambda v: v[:12])
@pytest.mark.parametrize("key", ["bits", "group_size", "shape", "dtype", "crc32", "all"])
def test_low_bit_headers_that_lie_are_refused(key: str, value: str, tmp_path: Path) -> None:
    file = quant.save(tmp_path / "q", quantize_tree({"w": torch.ones(2, 4)}, bits=4))
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    told = json.loads(header["__metadata__"]["zfunc.quant"])
    told["w"][key] = "HERE"
    text = value if key == "all" else json.dumps(told).replace('"HERE"', value)
    for hostile in (text, "[" * 100_000):
        header["__metadata__"]["zfunc.quant"] = hostile
        written(file, json.dumps(header), data[8 + n :])
        with pytest.raises(zf.CheckpointError):
            quant.load(file)
        assert stored_bits(file) in (4, 8)
