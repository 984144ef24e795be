"""Products of a few rows: the twins against float64, gradients, every transform of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.closeness import assert_near
from tests.kernels.products import rounded, weights
from zfunc import kernels

KINDS = ("skinny_mm", "w8_mm", "w4_mm", "w8a8_mm")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_twin_is_the_product(kind: str, dtype: torch.dtype):
    for shape, (m, n), k, group in (
        ((5,), (5, 33), 130, 64),
        ((2, 3), (6, 40), 256, None),
        ((), (1, 7), 31, None),
        ((0,), (0, 7), 31, None),
    ):
        w = weights(kind, n, k, group=group, zeros=group is not None, dtype=dtype)
        x = torch.randn(*shape, k, dtype=torch.float64).to(dtype)
        bias, residual = torch.randn(n).to(dtype), torch.randn(*shape, n).to(dtype)
        flat = x.view(m, k)
        exact = (rounded(flat) if kind == "w8a8_mm" and m else flat.double()) @ w.exact.t()
        exact = exact.view(*shape, n)
        eager = torch.nn.functional.linear(x.view(m, k), w.exact.to(dtype)).view(*shape, n)
        # Scales are float32, so beside float64 inputs that is what weights are known to.
        bound = eager if dtype != torch.float64 else exact * (1 + 1e-6)
        assert_near(w(x), exact, bound)
        assert_near(
            w(x, bias, residual), exact + bias.double() + residual.double(), bound + bias + residual
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_added_is_added_before_the_one_rounding(dtype: torch.dtype):
    """As near to float64 as torch, which rounds in between where there is a residual."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 129), (257, 129), (257,), (16, 257))
    x, w, bias, more = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    for b in (None, bias):
        for r in (None, more):
            exact, plain = (
                F.linear(*(None if t is None else t.to(kind) for t in (x, w, b)))
                + (0 if r is None else r.to(kind))
                for kind in (torch.float64, dtype)
            )
            assert_near(kernels.skinny_mm(x, w, b, r), exact, plain)


def test_words_hold_what_they_were_given():
    for k in (1, 127, 128, 300):
        codes = torch.randint(-8, 8, (5, k)).to(torch.int8)
        words = kernels.pack_words(codes)
        assert words.dtype == torch.int32 and words.shape == (5, 16 * -(-k // 128))
        assert torch.equal(kernels.unpack_words(words, k), codes)


# torch.func.jvp loads its rules through torch.jit.script, 2.13
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str):
    """Against those of the plain product in float64; of the weights, too, where they are plain."""
    w = weights(kind, 9, 40, dtype=torch.float64)
    x, bias, residual = torch.randn(3, 40), torch.randn(9), torch.randn(3, 9)
    if kind == "skinny_mm":
        x, bias, residual = x.double(), bias.double(), residual.double()
        assert torch.autograd.gradcheck(kernels.skinny_mm, [
            t.requires_grad_() for t in (x, w.packed.data, bias, residual)
        ], check_forward_ad=True, check_batched_grad=True)  # fmt: skip
        assert torch.autograd.gradgradcheck(kernels.skinny_mm, [x, w.packed.data])
        return
    seed = torch.randn(9).expand(3, 9)  # as that of a sum over rows is
    inputs = [t.requires_grad_() for t in (x, bias, residual)]
    found = torch.autograd.grad(w(*inputs), inputs, seed)
    expected = (seed.double() @ w.exact, seed.double().sum(0), seed.double())
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)
    tangent = torch.randn(3, 40)
    _, moved = torch.func.jvp(lambda x: w(x), (x.detach(),), (tangent,))
    assert_near(moved, tangent.double() @ w.exact.t())


@pytest.mark.parametrize("kind", KINDS)
def test_under_transforms_of_torch(kind: str):
    w = weights(kind, 9, 40, dtype=torch.float32)
    parts = (w.packed.data, w.packed.scale, w.packed.zero, kind, 0)
    args = (torch.randn(3, 40), *parts, torch.randn(9), torch.randn(3, 9))
    torch.library.opcheck(torch.ops.zfunc.packed_mm.default, args)
    x, more = torch.randn(4, 3, 40), torch.randn(4, 3, 9)
    assert_near(torch.vmap(w)(x), w(x.reshape(12, 40)).view(4, 3, 9).double())
    both = torch.stack([w(a, None, b) for a, b in zip(x, more, strict=True)]).double()
    assert_near(torch.vmap(lambda a, b: w(a, None, b))(x, more), both)
    assert_near(torch.vmap(lambda a: w(a, None, more[0]))(x), (w(x) + more[0]).double())

    def loss(x: Tensor) -> Tensor:
        return w(x, None, x[:, :9]).square().sum()  # the same tensor twice

    plain = x[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(plain), plain)
    each: list[Callable[[Tensor], Any]] = [
        torch.func.grad(loss),
        lambda x: torch.vmap(torch.func.grad(loss))(x[None])[0],
        torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager"),
    ]
    for grad in each:
        assert_near(grad(x[0]), expected.double())
    again = torch.utils.checkpoint.checkpoint(loss, plain, use_reentrant=False)
    assert_near(torch.autograd.grad(again, plain)[0], expected.double())


def test_what_does_not_fit_is_named():
    x, q = torch.ones(2, 8), torch.zeros(3, 8, dtype=torch.int8)
    with pytest.raises(kernels.KernelError, match=r"expected \(\.\.\., 8\), \(3,\) and \(2, 3\)"):
        kernels.w8_mm(x, q, torch.ones(3, 1), None, torch.ones(4))
    with pytest.raises(kernels.KernelError, match=r"scales \(3, 2\) \(group=4\)"):
        kernels.w8_mm(x, q, torch.ones(3, 1), group=4)
    with pytest.raises(kernels.KernelError, match=r"expected torch\.int32\[3, 16\] for rows of 8"):
        kernels.w4_mm(x, q, torch.ones(3, 1))
