"""AdamW over a flat buffer: the twin against float64, and the operator under every transform."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.kernels.closeness import LENGTHS, assert_near, distance, poisoned
from tests.kernels.fenced import fenced
from zfunc import kernels, optim

HYPER = kernels.adamw_hyper(0.1, 3, weight_decay=0.1, factor=0.5)


def buffers(n: int, grad: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n).to(grad), torch.randn(n), torch.randn(n) * 0.1, torch.rand(n) * 0.01]


def reference(
    grad: Tensor, param: Tensor, mu: Tensor, nu: Tensor, hyper: Tensor = HYPER
) -> list[Tensor]:
    """The formula of the docstring in float64."""
    lr, b1, b2, eps, decay, factor, t, *_ = hyper.unbind()
    g, p, m, v = (x.double() for x in (grad, param, mu, nu))
    g = factor * g
    m, v = m + (1 - b1) * (g - m), b2 * v + (1 - b2) * g * g
    step = (m / (1 - b1**t)) / (v.sqrt() / (1 - b2**t).sqrt() + eps)
    return [(1 - lr * decay) * p - lr * step, m, v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", LENGTHS)
def test_the_twin_is_the_formula(n: int, dtype: torch.dtype):
    inputs = buffers(n, dtype)
    with poisoned():
        *found, low = kernels.adamw_flat(*inputs, HYPER, torch.bfloat16)
    for x, y in zip(found, reference(*inputs), strict=True):
        assert_near(x, y)
    assert torch.equal(low, found[0].bfloat16())


def test_hyperparameters_that_mean_nothing_give_what_the_formula_gives():
    x = torch.randn(1000)
    x[3], x[50], x[-1] = float("nan"), float("inf"), float("-inf")
    x[7:9], x[9] = 0.0, -0.0
    inputs = [x.bfloat16(), x, x, x.abs()]
    lr, one = torch.tensor(0.1), torch.tensor(1.0)
    for hyper in (
        kernels.adamw_hyper(lr, torch.tensor(0)),
        kernels.adamw_hyper(0 * lr, one, b1=1.0),
        kernels.adamw_hyper(lr, one, b2=1.0, eps=0.0),
        kernels.adamw_hyper(lr, 3 * one, b2=1.1),
        kernels.adamw_hyper(lr, 1e6 * one, b1=3.0, b2=2.0),
        kernels.adamw_hyper(lr / 0, one, factor=float("inf")),
    ):
        found = kernels.adamw_flat(*inputs, hyper)[:3]
        for y, z in zip(found, reference(*inputs, hyper), strict=True):
            torch.testing.assert_close(y, z.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32]
)
def test_the_copy_is_the_new_parameters_in_its_dtype(dtype: torch.dtype):
    new, *_, low = kernels.adamw_flat(*buffers(3001, torch.float16), HYPER, dtype)
    assert torch.equal(low, new.to(dtype))


@pytest.mark.parametrize("b1", [0.9, 0.5, 0.2, 0.0])
def test_it_is_bitwise_the_optimizer(b1: float):
    tx = optim.adamw(0.1, b1=b1, weight_decay=0.1)
    param, mu, nu = torch.randn(1000), torch.zeros(1000), torch.zeros(1000)
    plain, state = param, tx.init(param)
    for t in range(1, 6):
        grad = torch.randn(1000).bfloat16()
        updates, state = tx.update(grad.float(), state, plain)
        plain = optim.apply_updates(plain, updates)
        hyper = kernels.adamw_hyper(0.1, t, b1=b1, weight_decay=0.1)
        param, mu, nu, _ = kernels.adamw_flat(grad, param, mu, nu, hyper)
        assert torch.equal(param, plain)
    assert torch.equal(mu, state.mu) and torch.equal(nu, state.nu)


@pytest.mark.parametrize("cut", [64, 1024, 32768 + 64])
def test_a_cut_changes_no_bit(cut: int):
    n = 40000
    inputs = buffers(n, torch.bfloat16)
    whole = kernels.adamw_flat(*inputs, HYPER)
    left = kernels.adamw_flat(*(x[:cut] for x in inputs), HYPER)
    right = kernels.adamw_flat(*(x[cut:] for x in inputs), HYPER)
    for x, a, b in zip(whole[:3], left[:3], right[:3], strict=True):
        assert torch.equal(x, torch.cat([a, b]))


def test_threads_change_no_bit():
    inputs, before = buffers(70001, torch.float16), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(kernels.adamw_flat(*inputs, HYPER)[:3])
    finally:
        torch.set_num_threads(before)
    for several in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(several, found[0], strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are fenced by Linux")
@pytest.mark.parametrize("end", [True, False])
def test_nothing_outside_is_read_or_written(end: bool):
    for n in (1, 9, 17, 4099):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            low = fenced(torch.empty(n, dtype=dtype), end)
            kernels.adamw_flat_(*(fenced(x, end) for x in buffers(n, dtype)), HYPER, low)


def test_the_arguments_are_untouched_or_donated():
    inputs = buffers(100, torch.bfloat16)
    before = [x.clone() for x in inputs]
    new = kernels.adamw_flat(*inputs, HYPER)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    low = torch.zeros(100, dtype=torch.bfloat16)
    kernels.adamw_flat_(*inputs, HYPER, low)
    assert all(torch.equal(x, y) for x, y in zip(inputs[1:], new[:3], strict=True))
    assert torch.equal(low, new[0].bfloat16())
    assert torch.equal(inputs[0], before[0])


def test_hyperparameters_from_tensors_are_those_from_numbers():
    how = {"weight_decay": 0.1, "eps": 1e-6}
    lr, count = torch.tensor(0.1, dtype=torch.float64), torch.tensor(7)
    found = kernels.adamw_hyper(lr, count, factor=torch.tensor(0.25), **how)
    torch.testing.assert_close(
        found, kernels.adamw_hyper(0.1, 7, factor=0.25, **how), rtol=1e-15, atol=0
    )


def test_other_layouts_are_read_rightly():
    inputs = [x.view(30, 40).t() for x in buffers(1200)]
    found = kernels.adamw_flat(*inputs, HYPER)
    expected = kernels.adamw_flat(*(x.contiguous() for x in inputs), HYPER)
    assert all(torch.equal(x, y) for x, y in zip(found[:3], expected[:3], strict=True))


# --- transforms ---------------------------------------------------------------------------------


def test_opcheck():
    for n in (0, 65):
        torch.library.opcheck(torch.ops.zfunc.adamw_flat.default, (*buffers(n), HYPER, None))
        args = (*buffers(n), torch.empty(n, dtype=torch.bfloat16), HYPER)
        torch.library.opcheck(torch.ops.zfunc.adamw_flat_.default, args)


@pytest.mark.parametrize("dims", [(0, 0, 0, 0, None), (0, None, 1, 0, None), (0, 0, 0, 0, 0)])
def test_vmap_is_one_call_each(dims: tuple[Any, ...]):
    inputs: list[Tensor] = [torch.rand(130) if d is None else torch.rand(3, 130) for d in dims[:4]]
    rates = torch.stack([kernels.adamw_hyper(r, 1) for r in (0.1, 0.2, 0.3)])
    inputs.append(rates[0] if dims[4] is None else rates)
    inputs = [x.t().contiguous() if d == 1 else x for x, d in zip(inputs, dims, strict=True)]

    def update(*args: Tensor) -> tuple[Tensor, ...]:
        return kernels.adamw_flat(*args)[:3]

    found = torch.vmap(update, dims)(*inputs)
    for i in range(3):
        mine = [x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True)]
        for x, y in zip(found, update(*mine), strict=True):
            assert distance(x[i], y) <= 1e-7


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend: str):
    def both(g: Tensor, p: Tensor, m: Tensor, v: Tensor, hyper: Tensor) -> Any:
        p, m, v, low = kernels.adamw_flat(g * 2, p, m, v, hyper, torch.bfloat16)
        p = p + 0
        kernels.adamw_flat_(g, p, m, v, hyper)
        return p, m, v, low

    inputs = (*buffers(100), HYPER)
    compiled: Callable[..., Any] = torch.compile(both, backend=backend, fullgraph=True)
    for x, y in zip(compiled(*inputs), both(*inputs), strict=True):
        assert torch.equal(x, y)


# --- bad input ----------------------------------------------------------------------------------


def test_it_says_that_it_has_no_gradient():
    g, p, m, v = buffers(4)
    with pytest.raises(kernels.KernelError, match=r"adamw_flat has no gradient, but argument 1"):
        kernels.adamw_flat(g, p.requires_grad_(), m, v, HYPER)
    with pytest.raises(kernels.KernelError, match=r"write optim\.adamw"):
        torch.func.grad(lambda g: kernels.adamw_flat(g, p.detach(), m, v, HYPER)[0].sum())(g)
    with torch.no_grad():
        kernels.adamw_flat(g, p, m, v, HYPER)


def test_what_does_not_agree_is_named():
    g, p, m, v = buffers(4)
    with pytest.raises(kernels.KernelError, match=r"param is \(4,\) on cpu, but grad is \(3,\)"):
        kernels.adamw_flat(g[:3], p, m, v, HYPER)
    with pytest.raises(kernels.KernelError, match="expected one dtype for parameters and moments"):
        kernels.adamw_flat(g, p, m.bfloat16(), v, HYPER)
    with pytest.raises(kernels.KernelError, match=r"float32\[9\]; expected float64\[9\]"):
        kernels.adamw_flat(g, p, m, v, HYPER.float())
    with pytest.raises(kernels.KernelError, match=r"mu of shape \(4,\) has strides \(2,\)"):
        kernels.adamw_flat_(g, p, torch.zeros(8)[::2], v, HYPER)
    assert issubclass(kernels.KernelError, zf.ZfuncError)


def test_gradients_may_be_written_over_element_by_element_alone():
    grad, *state = buffers(1000)
    expected = kernels.adamw_flat(grad, *state, HYPER)
    with pytest.raises(kernels.KernelError, match="shares memory with"):
        kernels.adamw_flat_(grad, *state, HYPER, grad.view(torch.bfloat16)[:1000])
    kernels.adamw_flat_(grad, *state, HYPER, grad)
    for x, y in zip((*state, grad), (*expected[:3], expected[0]), strict=True):
        assert torch.equal(x, y)


def test_donated_buffers_may_not_overlap():
    g, p, m, _ = buffers(8)
    with pytest.raises(kernels.KernelError, match="shares memory with"):
        kernels.adamw_flat_(g, p, m, m, HYPER)
