"""Sums over a rank's part that meet parts again: refused in the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from zfunc.errors import PlacementError
from zfunc.trees import tree

Between = Callable[[Tensor, Any], Tensor]
RULES = {"up": zf.Cut(0), "down": zf.Cut(1), "gain": zf.Cut(0)}

WRONG: dict[str, Between] = {
    "a norm": lambda h, p: h / h.norm(dim=-1, keepdim=True),
    "a softmax": lambda h, p: h.softmax(-1),
    "a layer norm": lambda h, p: F.layer_norm(h, h.shape[-1:]),
    "a leaf by its norm": lambda h, p: h * (p["gain"] / p["gain"].norm()),
    "a mean behind more": lambda h, p: h * torch.atan(h.mean(-1, keepdim=True)),
    "a threshold": lambda h, p: h * (h > h.mean(-1, keepdim=True)),
    "the larger": lambda h, p: torch.max(h, h.amin(-1, keepdim=True) + 0.1),
    "a mean square": lambda h, p: h * (h.float().pow(2).mean(2, keepdim=True) + 1).rsqrt(),
}
RIGHT: dict[str, Between] = {
    "each by itself": lambda h, p: h.relu() * p["gain"],
    "compared": lambda h, p: h * (torch.atan(h) > 0.1).to(h),
    "summed over ranks": lambda h, p: h / zf.psum(h.square().sum(-1, keepdim=True), "tensor"),
    "within heads": lambda h, p: F.rms_norm(h.unflatten(-1, (-1, 2)), (2,)).flatten(-2),
    "over positions": lambda h, p: h - h.mean(1, keepdim=True),
}


def ended(between: Between, ways: int) -> list[dict[str, Tensor]]:
    """Parameters after a step, on each rank."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    params, x = {"up": new(8, 4), "down": new(4, 8), "gain": new(8)}, new(2, 3, 4)
    tx = zf.optim.sgd(0.1)

    def loss(p: Any, x: Tensor) -> Tensor:
        return zf.row(between(zf.column(x, p["up"]), p), p["down"]).square().mean()

    def rank() -> dict[str, Tensor]:
        step = zf.train_step(loss, tx)
        step = zf.split(step, rules=RULES, tensor=ways) if ways > 1 else zf.Step(step)
        state, _ = step(step.place(zf.TrainState.create(params, tx)), x)
        return tree.flatten_names(step.unplace(state).params)

    return zf.simulate(ways)(rank)()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_summed_over_a_part_alone_is_refused(name: str) -> None:
    ended(WRONG[name], 1)
    with pytest.raises(PlacementError, match=r"Sum over ranks in between, zf\.psum"):
        ended(WRONG[name], 2)


@pytest.mark.parametrize("name", RIGHT)
def test_other_work_in_parts_is_that_of_one_process(name: str) -> None:
    (want,) = ended(RIGHT[name], 1)
    for found in ended(RIGHT[name], 2):
        assert all(torch.allclose(found[key], x, rtol=1e-9) for key, x in want.items())
