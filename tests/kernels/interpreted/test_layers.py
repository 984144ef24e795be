"""Layers of a transformer: the Triton kernels against their twins, forward and backward."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.closeness import assert_near, poisoned
from tests.kernels.layer_cases import BY_NAME, CASES, Case, offset, outputs
from zfunc import kernels

# Row length and rows: more rows than programs hold at once, a prime beyond a warp, none.
SHAPES = ((8, 515), (257, 3), (33, 0))
EITHER = (torch.float32, torch.bfloat16)
every_case = pytest.mark.parametrize("case", CASES, ids=BY_NAME)


def ran(f: Any, args: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, for fixed cotangents in an awkward layout."""
    leaves = [x.detach().requires_grad_() for x in args]
    out = outputs(f(*leaves))
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in out]
    grads = [g.mT.contiguous().mT if g.dim() > 1 else g for g in grads]
    return [y.detach() for y in out] + list(torch.autograd.grad(out, leaves, grads))


def held(f: Any, args: list[Tensor]) -> None:
    expected = ran(f, args)
    with kernels.use("triton"), poisoned():
        found = ran(f, args)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y)


@every_case
def test_it_is_its_twin(case: Case):
    for dtype in EITHER:
        for n, rows in SHAPES:
            held(case.fused, case.tensors(n, min(rows, case.most), dtype))


@pytest.mark.parametrize(
    ("name", "n"),
    [("layer_norm", 257), ("layer_norm", 16411), ("cross_entropy", 300)]
    + [("cross_entropy, smooth", n) for n in (300, 9001)],
)
def test_numbers_far_from_zero_keep_their_digits(name: str, n: int):
    """Their twins do, ``tests/kernels/test_layers.py``."""
    first, *rest = BY_NAME[name].tensors(n, 4, torch.float32)
    held(BY_NAME[name].fused, [offset(first), *rest])


@pytest.mark.parametrize("name", ["rms_norm, residual", "layer_norm, residual"])
def test_rows_longer_than_a_program(name: str):
    """Beyond what one holds, forward and backward."""
    held(BY_NAME[name].fused, BY_NAME[name].tensors(16411, 17, torch.bfloat16))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_element_by_element(approximate: Literal["tanh", "none"]):
    """Small values too, and what is not finite: norms of the whole would hide both."""
    x = torch.cat([torch.linspace(-5, 8, 4001), torch.tensor([-1e4, 1e4, -40.0, torch.inf])])
    exact = F.gelu(x.double(), approximate=approximate)
    with kernels.use("triton"):
        found = kernels.bias_gelu(x, None, approximate)
        lost = kernels.bias_gelu(torch.tensor([torch.nan, -torch.inf]), None, approximate)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-12)
    assert (found.double() - exact).abs()[:-4].max() < 1e-6
    assert lost.isnan().all()  # as in torch


def test_a_bias_whose_gradient_is_summed_over_several_tiles():
    held(kernels.bias_gelu, BY_NAME["bias_gelu"].tensors(2100, 40, torch.bfloat16))


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy, smooth"])
def test_more_classes_than_a_block(name: str):
    held(BY_NAME[name].fused, BY_NAME[name].tensors(9001, 3, torch.bfloat16))


def test_rows_of_one_element():
    x = torch.tensor([[2.0], [-3.0], [0.0]])
    for f in (kernels.rms_norm, kernels.layer_norm):
        expected = ran(f, [x])
        with kernels.use("triton"), poisoned():
            found = ran(f, [x])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@every_case
def test_nan_and_infinity_spread_as_in_the_twin(case: Case):
    for bad in (torch.nan, -torch.inf, torch.inf):
        if bad == torch.inf and case.name == "bias_gelu, no bias":
            continue  # the CPU's gelu of infinity is NaN in float32, that of a GPU is infinity
        args = case.tensors(6, 3, torch.float32)
        args[0].view(-1)[2] = bad
        expected = ran(case.fused, args)
        with kernels.use("triton"):
            found = ran(case.fused, args)
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_threads_take_turns():
    """Ranks may be threads, and the interpreter keeps the program that it is at in a global."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    xs = [torch.randn(40 + i, 33) for i in range(3)]
    expected = [kernels.rms_norm(x) for x in xs]

    def rank(x: Tensor) -> list[Tensor]:
        with kernels.use("triton"):
            return [kernels.rms_norm(x) for _ in range(4)]

    try:
        with ThreadPoolExecutor(len(xs)) as pool:
            ran = list(pool.map(rank, xs))
    finally:
        sys.setswitchinterval(before)
    for found, y in zip(ran, expected, strict=True):
        for x in found:
            torch.testing.assert_close(x, y)
