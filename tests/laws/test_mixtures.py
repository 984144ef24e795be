"""Mixtures with one module per expert, and branches: ranks that use different units of a model.

A parameter that a rank does not use counts as zeros there, so the numbers are those of one process
that sees the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import regression
from tests.laws.covering import STAGES, pairs
from tests.laws.models import block, mean_square, stack, stack_loss
from zfunc import optim

F64 = torch.float64
RANKS, ROWS, WIDTH = 3, 6, 8
WHOLE, SPLIT = 1 << 26, 1500  # bytes: a block is one unit, or some


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Rows go to one expert each; the busiest expert is called first, idle ones are not called."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.router(self.norm(x)).softmax(-1).max(-1)
        out = x
        load = which.bincount(minlength=len(self.experts))
        for k in load.argsort(descending=True).tolist():
            if load[k]:
                rows = (which == k).nonzero()[:, 0]
                found = self.experts[k](x[rows]) * weight[rows, None]
                out = out.index_put((rows,), x[rows] + found)
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            x = part(x)
        return self.head(x)


def mixture() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Blocks().double()


def switch() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=4,
        expert_capacity=64,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.SwitchTransformersForConditionalGeneration(config)


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=F64)


def texts(seed: int) -> Tensor:
    """Each row repeats a token of its own, so that ranks route to different experts."""
    return torch.randint(1, 32, (ROWS, 1), generator=torch.Generator().manual_seed(seed)).repeat(
        1, 4
    )


def of_rows(f: Any, p: Any, x: Tensor) -> Tensor:
    return f.apply(p, x).square()


def of_texts(f: Any, p: Any, ids: Tensor) -> Tensor:
    return f.apply(p, input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.square()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any]] = {
    "mixture": (mixture, rows, of_rows, None),
    "experts as layers": (mixture, rows, of_rows, "blocks.*.experts.*"),
    "switch": (switch, texts, of_texts, None),
}


def trained(name: str, ranks: int, stage: int = 0, unit_bytes: int = WHOLE) -> list[Any]:
    """Losses, what is evaluated on the whole batch, and parameters, by rank."""
    make, batch_of, out_of, units = MODELS[name]
    f = zf.functionalize(make(), units=units, train=True)
    # Switch routes in float32, in which Adam would make steps of what should be zero.
    tx = optim.sgd(1e-2) if name == "switch" else optim.adamw(1e-2)

    def loss(p: Any, batch: Tensor) -> zf.Mean:
        out = out_of(f, p, batch)
        return zf.Mean(out.sum(), out.numel())

    def body() -> Any:
        step = zf.shard(zf.train_step(loss, tx), stage=stage, unit_bytes=unit_bytes)
        state, found = step.place(zf.TrainState.create(f.params, tx)), []
        for i in range(3):
            batch = zf.local_batch(batch_of(i))
            with zf.comm.ledger() as sent:
                state, metrics = step(state, batch)
            found += [float(metrics["loss"]), float(metrics["grad_norm"])]
            seen = zf.evaluate(lambda p, x: out_of(f, p, x).sum())(state.params, batch)
            found.append(float(zf.psum(seen)))
        return found, zf.full(state.params), sent

    return zf.simulate(ranks)(body)()


@functools.cache
def alone(name: str) -> Any:
    return trained(name, 1)[0]


# Switch's router converts itself in each call (`Module.to`), which looks at `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("name", "stage", "unit_bytes"), pairs(MODELS, STAGES, (WHOLE, SPLIT)))
def test_ranks_that_route_to_other_experts(name: str, stage: int, unit_bytes: int) -> None:
    found, params, _ = alone(name)
    near = 1e-4 if name == "switch" else 1e-8
    for mine, its, _ in trained(name, RANKS, stage, unit_bytes):
        assert mine == pytest.approx(found, rel=near, abs=near)
        for a, b in zip(zf.tree.leaves(its), zf.tree.leaves(params), strict=True):
            assert torch.allclose(a, b, atol=near, rtol=0)


class Language(nn.Module):
    """A causal model of tokens whose blocks are mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(16, WIDTH), Blocks().blocks
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        for part in self.blocks:
            x = part(x)
        return self.head(x).unflatten(0, ids.shape)


