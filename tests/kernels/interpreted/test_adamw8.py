"""AdamW with moments of 8 bits: the Triton kernel against its twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.closeness import LENGTHS, ROUNDING, distance, poisoned
from zfunc import kernels

HYPER = kernels.adamw_hyper(0.1, 3, weight_decay=0.1, factor=0.5)
CASES = [(n, torch.bfloat16, n % 2 == 0) for n in LENGTHS]
CASES += [(1031, grad, tail) for grad in (torch.float32, torch.float16) for tail in (True, False)]


def inputs(n: int, dtype: torch.dtype, tail: bool) -> tuple[list[Tensor], Tensor | None]:
    """Parameters and moments in the midst of a training, with a group of zeros in them."""
    grad, param = torch.randn(n).to(dtype), torch.randn(n)
    grad[64:300] = 0
    groups = -(-n // 128)
    mu, nu = torch.randint(-127, 128, (n,)).to(torch.int8), torch.randint(0, 256, (n,))
    mu[128:256], nu[128:256] = 0, 0
    state = [grad, param, mu, nu.to(torch.uint8), torch.rand(groups, 2)]
    if not tail:
        return state, None
    state[1], rest = kernels.split24(param)
    return state, rest


def step(state: list[Tensor], tail: Tensor | None) -> list[Tensor]:
    """What the results stand for, since a code at a tie may fall either way."""
    grad, param, *moments = state
    low = torch.bfloat16 if tail is None else None
    now = kernels.Moments8(*moments)
    p, rest, after, copy = kernels.adamw8_flat(grad, param, now, HYPER, tail=tail, low=low)
    whole = p if rest is None else kernels.whole24(p, rest)
    mu, nu, scales = after
    return [whole, *([] if copy is None else [copy]), mu.float(), nu.float(), scales]


@pytest.mark.parametrize(("n", "dtype", "tail"), CASES)
def test_it_is_its_twin(n: int, dtype: torch.dtype, tail: bool):
    state, rest = inputs(n, dtype, tail)
    expected = step(state, rest)
    with kernels.use("triton"), poisoned():
        found = step(state, rest)
    *params, mu, nu, scales = zip(found, expected, strict=True)
    for x, y in (*params, scales):
        assert distance(x, y) <= (ROUNDING[x.dtype] if rest is None else 2**-16)
    for x, y in (mu, nu):
        assert (x - y).abs().le(1).all() and (x != y).sum() <= max(1, n // 100)


def test_in_place_is_the_same_and_leaves_the_rest_alone():
    n, room = 1030, 2048
    (grad, param, mu, nu, scales), tail = inputs(room, torch.bfloat16, tail=True)
    assert tail is not None
    groups = -(-n // 128)
    state = (param, tail, mu, nu)
    before = [x.clone() for x in (*state, scales)]
    with kernels.use("triton"):
        now = kernels.Moments8(mu[:n], nu[:n], scales[:groups])
        expected = kernels.adamw8_flat(grad[:n], param[:n], now, HYPER, tail=tail[:n])
        kernels.adamw8_flat_(grad[:n], param[:n], now, HYPER, tail=tail[:n])
    for x, y in zip((param, tail, *now), (*expected[:2], *expected[2]), strict=True):
        assert y is not None and torch.equal(x[: len(y)], y)
    for x, y in zip(state, before[:4], strict=True):
        assert torch.equal(x[n:], y[n:]) and not torch.equal(x[:n], y[:n])
    assert torch.equal(scales[groups:], before[4][groups:])


def test_nan_and_infinity_spread_as_in_the_twin():
    state, _ = inputs(520, torch.float32, tail=False)
    state[0][3], state[0][130], state[1][260], state[1][300] = torch.nan, torch.inf, torch.nan, 3e38
    found = []
    for route in ("torch", "triton"):
        with kernels.use(route):  # type: ignore[arg-type]
            p, _, after, _ = kernels.adamw8_flat(
                state[0], state[1], kernels.Moments8(*state[2:]), HYPER
            )
            tail = kernels.split24(p)
            again = kernels.adamw8_flat(torch.ones(520), tail[0], after, HYPER, tail=tail[1])
            assert again[1] is not None
            found.append([p, after.scales, kernels.whole24(again[0], again[1]), again[2].scales])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, rtol=2e-5, atol=1e-6)
    assert found[0][2][:256].isnan().all() and not found[0][2][384:].isnan().any()
