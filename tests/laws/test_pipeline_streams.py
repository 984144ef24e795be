"""Streams that are cut along positions (``split(sequence=True)``), on the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.covering import each
from zfunc import optim

WIDTH, LAYERS, WORDS = 8, 4, 12
TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02))
Between = Callable[["Net", Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Layers, and what is computed outside of them."""

    def __init__(self, before: Between, between: Between, behind: Between) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.around = before, between, behind

    def forward(self, ids: Tensor) -> Tensor:
        before, between, behind = self.around
        x = self.table(ids)
        first = x = before(self, x, x)
        for layer in self.layers:
            x = between(self, layer(x), first)
        logits: Tensor = self.head(self.norm(behind(self, x, first)))
        return logits


def same(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x


def placed(net: Net, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = x + net.places(torch.arange(x.shape[1]))
    return out


def written(net: Net, x: Tensor, first: Tensor) -> Tensor:
    x += net.places(torch.arange(x.shape[1]))
    return x


def scaled(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x * net.scale


def normed(net: Net, x: Tensor, first: Tensor) -> Tensor:
    out: Tensor = net.norm(x)
    return out


def halved(net: Net, x: Tensor, first: Tensor) -> Tensor:
    x *= 0.5
    return x


def centred(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x - 0.5 * x.mean(1, keepdim=True)


def joined(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x + first


def cast(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x.float().double()


def last(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x[:, -1:] + 0 * x


def mean(net: Net, x: Tensor, first: Tensor) -> Tensor:
    return x.mean(1, keepdim=True) + 0 * x


BEFORE = same, placed, written, scaled, normed
BETWEEN = same, scaled, joined, halved, centred, cast
BEHIND = same, joined, scaled, last, mean


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (8, n), generator=generator) for n in (6, 7)]


def run(
    model: Any, params: Any, loss: Any, mesh: zf.Mesh | None, schedule: str, scored: bool
) -> Any:
    """Metrics of a step for each batch, and the full parameters behind them."""

    def train_step(state: Any, batch: Tensor) -> Any:
        score = zf.evaluate(loss)(state.params, batch) if scored else 0.0
        value, grads = zf.value_and_grad(loss)(state.params, batch)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), {"loss": value, "score": score}

    if mesh is None:
        step: Any = zf.accumulate(train_step, 4)
    else:
        split = zf.split(train_step, model, sequence=True)
        step = zf.pipeline(split, 4, schedule=schedule, mesh=mesh)
    state, metrics = step.place(zf.TrainState.create(params, TX)), []
    for batch in batches():
        state, out = step(state, batch)
        metrics.append(out)
    return metrics, step.unplace(state).params


def both(
    how: tuple[Between, Between, Between], pipe: int, schedule: str = "1f1b", scored: bool = False
) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Net(*how).double())
    params = model.params

    def loss(params: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(model.apply(params, ids).flatten(0, 1), ids.flatten())

    given = model, params, loss
    wanted, mesh = run(*given, None, "", scored), zf.mesh(tensor=2, pipe=pipe, data=1)
    for mine in zf.simulate(2 * pipe)(lambda: run(*given, mesh, schedule, scored))():
        assert_near(mine, wanted, 1e-9)


@pytest.mark.parametrize(
    ("before", "between", "behind", "pipe", "schedule"),
    [
        *((*row, "1f1b") for row in each(BEFORE, BETWEEN, BEHIND, (2, 1, 4))),
        *((same, x, y, 2, "zbv") for x, y in each(BETWEEN, BEHIND)),
    ],
)
def test_what_is_computed_around_layers(
    before: Between, between: Between, behind: Between, pipe: int, schedule: str
) -> None:
    both((before, between, behind), pipe, schedule)


@pytest.mark.parametrize("pipe", [1, 2])
def test_an_evaluation_in_a_step_runs_on_whole_streams(pipe: int) -> None:
    both((placed, same, same), pipe, scored=True)
