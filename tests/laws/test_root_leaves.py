"""Large leaves outside all layers: each leaves by itself, as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.covering import STAGES, pairs
from zfunc import optim, tree
from zfunc.layout.cutting import ALONE, make_layout

VOCAB, WIDTH = ALONE // 8 // 64, 64  # a table of ALONE bytes in float64
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def params() -> dict[str, Any]:
    return {
        "blocks": zf.Layers({"w": numbers((WIDTH, WIDTH), i, scale=0.1)} for i in range(3)),
        "embedding": numbers((VOCAB, WIDTH), 10),
        "head": numbers((VOCAB, WIDTH), 11, scale=0.1),
        "norm": numbers((WIDTH,), 12),
        "spare": numbers((VOCAB, WIDTH), 13),
    }


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def through(p: Any, x: Tensor) -> Tensor:
    for layer in p["blocks"]:
        x = zf.layer(block, layer, x)
    return x * p["norm"]


def plain(p: Any, batch: dict[str, Tensor]) -> Tensor:
    out = through(p, F.embedding(batch["ids"], p["embedding"])) @ p["head"].T
    return F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


def tied(p: Any, batch: dict[str, Tensor]) -> Tensor:
    out = through(p, F.embedding(batch["ids"], p["embedding"])) @ p["embedding"].T
    return F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


def twice(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """The head is used before the layers and behind them."""
    x = F.embedding(batch["ids"], p["embedding"]) + 0.1 * F.embedding(batch["ids"], p["head"])
    out = through(p, x) @ p["head"].T
    return F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


def sparse(p: Any, batch: dict[str, Tensor]) -> Tensor:
    out = through(p, F.embedding(batch["ids"], p["embedding"], sparse=True)) @ p["head"].T
    return F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


def on_some(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """What a rank uses depends on its rows: the spare head or the other, some layers or all."""
    total = p["norm"].sum() * 0
    for row in batch["ids"]:
        even = int(row[0]) % 2 == 0
        x = F.embedding(row, p["embedding"])
        x = through(p, x) if even else x
        total = total + F.cross_entropy(x @ (p["head"] if even else p["spare"]).T, row)
    return total / len(batch["ids"])


def nothing_but(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """No layer takes part."""
    first = batch["ids"][:, 0]
    return F.cross_entropy((p["norm"] * p["embedding"][first]) @ p["head"].T, first)


def penalised(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss function takes gradients by the parameters itself, of each row."""
    total = p["norm"].sum() * 0
    for row in batch["ids"]:
        value = plain(p, {"ids": row[None]})
        of = [p["head"], p["embedding"], p["norm"]]
        grads = torch.autograd.grad(value, of, create_graph=True)
        total = total + value + torch.stack([g.square().sum() for g in grads]).sum()
    return total / len(batch["ids"])


def hooked(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """A hook of the loss function has the first word on a gradient."""
    p["head"].register_hook(lambda g: g * 0.5)
    return plain(p, batch)


LOSSES: list[Loss] = [plain, tied, twice, sparse, on_some, nothing_but, penalised, hooked]


def batch(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(i)
    ids = torch.randint(VOCAB, (4, 5), generator=generator)
    ids[:, 0] = torch.tensor([0, 1, 1, 1] if i % 2 else [0, 0, 1, 0])  # ranks differ for on_some
    return {"ids": ids}


TX = optim.adamw(0.01)


def trained(step: Any, state: Any, mine: Callable[[Any], Any]) -> Any:
    for i in range(4):
        state, _ = step(state, mine(batch(i)))
    return zf.full(state.params)


@cache
def alone(loss: Loss) -> Any:
    return trained(zf.train_step(loss, TX), zf.TrainState.create(params(), TX), lambda b: b)


@pytest.mark.parametrize(("loss", "stage", "accumulate"), pairs(LOSSES, STAGES, (1, 2)))
def test_it_is_the_plain_step(loss: Loss, stage: int, accumulate: int) -> None:
    def body() -> Any:
        step = zf.shard(zf.train_step(loss, TX), stage=stage)
        if accumulate > 1:
            step = zf.accumulate(step, accumulate)
        return trained(step, step.place(zf.TrainState.create(params(), TX)), zf.local_batch)

    for found in zf.simulate(2)(body)():
        for a, b in zip(tree.leaves(found), tree.leaves(alone(loss)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_head_leaves_before_the_layers(stage: int) -> None:
    def body() -> list[str]:
        tx = optim.sgd(0.1)
        step = zf.shard(zf.train_step(plain, tx), stage=stage)
        state = step.place(zf.TrainState.create(params(), tx))
        for i in (0, 1):
            with zf.comm.ledger() as seen:
                state, _ = step(state, zf.local_batch(batch(i)))
        return [label for label in seen.calls_by_label if label.startswith("reduce ")]

    for order in zf.simulate(2)(body)():
        names = [label.removeprefix("reduce ") for label in order]
        # Of the root: embedding, head, norm, and what nobody uses.
        assert names == ["root[1]", "root[2]", "blocks.0-2", "root[0]", "root[3]"], names


def test_many_leaves_without_layers_are_few_units() -> None:
    tree_of_many = {f"w{i}": torch.zeros(ALONE // 4) for i in range(100)}
    assert len(make_layout(tree_of_many, world=2, first=1 << 20).units) == 1
    assert len(make_layout(tree_of_many, world=2, first=1 << 20, unit_bytes=1 << 23).units) == 7
