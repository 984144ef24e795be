"""Lion over a flat buffer: the twin against float64 and against the optimizer."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.closeness import LENGTHS, assert_near, poisoned
from zfunc import kernels, optim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", LENGTHS)
def test_the_twin_is_the_formula(n: int, dtype: torch.dtype):
    grad, param, mu = torch.randn(n).to(dtype), torch.randn(n), torch.randn(n)
    with poisoned():
        hyper = kernels.lion_hyper(0.1, weight_decay=0.1, factor=0.5)
        *found, low = kernels.lion_flat(grad, param, mu, hyper, torch.bfloat16)
    g, p, m = 0.5 * grad.double(), param.double(), mu.double()
    assert_near(found[0], (1 - 0.1 * 0.1) * p - 0.1 * (0.9 * m + (1 - 0.9) * g).sign())
    assert_near(found[1], 0.99 * m + (1 - 0.99) * g)
    assert torch.equal(low, found[0].bfloat16())


def test_it_is_the_optimizer():
    tx = optim.lion(0.1, weight_decay=0.1)
    param, mu = torch.randn(1000), torch.zeros(1000)
    plain, state = param, tx.init(param)
    hyper = kernels.lion_hyper(0.1, weight_decay=0.1)
    for _ in range(5):
        grad = torch.randn(1000)
        updates, state = tx.update(grad, state, plain)
        plain = optim.apply_updates(plain, updates)
        param, mu, _ = kernels.lion_flat(grad, param, mu, hyper)
    assert_near(param, plain)
    assert torch.equal(mu, state.mu)


def test_opcheck():
    args = [torch.randn(65) for _ in range(3)]
    hyper = kernels.lion_hyper(0.1)
    torch.library.opcheck(torch.ops.zfunc.lion_flat.default, (*args, hyper, torch.bfloat16))
    torch.library.opcheck(torch.ops.zfunc.lion_flat_.default, (*args, None, hyper))


def test_what_it_cannot_take():
    with pytest.raises(kernels.KernelError, match=r"float64\[9\]; expected float64\[5\]: lr, b1"):
        kernels.lion_flat(*(torch.ones(3) for _ in range(3)), kernels.adamw_hyper(0.1, 1))
    with pytest.raises(kernels.KernelError, match=r"write optim\.lion"):
        kernels.lion_flat(*(torch.ones(3, requires_grad=True) for _ in range(3)), lion_rates())


def lion_rates() -> torch.Tensor:
    return kernels.lion_hyper(0.1)
