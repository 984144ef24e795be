"""The norm of gradients: the Triton kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.closeness import LENGTHS, assert_near, poisoned
from zfunc import kernels
from zfunc.kernels import gradient_norm_triton

CASES = [(n, torch.bfloat16) for n in LENGTHS] + [(9001, torch.float32), (9001, torch.float16)]


@pytest.mark.parametrize(("n", "dtype"), CASES)
def test_it_is_its_twin(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gradient_norm_triton, "PROGRAMS", 2)  # so that a program has several blocks
    x = torch.randn(n).to(dtype)
    expected = kernels.sum_squares(x)
    with kernels.use("triton"), poisoned():
        found = kernels.sum_squares(x)
    assert_near(found[0], expected[0])
    assert found[1].item() is expected[1].item() is True


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen(value: float):
    x = torch.ones(5000)
    x[4999] = value
    with kernels.use("triton"):
        clip = kernels.norm_clip([torch.ones(3), x], 1.0)
        huge = kernels.sum_squares(torch.full((100,), 1e30))
    assert not clip.finite and not clip.norm.isfinite()
    assert huge[0] == torch.inf and huge[1]
