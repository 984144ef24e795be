"""The norm of gradients and what clips them: the twin against torch, under transforms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import assert_near
from zfunc import kernels, optim
from zfunc.kernels.gradient_norm import CHUNK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (30, 40), (CHUNK + 1,)])
def test_it_is_the_sum_of_squares(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    for y in (x, x.t()) if x.dim() == 2 else (x,):
        squares, finite = kernels.sum_squares(y)
        assert_near(squares, x.double().square().sum())
        assert finite


def test_what_is_not_finite_and_what_only_overflows():
    for value in (torch.nan, torch.inf, -torch.inf):
        clip = kernels.norm_clip([torch.ones(3), torch.tensor([1.0, value])], 1.0)
        assert not clip.finite and not clip.norm.isfinite()
    squares, finite = kernels.sum_squares(torch.full((3,), 1e30))
    assert squares == torch.inf and finite


def test_it_clips_as_the_optimizer_does():
    grads = [torch.randn(100), torch.randn(33)]
    for norm in (0.5, 1e6):
        clip = kernels.norm_clip(grads, norm)
        tx = optim.clip_by_global_norm(norm)
        clipped, _ = tx.update(grads, tx.init(grads))
        for x, y in zip(grads, clipped, strict=True):
            torch.testing.assert_close(x * clip.factor, y)


def test_under_transforms_of_torch():
    torch.library.opcheck(torch.ops.zfunc.sum_squares.default, (torch.randn(65),))
    x = torch.randn(3, 130)

    def square(x: Tensor) -> Tensor:
        return kernels.sum_squares(x)[0]

    assert_near(torch.vmap(square)(x), x.double().square().sum(1))
    assert torch.equal(torch.compile(square, fullgraph=True)(x), square(x))


def test_what_does_not_fit_is_named():
    with pytest.raises(kernels.KernelError, match="no gradient, but argument 0 requires one"):
        kernels.sum_squares(torch.ones(2, requires_grad=True))
    with pytest.raises(kernels.KernelError, match=r"x is torch\.int64"):
        kernels.sum_squares(torch.arange(3))
    with pytest.raises(kernels.KernelError, match="0 buffers and max_norm=0"):
        kernels.norm_clip([], 0)
