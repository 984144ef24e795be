"""Products that a plain call does not reach, and experts with biases behind their last product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.plans_by_hand import local_params
from tests.unit.test_probing import DIM, HEADS, WIDTH, Gated, check, functional
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import Role
from zfunc.probing.plans import plan_of
from zfunc.trees import tree


class Crossing(nn.Module):
    """A layer of a decoder, which may look at what an encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * DIM) for _ in range(3))
        self.out, self.network = nn.Linear(HEADS * DIM, WIDTH), Gated()

    def forward(self, x: Tensor, states: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if states is not None:
            given = ((self.q, x), (self.k, states), (self.v, states))
            q, k, v = (f(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for f, y in given)
            y = F.scaled_dot_product_attention(q, k, v)
            x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.network(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Crossing() for _ in range(2))

    def forward(self, ids: Tensor, states: Tensor | None = None, mask: Any = None) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, states, mask)
        return self.head(x)  # type: ignore[no-any-return]


def decoder() -> Functional:
    torch.manual_seed(0)
    return zf.functionalize(Decoder().double())


@pytest.mark.parametrize("ways", [2, 4])
def test_products_for_an_encoders_states_are_split_without_any(ways: int) -> None:
    model = decoder()
    plan = plan_of(model, ways)
    for name in ("q", "k", "v", "out", "network.down"):
        assert f"layers.1.{name}.weight" in plan.splits, str(plan)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(11, (3, 7), generator=generator)
    for states in (None, torch.randn(3, 4, WIDTH, generator=generator, dtype=torch.float64)):
        compare(model, plan, ids, states)


def compare(model: Functional, plan: Any, ids: Tensor, states: Tensor | None) -> None:
    """Gradients of parameters, and of the states."""
    full = tree.flatten_names(model.params)

    def grads(params: Any) -> dict[str, Tensor | None]:
        leaves = tree.flatten_names(params)
        given = None if states is None else states.clone().requires_grad_()
        loss = model.apply(params, ids, given).square().sum()
        asked = [*leaves.values(), *([] if given is None else [given])]
        found = torch.autograd.grad(loss, asked, allow_unused=True)
        return dict(zip([*leaves, "states"], found, strict=False))

    want = grads(tree.map(lambda x: x.detach().clone().requires_grad_(), model.params))
    ranks = zf.simulate(plan.ways)(lambda: grads(local_params(model, full, plan, zf.rank())))()
    for rank, mine in enumerate(ranks):
        for name, whole in want.items():
            g, split = mine[name], plan.splits.get(name)
            assert (g is None) == (whole is None), name
            if g is not None and whole is not None:
                part = whole if split is None else split.local(whole, rank)
                torch.testing.assert_close(g, part, rtol=1e-9, atol=1e-9, msg=name)


class Placed(nn.Module):
    """Queries are turned by a table that nobody trains, as rotary positions of RoFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, DIM))
        return self.out((q * places[:, None]).flatten(2))  # type: ignore[no-any-return]


class Constant(nn.Embedding):
    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.places = Constant(32, DIM)
        self.layers = nn.ModuleList(Placed() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.table(ids), self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x, places)
        return self.head(x)  # type: ignore[no-any-return]


def test_what_is_looked_up_without_gradients_is_a_constant() -> None:
    torch.manual_seed(0)
    module = Turned().double()
    module.places.weight.requires_grad_(False)
    model = zf.functionalize(module)
    plan = plan_of(model, 2)
    assert plan.roles["layers.0.q"] is Role.COLUMN, str(plan)
    assert {"layers.0.q.weight", "layers.1.out.weight"} <= plan.splits.keys()


# --- experts with biases -------------------------------------------------------------------------


class Stacked(nn.Module):
    """Gates and values side by side or in pairs, in either order of dimensions; with biases."""

    def __init__(self, pairs: bool, turned: bool, width: int = 6) -> None:
        super().__init__()
        self.pairs, self.turned = pairs, turned
        both, down = (3, WIDTH, 2 * width), (3, width, WIDTH)
        if turned:
            both, down = (3, 2 * width, WIDTH), (3, WIDTH, width)
        self.both, self.down = nn.Parameter(torch.randn(both)), nn.Parameter(torch.randn(down))
        self.both_bias = nn.Parameter(torch.randn(3, 2 * width))
        self.down_bias = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        both, down = (y.mT if self.turned else y for y in (self.both, self.down))
        y = torch.einsum("btw,ewf->betf", x, both) + self.both_bias[:, None]
        gate, up = (y[..., ::2], y[..., 1::2]) if self.pairs else y.chunk(2, dim=-1)
        y = torch.einsum("betf,efw->betw", F.silu(gate) * (up + 1), down)
        return torch.einsum("betw,bte->btw", y + self.down_bias[:, None], weights)


class Experts(nn.Module):
    def __init__(self, pairs: bool, turned: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), Stacked(pairs, turned)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.router(x).softmax(-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize(("pairs", "turned"), [(True, False), (False, False), (False, True)])
def test_a_bias_behind_the_last_product_counts_once(pairs: bool, turned: bool, ways: int) -> None:
    model = functional(lambda: Experts(pairs, turned))
    plan = plan_of(model, ways)
    assert plan.roles["layers.0.experts"] is Role.NETWORK, str(plan)
    assert plan.once == {f"layers.{i}.experts": ("down_bias",) for i in range(2)}
    assert "counted on the first rank alone:\n  layers.{0-1}.experts: down_bias" in str(plan)
    check(model, plan)
