"""Where one-bit training ends: no higher than the published algorithm, to which it stands beside.

A small transformer with biases and norms, a text, two ranks, three seeds.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.published import Published
from zfunc import optim
from zfunc.language.corpus import batch_at, read_corpus

CONTEXT, WIDTH, ROWS, STEPS, FREEZE, B2 = 16, 32, 8, 150, 25, 0.95
PEAK = {"momentum": 0.3, "adam": 5e-3, "lamb": 2e-2}
CORPUS = read_corpus("topics", context=CONTEXT)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(apply: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(apply(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch(i: int, seed: int) -> Tensor:
    return batch_at(i, CORPUS.train, ROWS, CONTEXT, seed).long()


def model(seed: int) -> Language:
    torch.manual_seed(seed)
    return Language()


def rate(name: str) -> Any:
    peak = PEAK[name]
    return optim.warmup_cosine(peak, 8, STEPS, end=peak / 20, start=peak / 8)


def judged(apply: Any) -> float:
    rows = torch.cat([batch_at(i, CORPUS.heldout, 64, CONTEXT, 99).long() for i in range(4)])
    with torch.no_grad():
        return float(loss_of(apply, rows))


def published(name: str, seed: int) -> float:
    lr = rate(name)
    run = Published(model(seed), name, 2, FREEZE, B2, loss_of)
    for i in range(STEPS):
        run.step(batch(i, seed), float(lr(i)))
    return judged(run.module)


def ours(name: str, seed: int) -> float:
    tx = {
        "momentum": lambda: optim.sgd(rate(name), momentum=0.9),
        "adam": lambda: optim.adam(rate(name), b2=B2),
        "lamb": lambda: optim.lamb(rate(name), b2=B2),
    }[name]()
    f = zf.functionalize(model(seed))
    step: Any = zf.train_step(
        lambda p, rows: loss_of(lambda ids: f.apply(p, ids, train=True), rows), tx
    )
    step = zf.compress_grads(zf.shard(step, stage=0), freeze_step=FREEZE)

    def body() -> Any:
        state = step.place(zf.TrainState.create(f.params, tx))
        for i in range(STEPS):
            state, _ = step(state, zf.local_batch(batch(i, seed)))
        return step.unplace(state).params

    params = zf.simulate(2)(body)()[0]
    return judged(lambda ids: f.apply(params, ids))


@pytest.mark.parametrize("name", PEAK)
def test_it_ends_no_higher_than_the_published_algorithm(name: str) -> None:
    pairs = [(ours(name, seed), published(name, seed)) for seed in range(3)]
    mine, theirs = (mean(column) for column in zip(*pairs, strict=True))
    print(name, mine, theirs, pairs)
    assert mine <= 1.005 * theirs
