"""Sums of squares: the same bits wherever a leaf lies, and all digits."""

from __future__ import annotations

import math

import pytest
import torch

from zfunc import tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut
from zfunc.trees.squares import Segments, square_sum, square_sums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 63, 64, 65, 129, 4095, 4096, 4097, 9000, 70_001, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_leaf_has_the_same_sum_wherever_it_lies(dtype: torch.dtype, threads: int):
    leaves = [torch.randn(n, dtype=torch.float64).to(dtype) for n in SIZES]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [square_sum(x) for x in leaves]
        assert torch.equal(square_sums(leaves), torch.stack(alone))
        assert torch.equal(square_sums(leaves[::-1]).flip(0), torch.stack(alone))
        layout = make_layout(dict(enumerate(leaves)), unit_bytes=1 << 12)
        placed = tree.map(lambda x: x * 1, cut(layout, dict(enumerate(leaves)), 0))
        shaped = [x.view(-1, 3) if x.numel() % 3 == 0 else x for x in leaves]
        for norms in (tree.leaf_norms(placed), tree.leaf_norms(dict(enumerate(shaped)))):
            for found, expected in zip(tree.leaves(norms), alone, strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected.sqrt())
        assert torch.equal(tree.global_norm(placed), tree.global_norm(leaves))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_keep_their_digits(dtype: torch.dtype):
    for n in SIZES[1:]:
        x = (torch.randn(n, dtype=torch.float64) + 1).to(dtype)
        exact = math.fsum((x.double() ** 2).tolist())
        rounding = 1e-15 if dtype == torch.float64 else 4e-7
        assert square_sum(x).item() == pytest.approx(exact, rel=rounding)


def test_what_lies_between_leaves_does_not_count():
    flat = torch.full((256,), float("inf"))
    flat[0:3], flat[128:192] = 2.0, 1.0
    assert Segments((((0, 3), (128, 192)),)).square_sums([flat]).tolist() == pytest.approx([12, 64])


def test_leaves_do_not_spoil_each_other():
    leaves = [torch.ones(70), torch.tensor([float("nan")]), torch.tensor([float("inf")])]
    sums = square_sums([*leaves, torch.ones(2)]).tolist()
    assert sums[0] == pytest.approx(70, rel=4e-7)
    assert math.isnan(sums[1])
    assert math.isinf(sums[2])
    assert sums[3] == pytest.approx(2, rel=4e-7)


def test_strided_mixed_and_batched_leaves():
    x = torch.arange(12.0).view(3, 4)
    assert square_sum(x.t()) == square_sum(x)
    assert square_sum(x[:, 1]).item() == pytest.approx(1 + 25 + 81)
    mixed = square_sums([x, x.double(), torch.tensor(2.0, dtype=torch.float16)])
    assert mixed.dtype == torch.float64
    assert mixed.tolist() == pytest.approx([506, 506, 4])
    assert torch.vmap(square_sum)(x).tolist() == pytest.approx([14, 126, 366])
    assert square_sums([]).tolist() == []


def test_leaves_of_several_flats_have_the_sums_of_each_flat() -> None:
    torch.manual_seed(0)
    flats = [torch.randn(192), torch.randn(64), torch.randn(0), torch.randn(256)]
    bounds = (((0, 100), (128, 129)), ((0, 64),), (), ((64, 64), (64, 200)))
    each = [Segments((row,)).square_sums([x]) for row, x in zip(bounds, flats, strict=True)]
    both = Segments(bounds).square_sums(flats)
    assert torch.equal(both, torch.cat(each))
    crooked = (*bounds[:3], ((3, 70),))
    last = Segments(crooked).square_sums(flats)[-1]
    assert float(last) == pytest.approx(float(flats[3][3:70].square().sum()))
