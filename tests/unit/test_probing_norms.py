"""Norms over all heads or hidden features: each rank has some, and means are taken of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.covering import each
from tests.laws.plans_by_hand import local_params
from tests.unit.test_probing import DIM, HEADS, WIDTH, Deep, check, functional, run
from zfunc.modules.split_reductions import Reductions
from zfunc.probing.plans import plan_of
from zfunc.trees import tree

Norm = Callable[[int], nn.Module]


class Hand(nn.Module):
    """Written out, as Hugging Face's are; it computes in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Spread(Hand):
    """Of mean and variance, one of them without its dimension; the weight is for all features."""

    def __init__(self, size: int) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(dim=-1) / x.var(-1, correction=0, keepdim=True).squeeze(-1)
        return (x - mean[..., None]) / x.std(dim=2, keepdim=True) * self.weight


class Long(Hand):
    """By lengths, without a weight for each feature."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1) + x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / x.norm(dim=-1, keepdim=True) * self.weight


class Most(nn.Module):
    """What is no mean: it stays on one rank."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class Softmax(Most):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


NORMS: dict[str, Norm] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "no weight": lambda size: nn.LayerNorm(size, elementwise_affine=False),
    "by hand": Hand,
    "variance": Spread,
    "lengths": Long,
}


class Attention(nn.Module):
    """Queries and keys are normed over all heads."""

    def __init__(self, norm: Norm, kv: int) -> None:
        super().__init__()
        self.kv = kv
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * DIM) for n in (HEADS, kv, kv))
        self.of_q, self.of_k, self.out = (
            norm(HEADS * DIM),
            norm(kv * DIM),
            nn.Linear(HEADS * DIM, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.of_q(self.q(x)), self.of_k(self.k(x)), self.v(x)
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Inner(nn.Module):
    """A norm over hidden features, before the row."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 9), norm(9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).relu()))  # type: ignore[no-any-return]


def perturbed(make: Callable[[], nn.Module]) -> Any:
    model = functional(make)
    generator = torch.Generator().manual_seed(1)
    for leaf in tree.leaves(model.params):
        with torch.no_grad():
            leaf.add_(0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype))
    return model


@pytest.mark.parametrize(("norm", "kv", "ways"), each(NORMS, [HEADS, 2, 1], [2, 3, 4], times=3))
def test_norms_of_all_heads_are_shared(norm: str, kv: int, ways: int) -> None:
    model = perturbed(lambda: Attention(NORMS[norm], kv))
    plan = plan_of(model, ways)
    assert {"layers.0.q.weight", "layers.1.out.weight"} <= plan.splits.keys(), str(plan)
    assert {"layers.0.of_q", "layers.1.of_q"} <= plan.norms.keys()
    assert "means over the features of all ranks:\n  layers.{0-1}.of_q: 24" in str(plan)
    check(model, plan)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_hidden_features_are_shared(norm: str, ways: int) -> None:
    model = perturbed(lambda: Inner(NORMS[norm]))
    plan = plan_of(model, ways)
    assert plan.splits["layers.0.down.weight"].dim == 1, str(plan)
    assert plan.norms["layers.1.norm"].size == 9
    check(model, plan)


@pytest.mark.parametrize("norm", [Most, Softmax])
def test_what_is_no_mean_keeps_all_features_on_one_rank(norm: Norm) -> None:
    model = functional(lambda: Inner(norm))
    plan = plan_of(model, 2)
    assert not any(name.startswith("layers.") for name in plan.splits)
    assert "1 independent piece" in plan.whole["layers.0.down"]
    check(model, plan)


def test_norms_that_need_no_sum_send_none() -> None:
    assert not plan_of(functional(lambda: Inner(nn.Identity)), 2).norms


@pytest.mark.parametrize(("norm", "numbers"), [(nn.RMSNorm, 1), (nn.LayerNorm, 2)])
def test_a_norm_sends_a_number_or_two_a_token(norm: Norm, numbers: int) -> None:
    model = functional(lambda: Inner(norm))
    plan, full = plan_of(model, 2), tree.flatten_names(model.params)
    ids = torch.ones(3, 7, dtype=torch.long)

    def rank() -> tuple[int, int]:
        with zf.comm.ledger() as sent:
            run(model, local_params(model, full, plan, zf.rank()), ids)
        return sent.calls_by_label["tensor norms"], sent.by_label["tensor norms"]

    layers, both_ways = 2, 2
    calls = layers * both_ways * numbers
    assert zf.simulate(2)(rank)() == [(calls, calls * ids.numel() * 8)] * 2


def test_a_step_trains_with_norms_that_are_shared() -> None:
    model = perturbed(lambda: Attention(nn.RMSNorm, 2))
    start, tx = model.params, zf.optim.adamw(1e-2)
    ids = torch.randint(1, 11, (4, 7), generator=torch.Generator().manual_seed(5))

    def loss(params: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(model.apply(params, ids).flatten(0, 1), ids.flatten())

    def trained(step: Any) -> Any:
        state = step.place(zf.TrainState.create(start, tx))
        for _ in range(3):
            state, _ = step(state, step.local_batch(ids))
        return tree.flatten_names(step.unplace(state).params)

    want = trained(zf.Step(zf.train_step(loss, tx)))
    step = zf.shard(zf.remat(zf.split(zf.train_step(loss, tx), model, tensor=2)), stage=3)
    for mine in zf.simulate(4)(trained)(step):
        for name, x in want.items():
            torch.testing.assert_close(mine[name], x, rtol=1e-9, atol=1e-9)


# --- sequences of modules ------------------------------------------------------------------------


def test_a_table_and_a_head_in_a_sequence_of_modules() -> None:
    torch.manual_seed(0)
    block = Deep(lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH)))
    chain = nn.Sequential(block.table, block.layers[0], block.layers[1], block.head)
    model = zf.functionalize(chain.double())
    plan = plan_of(model, 2)
    assert plan.splits.keys() == tree.flatten_names(model.params).keys() - {"1.2.bias", "2.2.bias"}
    check(model, plan)


def test_products_in_a_row_are_one_layer() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH)]
    model = zf.functionalize(nn.Sequential(*parts).double())
    plan = plan_of(model, 2, example=(3, WIDTH))
    assert plan.roles == {"0": "column", "2": "row"}


# --- the block itself ----------------------------------------------------------------------------


def test_reductions_over_other_dimensions_are_torchs() -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))

    def never(_: Tensor) -> Tensor:
        raise AssertionError

    with Reductions(x, 10, never):
        assert torch.equal(x.sum(1), x.transpose(1, 2).sum(2))  # 4 wide: of no features
        x[0].sum(-1), x[None].mean(-1)
        x.mean(), x.sum((1, 2)), x.norm(), x.norm(1, -1), x.var(0), F.layer_norm(x, (4, 5))


@pytest.mark.parametrize("shared", [False, True])
def test_reductions_of_parts_are_those_of_the_whole(shared: bool) -> None:
    """In one process: what other ranks would add is given."""
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = x[:, :4] if shared else x[:, :3]
    share = torch.tensor([1.0, 1.0, 0.5, 0.5]) if shared else None
    rest = torch.cat([x[:, 2:4] / 2**0.5, x[:, 4:]], 1) if shared else x[:, 3:]

    def added(mine: Tensor) -> Tensor:
        return mine + rest.square().sum(-1, keepdim=True)

    with Reductions(own, 6, added, share):
        got = torch.linalg.vector_norm(own, dim=1), F.rms_norm(own, (own.shape[1],), eps=0.1)
    torch.testing.assert_close(got[0], x.norm(dim=1))
    torch.testing.assert_close(got[1], F.rms_norm(x, (6,), eps=0.1)[:, : own.shape[1]])
