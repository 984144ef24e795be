"""AdamW with moments of 8 bits: the twin against float64 step by step, and over a training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, assert_near, distance, poisoned
from zfunc import kernels
from zfunc.kernels.adamw8 import CHUNK

HYPER = kernels.adamw_hyper(0.1, 3, weight_decay=0.1, factor=0.5)


def moments(n: int) -> kernels.Moments8:
    state = kernels.moments8(n)
    mu, nu = torch.randint(-127, 128, (n,)), torch.randint(0, 256, (n,))
    scales = torch.rand_like(state.scales)
    return kernels.Moments8(mu.to(torch.int8), nu.to(torch.uint8), scales)


def decoded(state: kernels.Moments8) -> tuple[Tensor, Tensor]:
    """``m`` and ``v`` of the formulas, in float64."""
    scales = state.scales.double().repeat_interleave(128, 0)[: len(state.mu)]
    m, q = state.mu.double(), state.nu.double()
    return scales[:, 0] * m * m.abs() / 127**2, (scales[:, 1] * q * q / 255**2) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [*LENGTHS, CHUNK + 130])
def test_the_twin_is_the_formula(n: int, dtype: torch.dtype):
    grad, param, state = torch.randn(n).to(dtype), torch.randn(n), moments(n)
    with poisoned():
        p, _, after, low = kernels.adamw8_flat(grad, param, state, HYPER, low=torch.bfloat16)
    g, (m, v) = 0.5 * grad.double(), decoded(state)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    step = (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    assert_near(p, (1 - 0.1 * 0.1) * param.double() - 0.1 * step)
    assert low is not None and torch.equal(low, p.bfloat16())
    # Codes are the nearest: half a step of the root of what they stand for.
    for code, x, top, s in (
        (after.mu.double(), m, 127, after.scales[:, 0]),
        (after.nu.double(), v.sqrt(), 255, after.scales[:, 1]),
    ):
        greatest = s.double().repeat_interleave(128)[:n]
        exact = top * (x.abs() / greatest).sqrt()
        assert (code.abs() - exact).abs().le(0.501).logical_or(code == 1).all()
        assert (code.sign() * x >= 0).all()
        groups = torch.nn.functional.pad(x.abs(), (0, -n % 128)).view(-1, 128)
        assert_near(s, groups.amax(1))
    assert ((after.nu > 0) == (v > 0)).all()


def test_24_bits_keep_what_they_can():
    x = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,)), torch.zeros(3)])
    p, tail = kernels.split24(x)
    back = kernels.whole24(p, tail)
    assert ((back - x).abs() <= 2.0**-16 * x.abs()).all()
    assert torch.equal(p, back.bfloat16()) or ((p - back).abs() <= 2.0**-8 * back.abs()).all()
    again = kernels.split24(back)
    assert torch.equal(again[0], p) and torch.equal(again[1], tail)  # 24 bits are kept exactly
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -0.0])
    kept = kernels.whole24(*kernels.split24(odd))
    torch.testing.assert_close(kept[[0, 1, 2, 4]], odd[[0, 1, 2, 4]], equal_nan=True)
    other = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    assert kernels.whole24(*kernels.split24(other)).isnan().all()


def test_training_follows_32_bits():
    """Least squares on noisy data: the losses stay within half a percent of each other."""
    generator = torch.Generator().manual_seed(0)
    n = 640
    spread = torch.exp(torch.randn(n, generator=generator))
    wide, tail = [torch.zeros(n)] * 3, kernels.split24(torch.zeros(n))
    state = kernels.moments8(n)
    p, rest = tail
    losses = torch.zeros(2)
    for t in range(1, 301):
        data = spread * (1 + torch.randn(n, generator=generator))
        low = kernels.whole24(p, rest)
        losses += torch.stack([(wide[0] - data).square().mean(), (low - data).square().mean()])
        hyper = kernels.adamw_hyper(0.02, t, weight_decay=0.0)
        *wide, _ = kernels.adamw_flat(wide[0] - data, *wide, hyper)  # type: ignore[misc]
        p, rest, state, _ = kernels.adamw8_flat(low - data, p, state, hyper, tail=rest)  # type: ignore[assignment]
    assert abs(losses[1] / losses[0] - 1) < 0.005, losses
    assert distance(kernels.whole24(p, rest), wide[0]) < 0.04


def test_the_arguments_are_untouched_or_donated():
    grad, state = torch.randn(300), moments(300)
    p, tail = kernels.split24(torch.randn(300))
    before = [x.clone() for x in (p, tail, *state)]
    new = kernels.adamw8_flat(grad, p, state, HYPER, tail=tail)
    assert all(torch.equal(x, y) for x, y in zip((p, tail, *state), before, strict=True))
    kernels.adamw8_flat_(grad, p, state, HYPER, tail=tail)
    for x, y in zip((p, tail, *state), (new[0], new[1], *new[2]), strict=True):
        assert y is not None and torch.equal(x, y)


def test_a_cut_between_groups_changes_no_bit():
    grad, param, state = torch.randn(1000), torch.randn(1000), moments(1000)
    whole = kernels.adamw8_flat(grad, param, state, HYPER)
    parts = []
    for a, b in ((0, 384), (384, 1000)):
        mine = kernels.Moments8(state.mu[a:b], state.nu[a:b], state.scales[a // 128 : -(-b // 128)])
        parts.append(kernels.adamw8_flat(grad[a:b], param[a:b], mine, HYPER))
    assert torch.equal(whole[0], torch.cat([p[0] for p in parts]))
    for i in range(3):
        assert torch.equal(whole[2][i], torch.cat([p[2][i] for p in parts]))


def test_under_transforms_of_torch():
    for n in (0, 65):
        p, tail = kernels.split24(torch.randn(n))
        args = (torch.randn(n), p, tail, *moments(n), HYPER, None)
        torch.library.opcheck(torch.ops.zfunc.adamw8_flat.default, args)
        low = torch.empty(n, dtype=torch.bfloat16)
        inplace = (torch.randn(n), torch.randn(n), None, *moments(n), low, HYPER)
        torch.library.opcheck(torch.ops.zfunc.adamw8_flat_.default, inplace)
    state, param = moments(130), torch.randn(130)

    def update(grad: Tensor) -> Tensor:
        return kernels.adamw8_flat(grad, param, state, HYPER)[0]

    grads = torch.randn(3, 130)
    expected = torch.stack([update(g) for g in grads])
    assert torch.equal(torch.vmap(update)(grads), expected)
    assert torch.equal(torch.compile(update, fullgraph=True)(grads[0]), expected[0])


def test_what_does_not_fit_is_named():
    g, p, state = torch.randn(4), torch.randn(4), moments(4)
    with pytest.raises(kernels.KernelError, match="no gradient, but argument 1 requires one"):
        kernels.adamw8_flat(g, p.clone().requires_grad_(), state, HYPER)
    with pytest.raises(kernels.KernelError, match=r"kernels\.split24, and moments from"):
        kernels.adamw8_flat(g, p.bfloat16(), state, HYPER)
    with pytest.raises(kernels.KernelError, match=r"scales are \(2, 2\).* expected \(1, 2\)"):
        kernels.adamw8_flat(g, p, state._replace(scales=torch.zeros(2, 2)), HYPER)
    q, tail = kernels.split24(p)
    with pytest.raises(kernels.KernelError, match="leave low out"):
        kernels.adamw8_flat(g, q, state, HYPER, tail=tail, low=torch.bfloat16)
    with pytest.raises(kernels.KernelError, match="shares memory with"):
        kernels.adamw8_flat_(g, p, state._replace(scales=p[:2].view(1, 2)), HYPER)
