"""Signs with error feedback: the twins against the definition, laws of compression, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.kernels.closeness import LENGTHS, assert_near, poisoned
from zfunc import kernels

GROUPS = (None, 128, 2048)
WIDE = {torch.float64: torch.float64}


def definition(c: Tensor, group: int | None, scaling: str) -> tuple[Tensor, Tensor]:
    """Scales, and the values sent, of the formulas in the module, in float64."""
    size = group or max(c.numel(), 1)
    pieces = list(c.double().split(size)) if c.numel() else []
    one = [x.square().mean().sqrt() if scaling == "rms" else x.abs().mean() for x in pieces]
    sent = [torch.copysign(s, x) for s, x in zip(one, pieces, strict=True)]
    empty = torch.zeros(0 if group else 1, dtype=torch.float64)
    return (torch.stack(one), torch.cat(sent)) if pieces else (empty, empty[:0])


@pytest.mark.usefixtures("cpu_route")
@pytest.mark.parametrize("scaling", ["rms", "mean"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [*LENGTHS, 140000])
def test_pack_is_its_definition(n: int, dtype: torch.dtype, group: int | None, scaling: str):
    x, error = torch.randn(n).to(dtype), torch.randn(n, dtype=WIDE.get(dtype, torch.float32))
    with poisoned():
        bits, scale, left = kernels.onebit_pack(x, error, group=group, scaling=scaling)
    c = x.to(error.dtype) + error
    wanted, sent = definition(c, group, scaling)
    assert_near(scale, wanted.to(scale.dtype))
    assert np.array_equal(bits.numpy(), np.packbits(c.numpy() >= 0, bitorder="little"))
    values = kernels.onebit_unpack(bits, scale, n, group=group, dtype=error.dtype)
    assert_near(values, sent.to(values.dtype))
    assert torch.equal(left, c - values)  # nothing is lost: what was sent and what is kept


@pytest.mark.usefixtures("cpu_route")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [9, 140001])
def test_unpacks_into_memory(n: int, dtype: torch.dtype):
    room = torch.full((n + 1,), 7.0).to(dtype)
    bits, scale, _ = kernels.onebit_pack(torch.randn(n), torch.zeros(n), group=128)
    assert kernels.onebit_unpack_(bits, scale, room[:n], group=128).data_ptr() == room.data_ptr()
    assert torch.equal(room[:n], kernels.onebit_unpack(bits, scale, n, group=128, dtype=dtype))
    assert room[n] == 7
    with pytest.raises(kernels.KernelError, match="row for each sender"):
        kernels.onebit_unpack_(bits, scale, torch.zeros(2, n), group=128)


@pytest.mark.usefixtures("cpu_route")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 9, 1031, 140000])
def test_mean_is_its_definition(n: int, workers: int, group: int | None):
    dtype = torch.float64
    sent = [
        kernels.onebit_pack(torch.randn(n, dtype=dtype), torch.zeros(n, dtype=dtype), group=group)
        for _ in range(workers)
    ]
    bits, scale = (torch.stack([s[i] for s in sent]) for i in (0, 1))
    error = torch.randn(n, dtype=dtype)
    c = kernels.onebit_unpack(bits, scale, n, group=group, dtype=dtype).mean(0) + error
    expected = kernels.onebit_pack(c, torch.zeros(n, dtype=dtype), group=group)
    with poisoned():
        found = kernels.onebit_mean(bits, scale, error, group=group)
    assert torch.equal(found[0], expected[0])
    for x, y in zip(found[1:], expected[1:], strict=True):
        assert_near(x, y)


@pytest.mark.usefixtures("cpu_route")
def test_in_place_is_the_same():
    x, error = torch.randn(5000), torch.randn(5000)
    expected = kernels.onebit_pack(x, error, group=128)
    before = error.clone()
    assert torch.equal(error, before)
    bits, scale = kernels.onebit_pack_(x, error, group=128)
    for found, y in zip((bits, scale, error), expected, strict=True):
        assert torch.equal(found, y)
    received, scales = bits[None], scale[None]
    expected = kernels.onebit_mean(received, scales, error, group=128)
    found_mean = kernels.onebit_mean_(received, scales, error, group=128)
    for found, y in zip((*found_mean, error), expected, strict=True):
        assert torch.equal(found, y)


@given(st.integers(1, 400), st.integers(0, 2**31))
def test_the_mean_scale_leaves_the_least_error(n: int, seed: int):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zero = torch.zeros_like(x)
    left = kernels.onebit_pack(x, zero, scaling="mean")[2].norm()
    assert left <= kernels.onebit_pack(x, zero, scaling="rms")[2].norm() * (1 + 1e-12)
    assert left < x.norm()  # a contraction: error feedback cannot run away


def test_with_error_feedback_the_sum_of_what_is_sent_follows_the_sum_of_what_came():
    x, error, sent = torch.randn(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(200):
        bits, scale = kernels.onebit_pack_(x, error, scaling="mean")
        sent += kernels.onebit_unpack(bits, scale, 1000)
    assert (sent / 200 - x).norm() < 0.1 * x.norm()


@pytest.mark.usefixtures("cpu_route")
def test_zero_and_non_finite_values():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    assert kernels.onebit_pack(x, torch.zeros(4))[0].item() == 0b0111  # -0.0 + 0.0 is 0.0
    assert kernels.onebit_pack(x, torch.tensor([0.0, -0.0, 0.0, 0.0]))[0].item() == 0b0101
    for bad in (torch.nan, torch.inf):
        bits, scale, error = kernels.onebit_pack(torch.tensor([bad, -1.0]), torch.zeros(2))
        assert not scale.isfinite().any() and not error.isfinite().all()
        assert bits.item() in (0b00, 0b01)


# --- transforms ---------------------------------------------------------------------------------


def test_opcheck():
    check, ops = torch.library.opcheck, torch.ops.zfunc
    x, error = torch.randn(300), torch.randn(300)
    bits, scale, _ = kernels.onebit_pack(x, error, group=128)
    check(ops.onebit_pack.default, (x, error, 128, "rms"))
    check(ops.onebit_pack_.default, (x, error, 0, "mean"))
    check(ops.onebit_mean.default, (bits[None], scale[None], error, 128, "rms"))
    check(ops.onebit_mean_.default, (bits[None], scale[None], error, 128, "rms"))
    check(ops.onebit_unpack.default, (bits, scale, 300, 128, torch.bfloat16))


def test_vmap_compresses_each():
    xs, errors = torch.randn(3, 300), torch.randn(300)
    found = torch.vmap(kernels.onebit_pack, (0, None))(xs, errors)
    for i, x in enumerate(xs):
        for a, b in zip(found, kernels.onebit_pack(x, errors), strict=True):
            assert torch.equal(a[i], b)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend: str):
    def there_and_back(x: Tensor, error: Tensor) -> Any:
        bits, scale, error = kernels.onebit_pack(x * 2, error)
        kernels.onebit_pack_(x, error, group=128)
        mean = kernels.onebit_mean(bits[None], scale[None], error)
        return kernels.onebit_unpack(mean[0], mean[1], 300) + 1, error

    x, error = torch.randn(300), torch.randn(300)
    compiled: Callable[..., Any] = torch.compile(there_and_back, backend=backend, fullgraph=True)
    for a, b in zip(compiled(x, error), there_and_back(x, error), strict=True):
        assert torch.equal(a, b)


# --- bad input ----------------------------------------------------------------------------------


def test_what_it_cannot_take():
    x = torch.ones(300)
    bits, scale, _ = kernels.onebit_pack(x, x, group=128)
    with pytest.raises(kernels.KernelError, match="group=100; expected a power of two from 128"):
        kernels.onebit_pack(x, x, group=100)
    with pytest.raises(kernels.KernelError, match=r"expected \[n\]: pass x.view\(-1\)"):
        kernels.onebit_pack(x.view(3, 100), x.view(3, 100))
    with pytest.raises(kernels.KernelError, match=r"expected an error in torch\.float32"):
        kernels.onebit_pack(x, x.bfloat16())
    with pytest.raises(kernels.KernelError, match="scaling 'max'; expected one of"):
        kernels.onebit_pack(x, x, scaling="max")
    with pytest.raises(kernels.KernelError, match=r"bits are \(38,\) and scales \(3,\); expected"):
        kernels.onebit_unpack(bits, scale, 300)
    with pytest.raises(kernels.KernelError, match="expected a row for each worker"):
        kernels.onebit_mean(bits, scale, x, group=128)
    with pytest.raises(kernels.KernelError, match=r"bits are torch.int8 and scales"):
        kernels.onebit_unpack(bits.to(torch.int8), scale, 300, group=128)
    with pytest.raises(kernels.KernelError, match=r"error of shape .* it must be contiguous"):
        kernels.onebit_pack_(x, torch.zeros(600)[::2])
    with pytest.raises(kernels.KernelError, match=r"x shares memory with error|error shares"):
        kernels.onebit_pack_(x, x)
    with pytest.raises(kernels.KernelError, match="onebit_pack has no gradient"):
        kernels.onebit_pack(x.requires_grad_(), torch.zeros(300))
