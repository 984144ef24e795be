"""LAMB over a flat buffer of segments: the twin against the optimizer, cuts, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import assert_near, distance
from zfunc import kernels, optim

SIZES = {"a": 1000, "b": 1, "c": 257, "zero": 64}


def layout() -> list[tuple[int, int]]:
    """Leaves one after the other, each at a multiple of 64."""
    out, end = [], 0
    for size in SIZES.values():
        out.append((end, end + size))
        end += size + -size % 64
    return out


def flat(tree: dict[str, Tensor]) -> Tensor:
    pads = [torch.nn.functional.pad(x, (0, -len(x) % 64)) for x in tree.values()]
    return torch.cat(pads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_optimizer(dtype: torch.dtype):
    tx = optim.lamb(0.1, weight_decay=0.1)
    params = {name: torch.randn(size, dtype=dtype) for name, size in SIZES.items()}
    params["zero"].zero_()  # its ratio is 1
    state, segments = tx.init(params), layout()
    p = flat(params)
    m, v, low = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(len(p)).bfloat16()
    for t in range(1, 5):
        grads = {name: torch.randn(size, dtype=dtype) for name, size in SIZES.items()}
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        hyper = kernels.lamb_hyper(0.1, t, eps=1e-6, weight_decay=0.1)
        squares = kernels.lamb_moments_(flat(grads), p, m, v, segments, hyper)
        kernels.lamb_apply_(p, m, v, segments, kernels.lamb_ratios(squares), hyper, low)
    assert distance(p, flat(params)) < (1e-6 if dtype == torch.float32 else 1e-13)
    assert_near(m, flat(state.mu))
    assert torch.equal(low, p.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_stepped_in_32(dtype: torch.dtype):
    """Squares would not fit float16, and would not add up in bfloat16."""
    p = (torch.randn(3000) * 100).to(dtype)
    g, m, v = torch.randn(3000).to(dtype), torch.zeros_like(p), torch.zeros_like(p)
    hyper = kernels.lamb_hyper(0.1, 1, eps=1e-6, weight_decay=0.1)
    wide = [x.double() for x in (p, m, v)]
    exact = kernels.lamb_moments_(g.double(), *wide, [(0, 3000)], hyper)
    squares = kernels.lamb_moments_(g, p, m, v, [(0, 3000)], hyper)
    assert squares.dtype == torch.float32 and distance(squares, exact) < 1e-6
    assert_near(m, wide[1])
    wide[1:] = [x.double() for x in (m, v)]
    kernels.lamb_apply_(*wide, [(0, 3000)], kernels.lamb_ratios(exact), hyper)
    kernels.lamb_apply_(p, m, v, [(0, 3000)], kernels.lamb_ratios(squares), hyper)
    assert_near(p, wide[0])


def test_a_leaf_cut_over_ranks_is_whole_in_its_norms():
    g, p, m, v = (torch.randn(1000, dtype=torch.float64) for _ in range(4))
    v = v.abs()
    hyper = kernels.lamb_hyper(0.1, 3, weight_decay=0.1)
    whole = [p.clone(), m.clone(), v.clone()]
    squares = kernels.lamb_moments_(g, *whole, [(0, 1000)], hyper)
    kernels.lamb_apply_(*whole, [(0, 1000)], kernels.lamb_ratios(squares), hyper)
    parts = [[x[a:b].clone() for x in (p, m, v)] for a, b in ((0, 300), (300, 1000))]
    grads, spans = (g[:300], g[300:]), ([(0, 300)], [(0, 700)])
    sums = sum(
        kernels.lamb_moments_(y, *part, span, hyper)
        for y, part, span in zip(grads, parts, spans, strict=True)
    )
    assert isinstance(sums, Tensor)
    for part, span in zip(parts, spans, strict=True):
        kernels.lamb_apply_(*part, span, kernels.lamb_ratios(sums), hyper)
    for x, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(pieces), x, rtol=1e-13, atol=1e-13)


def test_what_is_in_no_segment_is_left_alone():
    g, p, m, v = (torch.rand(300) for _ in range(4))
    before = [x.clone() for x in (p, m, v)]
    hyper, segments = kernels.lamb_hyper(0.1, 1), [(10, 200)]
    kernels.lamb_moments_(g, p, m, v, segments, hyper)
    kernels.lamb_apply_(p, m, v, segments, torch.ones(1), hyper)
    for x, y in zip((p, m, v), before, strict=True):
        assert torch.equal(x[:10], y[:10]) and torch.equal(x[200:], y[200:])
        assert not torch.equal(x[10:200], y[10:200])


def test_opcheck():
    g, p, m, v = (torch.rand(300) for _ in range(4))
    hyper, ranges = kernels.lamb_hyper(0.1, 1), ([0, 128], [100, 300])
    torch.library.opcheck(torch.ops.zfunc.lamb_moments_.default, (g, p, m, v, *ranges, hyper))
    args = (p, m, v, None, torch.ones(2), *ranges, hyper)
    torch.library.opcheck(torch.ops.zfunc.lamb_apply_.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend: str):
    def step(g: Tensor, p: Tensor, m: Tensor, v: Tensor, hyper: Tensor) -> Any:
        squares = kernels.lamb_moments_(g * 2, p, m, v, [(0, 300)], hyper)
        kernels.lamb_apply_(p, m, v, [(0, 300)], kernels.lamb_ratios(squares), hyper)
        return p + 0

    inputs = [torch.rand(300) for _ in range(4)]
    hyper = kernels.lamb_hyper(0.1, 1)
    expected = step(*(x.clone() for x in inputs), hyper)
    compiled: Callable[..., Any] = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, hyper), expected)


def test_what_it_cannot_take():
    g, p, m, v = (torch.rand(300) for _ in range(4))
    hyper = kernels.lamb_hyper(0.1, 1)
    for bad in ([(0, 301)], [(0, 100), (99, 200)], [(-1, 5)], [(7, 5)]):
        with pytest.raises(kernels.KernelError, match="overlaps another or leaves the buffer"):
            kernels.lamb_moments_(g, p, m, v, bad, hyper)
    with pytest.raises(kernels.KernelError, match="number for each of the 1 segments"):
        kernels.lamb_apply_(p, m, v, [(0, 300)], torch.ones(2), hyper)
    with pytest.raises(kernels.KernelError, match=r"write optim\.lamb"):
        kernels.lamb_moments_(g, p.requires_grad_(), m, v, [(0, 300)], hyper)
