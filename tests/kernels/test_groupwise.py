"""Levels in groups: the twins against the definition, what rounding promises, transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, distance
from zfunc import kernels

SHAPES = ((1,), (7,), (3001,), (3, 257), (4, 512), (2, 3, 33), (0, 8), (5, 0), (2, 70000))
GRIDS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


def definition(
    x: Tensor, bits: int, group: int | None, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels as numbers, scales and zeros of the formulas in the module, in float64."""
    pieces = x.double().split(group or max(x.shape[-1], 1), -1) if x.shape[-1] else []
    levels, scales, zeros = [], [], []
    for piece in pieces:
        low = torch.zeros_like(piece[..., :1]) if symmetric else piece.amin(-1, keepdim=True)
        top = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        s = (piece - low).abs().amax(-1, keepdim=True) / top
        levels.append(torch.where(s > 0, (piece - low) / s, 0))
        scales.append(s)
        zeros.append(low)
    empty = x.double()[..., :0]
    return tuple(torch.cat(part, -1) if part else empty for part in (levels, scales, zeros))  # type: ignore[return-value]


@pytest.mark.usefixtures("cpu_route")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group", [256, 32, 6, None])
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_the_twin_is_its_definition(
    bits: int, symmetric: bool, group: int | None, dtype: torch.dtype
):
    for shape in SHAPES if group != 6 else SHAPES[:-1]:
        x = torch.randn(shape).to(dtype)
        exact, scales, zeros = definition(x, bits, group, symmetric)
        q, scale, zero = kernels.quantize_groups(x, bits=bits, group=group, symmetric=symmetric)
        levels = unpacked(q, shape[-1], bits, symmetric)
        assert (levels - exact).abs().le(0.5001).all(), shape  # the nearest level
        assert distance(scale, scales) < 1e-6
        assert (zero is None) == symmetric
        assert zero is None or torch.equal(zero.double(), zeros)
        back = kernels.dequantize_groups(
            q, scale, zero, shape[-1], bits=bits, group=group, dtype=scale.dtype
        )
        width = group or max(shape[-1], 1)
        s, z = (t.double().repeat_interleave(width, -1)[..., : shape[-1]] for t in (scale, zeros))
        assert distance(back, levels * s + z) < 1e-6
        fake = kernels.fake_quant(x, bits=bits, group=group, symmetric=symmetric)
        assert torch.equal(fake, back.to(dtype))


def unpacked(q: Tensor, length: int, bits: int, symmetric: bool) -> Tensor:
    if bits == 8:
        return q.double()
    both = torch.stack([q & 15, q >> 4], -1).flatten(-2)[..., :length].double()
    return both - 8 if symmetric else both


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_what_has_levels_is_exact(bits: int, symmetric: bool):
    top = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    x = torch.arange(-top if symmetric else 0, top + 1).float()
    assert torch.equal(kernels.fake_quant(x, bits=bits, group=None, symmetric=symmetric), x)
    zeros = torch.zeros(10)
    assert torch.equal(kernels.fake_quant(zeros, bits=bits, symmetric=symmetric), zeros)


@pytest.mark.usefixtures("cpu_route")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_what_hardly_differs_from_zero_stays_so(bits: int, symmetric: bool, dtype: torch.dtype):
    for size in (1e-45, 1e-40, 2e-38, 1e-37, 7e-31, 9e-31, 1e-25):
        x = (torch.linspace(-1, 1, 40) * size).to(dtype)
        how: Any = {"bits": bits, "group": 8, "symmetric": symmetric, "seed": 3}
        for y in (
            kernels.fake_quant(x, **how),
            kernels.dequantize_groups(*kernels.quantize_groups(x, **how), 40, bits=bits, group=8),
        ):
            assert (y.double() - x.double()).abs().max() <= max(size / 7, 2**-100), size
        form = kernels.Payload(40, bits=bits, group=8, symmetric=symmetric)
        left = kernels.quantize_payload(x, form, torch.zeros(40), seed=3)[1]
        assert left is not None
        assert left.abs().max() <= max(size / 7, 2**-100), size


def test_half_a_byte_at_the_end_is_zero():
    for symmetric in (True, False):
        q = kernels.quantize_groups(torch.full((3, 7), -1.0), bits=4, symmetric=symmetric)[0]
        assert (q[:, -1] >> 4 == 0).all()


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_stochastic_rounding_is_unbiased_and_near(bits: int, symmetric: bool):
    x = torch.randn(512)
    draws = torch.stack(
        [kernels.fake_quant(x, bits=bits, symmetric=symmetric, seed=k) for k in range(500)]
    )
    step = kernels.quantize_groups(x, bits=bits, symmetric=symmetric)[1].repeat_interleave(256)
    assert ((draws - x).abs() <= step * 1.0001).all()
    # Each mean has a standard error of at most half a step over sqrt(500); 512 of them.
    assert ((draws.mean(0) - x).abs() < step * 5 * 0.5 / 500**0.5).all()
    errors = (draws - x) / step
    errors = errors - errors.mean(0)
    for shift in (1, 2, 3):  # neighbours, those of one hash and others, and neighbouring seeds
        assert (errors[:, shift:] * errors[:, :-shift]).mean().abs() < 0.004
        assert (errors[shift:] * errors[:-shift]).mean().abs() < 0.004


