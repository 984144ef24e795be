"""Parts of low-bit tensors: the codes and scales of the whole, and the whole again."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc.errors import PlacementError
from zfunc.layout.cutter import check_borders
from zfunc.layout.splits import Split
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor
from zfunc.ranks.axes import group
from zfunc.ranks.collectives import largest

FORMS = [
    Format(bits, size, symmetric)
    for bits, size, symmetric in product((8, 4), (6, None), (True, False))
]
# Of a dimension of 20: two ranks' indices, with borders at groups of 6, and some at none.
ROWS = [[[*range(7), 11], [7, 8, 9, 10, *range(12, 20)]], [[*range(20)], [3]]]
GROUPS = [[[*range(6), *range(18, 20)], [*range(6, 18)]], [[*range(12)], [*range(6, 20)]]]


def cases() -> list[Any]:
    found: list[Any] = []
    for form in FORMS:
        found += [(form, (20, 20), turned, dim) for turned in (False, True) for dim in (0, 1)]
        found += [(form, (3, 20, 20), False, dim) for dim in (1, 2)]
    return found


@pytest.mark.parametrize(("form", "shape", "turned", "dim"), cases())
def test_parts_have_the_values_of_the_whole_and_make_it_up(
    form: Format, shape: tuple[int, ...], turned: bool, dim: int
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, inner = QTensor.quantize(x, form, turned), dim == (0 if turned else len(shape) - 1)
    assert low.grain(dim) == (6 if inner and form.group_size else 1)
    for rows in GROUPS if inner and form.group_size else (*ROWS, *GROUPS):
        split = Split.of(dim, rows)
        parts = [split.local(low, rank) for rank in range(2)]
        for rank, part in enumerate(parts):
            assert tuple(part.shape) == split.shape(shape, rank)
            want = low.dequantize().index_select(dim, torch.tensor(rows[rank]))
            assert torch.equal(part.dequantize(), want)
            assert torch.equal(part.code.read(part.to_bytes()).dequantize(), want)
            assert part.data_ptr() != low.data_ptr()
        whole = parts[0].joined(parts, dim, split.runs)
        assert whole.code == low.code and torch.equal(whole.to_bytes(), low.to_bytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_summands_make_up_the_product(form: Format, dtype: torch.dtype, dynamic: bool) -> None:
    form = Format(form.bits, form.group_size, form.symmetric, dynamic)
    generator = torch.Generator().manual_seed(2)
    low = QTensor.quantize(torch.randn(16, 20, generator=generator, dtype=dtype), form)
    x = torch.randn(3, 5, 20, generator=generator, dtype=dtype)
    x[..., 0] *= 9  # so that only one rank has the largest inputs
    split = Split.of(1, [[*range(12)], [*range(12, 20)]])

    def rank() -> Any:
        at = torch.tensor(split.indices(zf.rank()))
        own = split.local(low, zf.rank())
        return own.summand(x.index_select(-1, at), group(zf.mesh(tensor=2), "tensor"))

    found = sum(y.double() for y in zf.simulate(2)(rank)())
    want = torch.nn.functional.linear(x, low).double()
    far = {torch.float32: 2e-4, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert float((found - want).norm() / want.norm()) < far


def test_gradients_pass_the_rounding_of_inputs() -> None:
    low = QTensor.quantize(torch.randn(4, 6).double(), Format(8, None, dynamic=True))
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    y = low.summand(x, group(None, "data"))
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, low.dequantize().sum(0).expand(2, 6))


def test_borders_within_a_group_name_what_would_fit() -> None:
    split = Split.of(1, [range(48), range(48, 96)])
    check_borders("w", split, 16)
    with pytest.raises(PlacementError, match=r"w has a scale for each 32 of .* group_size=16"):
        check_borders("w", split, 32)


def test_the_largest_over_ranks_is_the_same_on_all() -> None:
    def rank() -> Any:
        ranks, r = group(None, "data"), zf.rank()
        x = torch.tensor([[1.0 + r, -1.0 - r], [torch.nan if r == 1 else 0.0, -torch.inf]])
        return largest(x, ranks, "scales"), largest(x.to(torch.int64), ranks), largest(x[:0], ranks)

    for found, whole, empty in zf.simulate(3)(rank)():
        assert found[0].tolist() == [3.0, -1.0] and found[1, 0].isnan()
        assert found[1, 1] == -torch.inf and whole[0, 0] == 3 and empty.shape == (0, 2)
