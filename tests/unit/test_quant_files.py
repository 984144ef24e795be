"""Low-bit files: what is written comes back bit by bit, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import zfunc as zf
from zfunc import quant
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor


def params() -> Any:
    torch.manual_seed(0)
    return {
        "blocks": zf.Layers({"w": torch.randn(6, 40), "b": torch.ones(3)} for _ in range(2)),
        "half": torch.randn(4, 33).bfloat16(),
    }


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_round_trip(tmp_path: Path, bits: int, symmetric: bool) -> None:
    q = quant.quantize_tree(params(), bits, 16, symmetric, dynamic=bits == 8)
    file = quant.save(tmp_path / "q.safetensors", q)
    back = quant.load(file, like=params())
    assert isinstance(back["blocks"], zf.Layers)
    mine, theirs = zf.tree.flatten_names(back), zf.tree.flatten_names(q)
    assert mine.keys() == theirs.keys() == quant.load(file).keys()
    for name, x in theirs.items():
        y = mine[name]
        assert type(x) is type(y) and x.dtype == y.dtype
        if isinstance(x, QTensor):
            assert x.format == y.format and torch.equal(x.data_codes, y.data_codes)
            assert torch.equal(x.scale, y.scale)
            assert x.zero is y.zero is None or torch.equal(x.zero, y.zero)
        else:
            assert torch.equal(x, y)
    assert list(tmp_path.iterdir()) == [file]


def rewritten(file: Path, change: Any) -> Path:
    """The file with its tensors and header changed, and saved as safetensors again."""
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["zfunc.quant"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors, header)
    save_file(tensors, file, metadata={"zfunc.quant": json.dumps(header)})
    return file


def _flip(tensors: Any, header: Any) -> None:
    tensors["half.codes"][1, 2] ^= 1


def _shorter(tensors: Any, header: Any) -> None:
    tensors["half.scale"] = tensors["half.scale"][:, :1].clone()


def _other_group(tensors: Any, header: Any) -> None:
    header["half"]["group_size"] = 5


def _nine_bits(tensors: Any, header: Any) -> None:
    header["half"]["bits"] = 9


def _no_scale(tensors: Any, header: Any) -> None:
    del tensors["half.scale"]


def _negative(tensors: Any, header: Any) -> None:
    from zfunc.quant.files import _checksum

    tensors["half.scale"].neg_()
    header["half"]["crc32"]["scale"] = _checksum(tensors["half.scale"])


def _nonsense(tensors: Any, header: Any) -> None:
    header["half"] = 3


@pytest.mark.parametrize(
    "change", [_flip, _shorter, _other_group, _nine_bits, _no_scale, _negative, _nonsense]
)
def test_a_tampered_file_is_found_out(tmp_path: Path, change: Any) -> None:
    file = quant.save(tmp_path / "q.safetensors", quant.quantize_tree(params(), 8, 16))
    with pytest.raises(zf.CheckpointError, match=r"q\.safetensors"):
        quant.load(rewritten(file, change))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match="no such file"):
        quant.load(tmp_path / "none")
    (tmp_path / "cut").write_bytes(b"\x08\x00\x00")
    with pytest.raises(zf.CheckpointError, match="no whole safetensors"):
        quant.load(tmp_path / "cut")
    save_file({"w": torch.ones(2)}, tmp_path / "plain")
    with pytest.raises(zf.CheckpointError, match="plain parameters"):
        quant.load(tmp_path / "plain")


def test_another_tree_is_told_apart(tmp_path: Path) -> None:
    file = quant.save(tmp_path / "q.safetensors", quant.quantize_tree(params(), 8, 16))
    with pytest.raises(zf.CheckpointError, match=r"lacks more.*half"):
        quant.load(file, like={"blocks": params()["blocks"], "more": torch.ones(1)})
    other = {**params(), "half": torch.ones(4, 34)}
    with pytest.raises(zf.CheckpointError, match=r"half has shape \(4, 33\)"):
        quant.load(file, like=other)


@pytest.mark.parametrize("part", ["codes", "scale", "zero"])
def test_two_leaves_of_one_name_are_not_written(tmp_path: Path, part: str) -> None:
    """Before, one was written over the other."""
    w, plain = torch.randn(3, 4), torch.randn(3, 4)
    low = QTensor.quantize(w, Format(8, None, symmetric=False))
    for tree in (
        {"a": {"w": low, f"w.{part}": plain}},
        {"a": {f"w.{part}": plain, "w": low}, "b": plain},
    ):
        with pytest.raises(zf.CheckpointError, match=rf"a\.w is quantised.* called a\.w\.{part}"):
            quant.save(tmp_path / "q.safetensors", tree)
    with pytest.raises(zf.CheckpointError, match=r"\['a', 'w'\] and at \['a\.w'\]"):
        quant.save(tmp_path / "q.safetensors", {"a": {"w": low}, "a.w": plain})
    assert not list(tmp_path.iterdir())


def test_a_leaf_named_like_a_part_is_written_where_it_is_in_parts_itself(tmp_path: Path) -> None:
    tree = {"w": torch.randn(3, 4), "w.codes": torch.randn(3, 4)}
    q = quant.quantize_tree(tree, include="*")
    back = quant.load(quant.save(tmp_path / "q.safetensors", q), like=tree)
    for name, x in q.items():
        assert torch.equal(back[name].dequantize(), x.dequantize())