def test_a_seed_is_a_number_or_a_key():
    import zfunc as zf

    x = torch.randn(1000)
    key = zf.random.key(3)
    first = kernels.fake_quant(x, bits=4, seed=key)
    assert torch.equal(first, kernels.fake_quant(x, bits=4, seed=key))
    others = [3, 4, zf.random.fold_in(key, 1)]
    assert not any(torch.equal(first, kernels.fake_quant(x, bits=4, seed=s)) for s in others)


def test_where_a_buffer_is_cut_does_not_matter_but_for_the_dither():
    x = torch.randn(400000)
    whole = kernels.quantize_groups(x)
    parts = [kernels.quantize_groups(part) for part in x.split(256 * 300)]
    for i in (0, 1):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))  # type: ignore[arg-type]


# --- transforms ---------------------------------------------------------------------------------


# torch.func.jvp loads its rules through torch.jit.script, 2.13
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_the_gradient_is_straight_through():
    x = torch.randn(3, 100, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (kernels.fake_quant(x, bits=4) * 3).sum() + (x**2).sum()

    expected = 3 + 2 * x.detach()
    assert torch.equal(torch.autograd.grad(loss(x), x)[0], expected)
    plain = x.detach()
    assert torch.equal(torch.func.grad(loss)(plain), expected)
    assert torch.equal(torch.vmap(torch.func.grad(loss))(plain), expected)
    assert torch.allclose(
        torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(plain), expected, rtol=1e-12
    )
    _, tangent = torch.func.jvp(loss, (plain,), (torch.ones_like(plain),))
    torch.testing.assert_close(tangent, expected.sum())
    hessian = torch.func.hessian(lambda x: (kernels.fake_quant(x) ** 2).sum())(plain[0, :3])
    assert torch.equal(hessian, 2 * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_straight_through(backend: str):
    def loss(x: Tensor) -> Tensor:
        return (kernels.fake_quant(x * 2, bits=4) ** 2).sum()

    x = torch.randn(3, 100)
    expected = 4 * kernels.fake_quant(x * 2, bits=4)
    compile: Callable[..., Any] = torch.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(compile(torch.func.grad(loss))(x), expected)
    torch.testing.assert_close(compile(torch.vmap(torch.func.grad(loss)))(x), expected)
    y = x.clone().requires_grad_()
    compile(loss)(y).backward()
    torch.testing.assert_close(y.grad, expected)


def test_checkpoint_and_the_same_tensor_twice():
    x = torch.randn(100, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return (kernels.fake_quant(x) * kernels.fake_quant(x)).sum()

    again = torch.utils.checkpoint.checkpoint(twice, x, use_reentrant=False)
    expected = 2 * kernels.fake_quant(x.detach())
    assert torch.equal(torch.autograd.grad(again, x)[0], expected)


def test_opcheck():
    check, ops = torch.library.opcheck, torch.ops.zfunc
    x, seed = torch.randn(3, 257), torch.tensor(7)
    check(ops.quantize_groups.default, (x, 4, 64, False, seed))
    check(ops.fake_quant.default, (x, 3, 64, True, None))
    q, scale, zero = kernels.quantize_groups(x, bits=4, symmetric=False)
    check(ops.dequantize_groups.default, (q, scale, zero, 257, 4, 256, torch.bfloat16))


def test_vmap_quantizes_each():
    x = torch.randn(2, 3, 100)
    found = torch.vmap(lambda x: kernels.quantize_groups(x)[:2], 1)(x)
    for a, b in zip(found, kernels.quantize_groups(x.transpose(0, 1)), strict=False):
        assert torch.equal(a, b)


# --- bad input ----------------------------------------------------------------------------------


def test_what_it_cannot_take():
    x = torch.ones(300)
    q, scale, _ = kernels.quantize_groups(x)
    with pytest.raises(kernels.KernelError, match=r"bits=3; expected one of \(8, 4\)"):
        kernels.quantize_groups(x, bits=3)
    with pytest.raises(kernels.KernelError, match="bits=17; expected 2 to 16"):
        kernels.fake_quant(x, bits=17)
    with pytest.raises(kernels.KernelError, match="group=7; expected an even number"):
        kernels.quantize_groups(x, group=7)
    with pytest.raises(kernels.KernelError, match=r"x is torch\.int64\[3\]; expected floating"):
        kernels.quantize_groups(torch.arange(3))
    with pytest.raises(kernels.KernelError, match=r"levels \(300,\), scales \(2,\)"):
        kernels.dequantize_groups(q, scale, None, 300, group=64)
    with pytest.raises(kernels.KernelError, match=r"write kernels\.fake_quant, whose gradient"):
        kernels.quantize_groups(x.requires_grad_())


@pytest.mark.parametrize("n", LENGTHS)
def test_no_length_is_special(n: int):
    x = torch.randn(n)
    assert kernels.fake_quant(x).shape == (n,)
