"""Products of a few rows: the Triton kernels against float64, in every kind and odd shape."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.closeness import assert_near, poisoned
from tests.kernels.products import rounded, weights
from zfunc import kernels
from zfunc.kernels import dispatch, skinny_launch

KINDS = ("skinny_mm", "w8_mm", "w4_mm", "w8a8_mm")
# Rows, columns, length: one; primes; whole blocks; several of them.
SHAPES = [(1, 1, 1), (5, 67, 131), (16, 128, 256), (3, 130, 700), (2, 3, 0)]
GROUPS = [(None, False), (32, False), (32, True), (64, False), (128, True), (256, False)]
CASES = [(kind, shape, None, False) for kind, shape in itertools.product(KINDS, SHAPES)]
CASES += [
    (kind, (3, 66, 300), group, zeros)
    for kind, (group, zeros) in itertools.product(KINDS[1:], GROUPS)
]
# Words have a tile for 8 rows and one for 16.
CASES += [("w4_mm", (9, 66, 300), group, zeros) for group, zeros in GROUPS]


@pytest.mark.parametrize(("kind", "shape", "group", "zeros"), CASES)
def test_it_is_the_product(
    kind: str,
    shape: tuple[int, int, int],
    group: int | None,
    zeros: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    m, n, k = shape
    x, w = torch.randn(m, k).bfloat16(), weights(kind, n, k, group=group, zeros=zeros)
    bias, residual = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16()
    inputs = rounded(x) if kind == "w8a8_mm" and k else x.double()
    exact = inputs @ w.exact.t()
    with kernels.use("triton"), poisoned():
        assert_near(w(x), exact, exact.bfloat16())
        one = w(x, bias, residual)
        monkeypatch.setattr(skinny_launch, "DEPTH", 1)  # a share for each block
        several = w(x, bias, residual)
        assert_near(w(x), exact, exact.bfloat16())
    exact = exact + bias.double() + residual.double()
    assert_near(one, exact, exact.bfloat16())
    assert_near(several, exact, exact.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_float16(kind: str):
    x = torch.randn(3, 300).half()
    w = weights(kind, 66, 300, group=None if kind == "skinny_mm" else 128, dtype=torch.float16)
    with kernels.use("triton"):
        found = w(x)
    assert_near(found, (rounded(x) if kind == "w8a8_mm" else x.double()) @ w.exact.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("amd", [False, True])
def test_zero_points_of_short_groups(
    amd: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """NVIDIA's way takes them off pairs of codes, AMD's off the sums; all codes occur."""
    monkeypatch.setattr(dispatch, "AMD", amd)
    k, codes = 256, torch.arange(-8, 8, dtype=torch.int8)
    w, zero = codes.repeat(16, k // 16), codes[:, None].repeat(1, k // 32)
    scale = torch.rand(16, k // 32).to(dtype)
    exact = (w.double() - zero.repeat_interleave(32, 1)) * scale.double().repeat_interleave(32, 1)
    x = torch.randn(2, k).to(dtype)
    with kernels.use("triton"):
        found = kernels.w4_mm(x, kernels.pack_words(w), scale, zero, group=32)
    assert_near(found, x.double() @ exact.t(), (x.double() @ exact.t()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_8_bits_is_exact(dtype: torch.dtype):
    codes = torch.arange(-128, 128).to(torch.int8)
    w = torch.zeros(256, 16, dtype=torch.int8)
    w[:, 3] = codes
    x = torch.eye(16, dtype=dtype)[3:4]
    with kernels.use("triton"):
        assert torch.equal(kernels.w8_mm(x, w, torch.ones(256, 1)), codes.to(dtype)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: str):
    x, w = torch.randn(3, 200).bfloat16(), weights(kind, 20, 200)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    with kernels.use("triton"):
        found = w(x)
    assert found[0].isfinite().all() and found[1].isnan().all()
    assert not found[2].isfinite().any()


def test_what_does_not_fit_goes_to_the_twin():
    w, x = weights("w8_mm", 8, 48, group=48), torch.randn(17, 48)
    how = {"rows": 3, "group": 48, "dtype": torch.bfloat16}
    for more, reason in (
        ({}, "multiples of 128, not 48"),
        ({"group": 0, "rows": 17}, "up to 16 rows, not 17"),
        ({"group": 0, "dtype": torch.float32}, "16 bits, not torch.float32"),
    ):
        assert reason in kernels.choose("w8_mm", x, **(how | more)).why
    assert_near(w(x), x.double() @ w.exact.t())