@pytest.mark.parametrize("units", [None, "blocks.*.experts.*"])
def test_ranks_that_generate_texts_of_other_lengths(units: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        f = zf.functionalize(Language().double(), units=units, train=False)
    tx = optim.sgd(0.1)
    loss = zf.train_step(lambda p, ids: f.apply(p, ids).square().mean(), tx)

    def continued(params: Any, rank: int) -> Tensor:
        prompt = torch.tensor([[3 * rank + 1]])
        first = int(f.apply(f.params, prompt)[0, -1].argmax())
        stop = [first] if rank else []  # all but rank 0 stop with their first token
        return zf.generate(f, params, prompt, max_new_tokens=4, stop=stop)

    def body() -> Tensor:
        step = zf.shard(loss, stage=3, unit_bytes=SPLIT)
        return continued(step.place(zf.TrainState.create(f.params, tx)).params, zf.rank())

    found = zf.simulate(RANKS)(body)()
    assert [x.shape[1] for x in found] == [5, 2, 2]
    for rank, text in enumerate(found):
        assert torch.equal(text, continued(f.params, rank))


# Branches

ORDERS = {"order": [0, 2, 1], "skip": [0, 2], "none": [], "more": [0, 1, 2, 1, 1], "all": [0, 1, 2]}


def loss_of(how: str, rank: int) -> Callable[[Any, Any], Tensor]:
    """Rank 1 takes another path through the layers than the others."""

    def loss(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for i in ORDERS[how if rank == 1 else "all"]:
            x = zf.layer(block, params["blocks"][i], x)
        return mean_square(x @ params["head"]["w"], batch["y"])

    return loss


def by_hand(hows: list[str], ranks: int) -> Any:
    """Steps along the mean of the ranks' own gradients."""
    params, whole = stack(F64), regression(0, F64)
    for how in hows:
        rows = [
            {
                k: x[len(x) * r // ranks : len(x) * (r + 1) // ranks] if x.ndim else x
                for k, x in whole.items()
            }
            for r in range(ranks)
        ]
        grads = [
            zf.value_and_grad(stack_loss if how == "alike" else loss_of(how, r))(params, batch)[1]
            for r, batch in enumerate(rows)
        ]
        params = zf.tree.map(lambda p, *gs: p - 0.1 * sum(gs) / ranks, params, *grads)
    return params


def along(hows: list[str], ranks: int, stage: int) -> list[Any]:
    def body() -> Any:
        now = ["alike"]

        def loss(params: Any, batch: Any) -> Tensor:
            how = stack_loss if now[0] == "alike" else loss_of(now[0], zf.rank())
            return how(params, batch)

        step = zf.shard(zf.train_step(loss, optim.sgd(0.1)), stage=stage, unit_bytes=1)
        state = step.place(zf.TrainState.create(stack(F64), optim.sgd(0.1)))
        for how in hows:
            now[0] = how
            with zf.comm.ledger() as sent:
                state, _ = step(state, zf.local_batch(regression(0, F64)))
        return zf.full(state.params), sent.calls_by_label["ask"]

    return zf.simulate(ranks, timeout=30)(body)()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("how", ["order", "skip", "none", "more"])
def test_a_branch_that_one_rank_takes_from_the_first_step_on(how: str, stage: int) -> None:
    want = by_hand([how, how], RANKS)
    for params, _ in along([how, how], RANKS, stage):
        for a, b in zip(zf.tree.leaves(params), zf.tree.leaves(want), strict=True):
            assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["order", "skip", "none"])
def test_a_branch_that_one_rank_takes_later(how: str, stage: int) -> None:
    """After a step in which ranks did the same nobody asks any more."""
    hows = ["alike", how, "alike", how]
    want = by_hand(hows, RANKS)
    for params, asked in along(hows, RANKS, stage):
        assert asked == 0
        for a, b in zip(zf.tree.leaves(params), zf.tree.leaves(want), strict=True):
            assert torch.allclose(a, b, atol=1e-12)
