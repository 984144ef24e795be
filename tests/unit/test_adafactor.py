"""Adafactor beside `split`, its memory, and noise that no number of ranks changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from zfunc import optim, tree
from zfunc.layout.cutting import make_layout
from zfunc.layout.sharded import cut

Tree = Any


def params() -> Tree:
    torch.manual_seed(0)
    layers = [{"w": torch.randn(5, 40), "b": torch.randn(3, 2, 70)} for _ in range(2)]
    return {"layers": zf.Layers(layers), "head": torch.randn(300)}


@pytest.mark.parametrize("world", [1, 3])
def test_noise_is_the_same_in_every_world(world: int) -> None:
    full = params()
    tx = optim.add_noise(0.3, 0.55, key=5)
    want, state = tx.update(full, tx.init(full))
    want, _ = tx.update(want, state)

    def body() -> Tree:
        part = cut(make_layout(full, world=world), full, zf.rank())
        noisy, state = tx.update(part, tx.init(part))
        return tree.full(tx.update(noisy, state)[0])

    for found in zf.simulate(world)(body)():
        for name, x in tree.flatten_names(found).items():
            assert torch.equal(x, tree.flatten_names(want)[name]), name


def test_noise_falls_as_it_should() -> None:
    tx = optim.add_noise(0.5, 0.55, key=1)
    zero = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    state = tx.init(zero)
    for count in (1, 2, 3):
        noise, state = tx.update(zero, state)
        assert noise["a"].std().item() == pytest.approx((0.5 / count**0.55) ** 0.5, rel=0.02)
        assert abs(noise["a"].mean().item()) < 0.01
        assert abs(torch.dot(noise["a"], noise["b"]).item()) / 50_000 < 0.01


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("stage", [0, 3])
def test_adafactor_beside_split(stage: int) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(nn.Sequential(*[Mlp() for _ in range(2)]).double())
    full = copy.deepcopy(tree.full(model.params))
    tx = optim.chain(optim.adafactor(0.1, 3, momentum=0.5), optim.add_noise(1e-3, 0.5, key=0))

    def loss_fn(params: Tree, x: torch.Tensor) -> torch.Tensor:
        return (model.apply(params, x) - 1).square().mean()

    x = torch.randn(4, 6, dtype=torch.float64)

    def trained(ranks: int, tensor: int) -> Tree:
        def body() -> Tree:
            step = zf.shard(zf.train_step(loss_fn, tx), stage=stage)
            step = zf.split(step, model, tensor=tensor) if tensor > 1 else step
            state = step.place(zf.TrainState.create(full, tx))
            for _ in range(3):
                state, _ = step(state, step.local_batch(x))
            return tree.flatten_names(step.unplace(state).params)

        return zf.simulate(ranks)(body)()[0]

    one, split = trained(1, 1), trained(4, 2)
    for name, x_one in one.items():
        torch.testing.assert_close(split[name], x_one, rtol=1e-9, atol=1e-10)


def test_a_matrix_has_the_means_of_its_rows_and_columns() -> None:
    tx = optim.adafactor(0.1)
    state = tx.init({"m": torch.zeros(256, 128), "v": torch.zeros(10)})
    assert tree.size_bytes(state[0].factors) == 4 * (256 + 128)
    assert state[0].v["m"] is None and state[0].v["v"].shape == (10,)
    assert (
        optim.adafactor(0.1, factored=False).init(torch.zeros(256, 128))[0].v.numel() == 256 * 128
    )


def test_gradients_of_other_leaves_are_refused() -> None:
    tx = optim.adafactor(0.1, min_dim_size_to_factor=2)
    params = {"m": torch.ones(2, 2), "n": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=r"keeps 9 means .* have 4"):
        tx.update({"m": torch.ones(2, 2), "n": None}, tx.init(params), params)
