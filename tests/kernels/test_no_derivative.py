"""What has no derivative says so, in every way of asking: silence would be a derivative of 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zfunc import kernels

# torch.func.jvp loads its rules through torch.jit.script, 2.13
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
ONES, ZEROS = torch.ones(64), torch.zeros(64)
HYPER = kernels.adamw_hyper(0.1, 1)
LION = kernels.lion_hyper(0.1)


def written(f: Callable[..., None], *args: Tensor) -> Tensor:
    """What a function has written, here to its first or second argument."""
    f(*args)
    return args[0] + args[1]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quantize_groups": lambda x: kernels.quantize_groups(x)[1],
    "dequantize_groups": lambda x: kernels.dequantize_groups(
        torch.ones(64, dtype=torch.int8), x[:1], None, 64
    ),
    "onebit_pack": lambda x: kernels.onebit_pack(x, ZEROS)[1],
    "onebit_pack, its error": lambda x: kernels.onebit_pack(ONES, x)[2],
    "onebit_mean": lambda x: kernels.onebit_mean(
        torch.zeros(1, 8, dtype=torch.uint8), ONES[:1, None], x
    )[1],
    "onebit_unpack": lambda x: kernels.onebit_unpack(torch.zeros(8, dtype=torch.uint8), x[:1], 64),
    "quantize_payload": lambda x: kernels.quantize_payload(x, kernels.Payload(64))[0],
    "norm_clip": lambda x: kernels.norm_clip([x], 1.0)[0],
    "adamw_flat": lambda x: kernels.adamw_flat(x, ONES, ZEROS, ZEROS, HYPER)[0],
    "lion_flat": lambda x: kernels.lion_flat(ONES, x, ZEROS, LION)[0],
    "momentum_shares_": lambda x: written(
        kernels.momentum_shares_, x, ZEROS.clone(), ONES, kernels.shares_hyper(0.9, 1.0)
    ),
    "adamw_frozen_": lambda x: written(
        kernels.adamw_frozen_, ZEROS.clone(), x, ONES.clone(), kernels.frozen_hyper(1, 1, 1, most=1)
    ),
    "lamb_moments_": lambda x: kernels.lamb_moments_(
        x, ONES, ZEROS.clone(), ZEROS.clone(), [(0, 64)], HYPER
    ),
    "w8_mm, its scales": lambda x: kernels.w8_mm(
        ONES[None, :8], torch.ones(64, 8, dtype=torch.int8), x[:, None]
    ),
    "norm_gate_up": lambda x: kernels.norm_gate_up(
        x[None], ONES, kernels.Packed.of(torch.ones(8, 64))
    ),
    "norm_gate_up, its weights": lambda x: kernels.norm_gate_up(
        ONES[None], ONES, kernels.Packed.of(x.expand(8, 64))
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_refused(name: str) -> None:
    f, x = FUNCTIONS[name], torch.randn(64)

    def number(x: Tensor) -> Tensor:
        return f(x).sum()

    ways: list[Callable[[Tensor], Any]] = [
        torch.func.grad(number),
        lambda x: torch.vmap(torch.func.grad(number))(x[None]),
        lambda x: f(x.clone().requires_grad_()),
        lambda x: torch.func.jvp(f, (x,), (ONES,)),
        lambda x: torch.vmap(lambda t: torch.func.jvp(f, (x,), (t,)))(torch.eye(64)[:2]),
    ]
    for way in ways:
        with pytest.raises(kernels.KernelError, match=r"no gradient|no derivative"):
            way(x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        f(x)  # nothing asks for one


def test_it_is_refused_where_it_is_compiled() -> None:
    f = FUNCTIONS["quantize_groups"]
    compiled: Any = torch.compile(
        lambda x: torch.func.jvp(f, (x,), (ONES,))[1], backend="aot_eager"
    )
    with pytest.raises(kernels.KernelError, match="no derivative"):
        compiled(torch.randn(64))
