"""Experts that are modules of their own, called for the tokens that a router sends them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.test_probing import WIDTH, check, functional
from zfunc.modules.split_plans import Role
from zfunc.probing.plans import plan_of

EXPERTS = 4


class Experts(nn.Module):
    """One expert a token: some are called in some calls alone, or for no tokens."""

    def __init__(self, skip: bool, early: bool) -> None:
        super().__init__()
        self.skip, self.early = skip, early
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(6, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).sigmoid().max(-1)
        out = torch.zeros_like(flat)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = (chosen == i).nonzero().flatten()
            if self.skip and not len(mine):
                continue
            y, weight = F.gelu(up(flat[mine])), weights[mine, None]
            y = down(y * weight) if self.early else down(y) * weight
            out = out.index_add(0, mine, y)
        return x + out.view_as(x)


@pytest.mark.parametrize(("skip", "early"), [*itertools.product([True, False], repeat=2)])
def test_experts_that_not_every_call_reaches(skip: bool, early: bool) -> None:
    """Where weights come before the last product, the router is a column of all experts."""
    model = functional(lambda: Experts(skip, early))
    plan = plan_of(model, 2)
    called = [n for n in range(EXPERTS) if f"layers.0.down.{n}" in plan.roles]
    assert bool(called) != early, str(plan)
    for name in called:
        assert plan.roles[f"layers.0.down.{name}"] is Role.ROW
        assert plan.roles[f"layers.0.up.{name}"] is Role.COLUMN
    check(model, plan)
