"""Low-bit tensors: their grids, their products, how torch meets them, and bad input."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

import zfunc as zf
from zfunc import quant
from zfunc.quant import grids, packing
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

FORMATS = [
    Format(bits, size, symmetric, dynamic)
    for bits, size, symmetric, dynamic in itertools.product(
        (8, 4), (None, 128, 32), (True, False), (False, True)
    )
]


def weight(n: int, k: int, seed: int = 0, scale: float = 0.05) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale


# --- grids -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    n=st.integers(1, 9),
    k=st.integers(1, 70),
    bits=st.integers(2, 8),
    size=st.one_of(st.none(), st.integers(1, 80)),
    symmetric=st.booleans(),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 10**6),
)
def test_rounding_is_to_the_nearest_code(
    n: int, k: int, bits: int, size: int | None, symmetric: bool, exponent: int, seed: int
) -> None:
    """A weight that is not clipped moves by at most half a step; a code stays where it is."""
    form = Format(bits, size, symmetric)
    rows = weight(n, k, seed, 10.0**exponent)
    grid = grids.fit(rows, form)
    codes = grids.quantize(rows, grid, form)
    back = grids.dequantize(codes, grid, form)
    # A scale in bf16 is off by 2^-9; so many steps are the ends of the grid.
    slack = 2**-8 * 2 ** (bits - 1) if form.packed else 2**-10
    # An asymmetric zero point is rounded as well: half a step more at the ends.
    half = 0.5 if symmetric else 1.0
    step = grids.by_group(torch.ones_like(rows), form) * grid.scale.float().abs()[:, :, None]
    limit = step.reshape(n, -1)[:, :k] * (half + slack)
    ends = codes == -(2 ** (bits - 1)), codes == 2 ** (bits - 1) - 1
    clipped = (ends[0] | ends[1]) & form.packed & symmetric  # as the least squared error will have
    assert ((back - rows).abs() <= limit)[~clipped].all()
    assert ((rows.abs() + limit) >= back.abs())[clipped].all()  # and only ever towards zero
    again = grids.dequantize(grids.quantize(back, grid, form), grid, form)
    assert torch.equal(again, back)


@pytest.mark.parametrize("form", [Format(b, 32, s) for b in (8, 4) for s in (True, False)], ids=str)
def test_zero_and_constant_groups(form: Format) -> None:
    rows = torch.zeros(3, 64)
    rows[1] = 0.7
    rows[2, :32] = -1e-30
    q = QTensor.quantize(rows, form)
    back = q.dequantize()
    assert torch.equal(back[0], rows[0]) and torch.equal(back[2, 32:], rows[2, 32:])
    torch.testing.assert_close(back, rows, rtol=2**-8, atol=0)


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    rows, form = weight(4, 40), Format(4, 8)
    grid = grids.fit(rows, form)
    count, total = 4000, torch.zeros_like(rows)
    for i in range(count):
        noise = zf.random.uniform(zf.random.key(i), rows.shape, low=-0.5, high=0.5)
        total += grids.dequantize(grids.quantize(rows, grid, form, noise), grid, form)
    step = grid.scale.float().abs().repeat_interleave(8, dim=1)
    error = (total / count - rows).abs() / step
    inside = rows.abs() < 6.5 * step  # what would be rounded past the end is clipped
    assert (error[inside] < 5 * 0.5 / math.sqrt(count)).all()


@settings(max_examples=40)
@given(n=st.integers(0, 5), k=st.integers(1, 33), seed=st.integers(0, 1000))
def test_packing_is_exact(n: int, k: int, seed: int) -> None:
    codes = torch.randint(
        -8, 8, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )
    packed = packing.pack(codes)
    assert packed.shape == (n, -(-k // 2)) and packed.dtype == torch.uint8
    assert torch.equal(packing.unpack(packed, k), codes)


# --- as a tensor -------------------------------------------------------------------------------


def test_it_stands_for_its_tensor() -> None:
    w = weight(6, 10)
    for form in FORMATS:
        q = QTensor.quantize(w, form)
        plain = q.dequantize()
        assert isinstance(q, Tensor) and q.shape == w.shape and q.dtype == w.dtype
        assert torch.equal(q + 1, plain + 1) and torch.equal(q[2], plain[2])
        assert torch.equal(q.t() + 0, plain.t()) and not isinstance(q * 2, QTensor)
        assert torch.equal(q.reshape(-1), plain.reshape(-1))
        assert q.float() is q and q.detach() is q
        assert q.double().dtype == torch.float64 and isinstance(q.to("cpu"), QTensor)
        with torch.no_grad():
            F.linear(torch.ones(1, 10), q)  # in a kernel's order now
        for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.clone()):
            assert isinstance(twin, QTensor) and torch.equal(twin.dequantize(), plain)
            assert twin.scale.data_ptr() != q.scale.data_ptr()


def test_shapes_beyond_matrices() -> None:
    for shape in ((5,), (2, 3, 7), (1, 1), (4, 0)):
        x = torch.randn(shape)
        q = QTensor.quantize(x, Format(8, 4))
        assert q.dequantize().shape == x.shape
        torch.testing.assert_close(q.dequantize(), x, rtol=0, atol=0.05)


def test_its_bytes() -> None:
    q8 = QTensor.quantize(weight(128, 256), Format(8, 128))
    q4 = QTensor.quantize(weight(64, 256), Format(4, 32, symmetric=False))
    assert q8.nbytes == 128 * 256 + 128 * 2 * 4
    assert q4.nbytes == 64 * 256 // 2 + 64 * 8 * (2 + 1)
    assert zf.tree.size_bytes({"a": q8, "b": q4}) == q8.nbytes + q4.nbytes
    before = q8.nbytes
    F.linear(torch.ones(1, 256), q8)
    assert q8.nbytes == before and q8._store.data is None  # kept once, in the kernel's order


def test_writing_into_it_raises() -> None:
    q = QTensor.quantize(weight(2, 4), Format(8, None))
    with pytest.raises(zf.PlacementError, match="cannot change"):
        q.add_(1)


# --- trees -------------------------------------------------------------------------------------


def tree() -> dict[str, object]:
    tied = weight(8, 16, 5)
    return {
        "embed": weight(10, 16),
        "blocks": zf.Layers({"up": weight(32, 16, i), "norm": torch.ones(16)} for i in range(2)),
        "head": tied,
        "tail": tied,
        "ids": torch.arange(4),
    }


def test_the_weights_of_linear_layers_are_chosen() -> None:
    q = quant.quantize_tree(tree(), bits=4, group_size=8)
    low = {name for name, x in zf.tree.flatten_names(q).items() if isinstance(x, QTensor)}
    assert low == {"blocks.0.up", "blocks.1.up", "head", "tail"}
    assert q["head"] is q["tail"]
    back = quant.dequantize_tree(q)
    assert isinstance(back["blocks"], zf.Layers)
    assert not any(isinstance(x, QTensor) for x in zf.tree.leaves(back))
    assert torch.equal(back["embed"], tree()["embed"])  # type: ignore[arg-type]


def test_include_chooses_others() -> None:
    def low(include: object) -> set[str]:
        q = quant.quantize_tree(tree(), include=include)  # type: ignore[arg-type]
        return {name for name, x in zf.tree.flatten_names(q).items() if isinstance(x, QTensor)}

    assert low("embed") == {"embed"}
    assert low(["blocks.*.up", "head"]) == {"blocks.0.up", "blocks.1.up", "head"}
    assert low(lambda path: path.startswith("blocks.1")) == {"blocks.1.up"}


def test_modules_say_which_weights_are_theirs() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = torch.nn.Embedding(8, 8)
            self.embed_out = torch.nn.Linear(8, 8)  # named like an embedding, but none
            self.tied = torch.nn.Linear(8, 8, bias=False)
            self.tied.weight = self.lookup.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.tied(self.embed_out(self.lookup(ids)))  # type: ignore[no-any-return]

    net = Net()
    model = zf.functionalize(net)
    q = quant.quantize_tree(model.params, model=model)
    low = {name for name, x in zf.tree.flatten_names(q).items() if isinstance(x, QTensor)}
    assert low == {"embed_out.weight"}
    ids = torch.arange(8)
    expected = model.apply(quant.dequantize_tree(q), ids)
    torch.testing.assert_close(model.apply(q, ids), expected, rtol=1e-4, atol=1e-4)


def test_a_report() -> None:
    params = {"w": weight(16, 64), "b": torch.ones(3)}
    told = quant.report(params, quant.quantize_tree(params, bits=4, group_size=16))
    (row,) = told.rows
    error = params["w"] - quant.quantize_tree(params, bits=4, group_size=16)["w"]
    assert row.largest == pytest.approx(float(error.abs().max()))
    assert row.rms == pytest.approx(float(error.square().mean().sqrt()))
    power = params["w"].square().sum() / error.square().sum()
    assert row.sqnr == pytest.approx(10 * math.log10(power), abs=1e-4)
    assert told.before == 16 * 64 * 4 and "w" in str(told) and told.worst() is row


def test_a_report_is_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    params = {"w": weight(16, 64)}
    file = quant.report(params, quant.quantize_tree(params)).plot(tmp_path / "sqnr.png")
    assert file.read_bytes()[:4] == b"\x89PNG"


# --- bad input ---------------------------------------------------------------------------------


def test_bad_settings() -> None:
    w = {"w": weight(4, 8)}
    for bits in (3, 16, 0, True, 8.0):
        with pytest.raises(ValueError, match="bits"):
            quant.quantize_tree(w, bits=bits)  # type: ignore[arg-type]
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match="group_size"):
            quant.quantize_tree(w, group_size=size)  # type: ignore[arg-type]


def test_bad_weights_are_named() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        params = {"a": {"w": weight(4, 8)}}
        params["a"]["w"][2, 5] = bad
        with pytest.raises(zf.NonFiniteError, match=r"a\.w has 1 value.*row 2, column 5"):
            quant.quantize_tree(params)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("group", [None, 32])
def test_a_product_that_sums_over_nothing_is_0(group: int | None, dynamic: bool) -> None:
    q = QTensor.quantize(weight(7, 0), Format(8, group, True, dynamic))
    assert torch.equal(F.linear(weight(3, 0), q), torch.zeros(3, 7))


def test_weights_without_values_are_refused() -> None:
    with pytest.raises(zf.PlacementError, match=r"w lies on the meta device"):
        quant.quantize_tree({"w": torch.empty(4, 8, device="meta")})


def test_an_include_that_fits_nothing_suggests_paths() -> None:
    with pytest.raises(zf.PlacementError, match=r"closest paths are blocks\.\d\.up"):
        quant.quantize_tree(tree(), include="blocks.*.upp")
    with pytest.raises(zf.PlacementError, match="fewer than two dimensions"):
        quant.quantize_tree(tree(), include="blocks.*.norm")
    with pytest.raises(zf.PlacementError, match="accepts none"):
        quant.quantize_tree(tree(), include=lambda path: False)
    with pytest.raises(zf.PlacementError, match="nothing to quantise"):
        quant.quantize_tree({"b": torch.ones(3)})


def test_what_is_placed_is_not_quantised_in_place() -> None:
    step = zf.shard(zf.train_step(lambda p, b: p["w"].sum(), zf.optim.sgd(0.1)), stage=3)
    state = step.place(zf.TrainState.create({"w": weight(4, 8)}, zf.optim.sgd(0.1)))
    with pytest.raises(zf.PlacementError, match="placed"):
        quant.quantize_tree(state.params)


# Built by hand


def parts(bits: int, symmetric: bool = True) -> dict[str, Any]:
    w = QTensor.quantize(torch.randn(6, 64), Format(bits, 16, symmetric))
    names = ("data", "scale", "zero", "format", "shape", "dtype", "transposed")
    return dict(zip(names, w.__reduce_ex__(2)[1], strict=True))


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "fewer codes": lambda p: {"data": p["data"][:3]},
    "shorter rows": lambda p: {"data": p["data"][:, :8].contiguous()},
    "codes of another kind": lambda p: {"data": p["data"].int()},
    "fewer scales": lambda p: {"scale": p["scale"][:, :1].contiguous()},
    "scales of another kind": lambda p: {"scale": p["scale"].half()},
    "another shape": lambda p: {"shape": (6, 80)},
    "more rows": lambda p: {"shape": (60, 64)},
    "no shape": lambda p: {"shape": ()},
    "transposed": lambda p: {"transposed": True},
    "another group": lambda p: {"format": Format(p["format"].bits, 8)},
    "zero points that it has not": lambda p: {"zero": torch.zeros(6, 4, dtype=torch.int8)},
    "zero points that it lacks": lambda p: {
        "format": Format(p["format"].bits, 16, symmetric=False)
    },
    "too many bits": lambda p: {"format": Format(12, 16)},
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wrong", WRONG)
def test_parts_that_do_not_fit_are_refused(wrong: str, bits: int) -> None:
    good = parts(bits)
    assert QTensor(**good).dequantize().shape == (6, 64)
    with pytest.raises(zf.PlacementError, match="a QTensor of shape"):
        QTensor(**good | WRONG[wrong](good))
