"""Signs with error feedback: the Triton kernels against their twins."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, assert_near, poisoned
from zfunc import kernels

GROUPS = (None, 128, 2048)
CASES = list(itertools.product((1, 9, 1031, 3001), GROUPS, ("rms", "mean")))
CASES += [(n, None, "rms") for n in LENGTHS] + [(9000, 8192, "mean"), (256, 256, "rms")]


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Bits are equal; scales and errors were summed in another order."""
    assert torch.equal(found[0], expected[0])
    for x, y in zip(found[1:], expected[1:], strict=True):
        assert_near(x, y)


@pytest.mark.parametrize(("n", "group", "scaling"), CASES)
def test_pack(n: int, group: int | None, scaling: str):
    x, error = torch.randn(n), torch.randn(n)
    expected = kernels.onebit_pack(x, error, group=group, scaling=scaling)
    with kernels.use("triton"), poisoned():
        found = kernels.onebit_pack(x, error, group=group, scaling=scaling)
        sent = kernels.onebit_pack_(x, error, group=group, scaling=scaling)
    same(found, expected)
    same((*sent, error), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pack_of_16_bits(dtype: torch.dtype):
    x, error = torch.randn(1031).to(dtype), torch.randn(1031)
    expected = kernels.onebit_pack(x, error)
    with kernels.use("triton"):
        same(kernels.onebit_pack(x, error), expected)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("n", "group", "scaling"), CASES)
def test_mean(n: int, group: int | None, scaling: str, workers: int):
    sent = [
        kernels.onebit_pack(torch.randn(n), torch.zeros(n), group=group) for _ in range(workers)
    ]
    bits, scale = (torch.stack([s[i] for s in sent]) for i in (0, 1))
    error = torch.randn(n)
    expected = kernels.onebit_mean(bits, scale, error, group=group, scaling=scaling)
    with kernels.use("triton"), poisoned():
        found = kernels.onebit_mean(bits, scale, error, group=group, scaling=scaling)
        sent_on = kernels.onebit_mean_(bits, scale, error, group=group, scaling=scaling)
    same(found, expected)
    same((*sent_on, error), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("senders", [(), (3,)])
@pytest.mark.parametrize(("n", "group"), [(n, group) for n in LENGTHS for group in GROUPS])
def test_unpack(n: int, group: int | None, senders: tuple[int, ...], dtype: torch.dtype):
    width, groups = kernels.onebit_bytes(n), -(-n // group) if group else 1
    bits = torch.randint(0, 256, (*senders, width), dtype=torch.uint8)
    scale = torch.rand(*senders, groups)
    expected = kernels.onebit_unpack(bits, scale, n, group=group, dtype=dtype)
    with kernels.use("triton"), poisoned():
        found = kernels.onebit_unpack(bits, scale, n, group=group, dtype=dtype)
    assert torch.equal(found, expected)


def test_signs_of_zero_nan_and_infinity():
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0])
    error = torch.tensor([0.0, -0.0, 0.0, 0.0, 0.0, 0.0])
    expected = kernels.onebit_pack(x, error)
    with kernels.use("triton"):
        found = kernels.onebit_pack(x, error)
    assert torch.equal(found[0], expected[0])
    assert found[1].isnan().all() and found[2].isnan().all() and expected[2].isnan().all()
