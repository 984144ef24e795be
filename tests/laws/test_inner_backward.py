"""A loss, or a layer of it, that calls ``backward()`` itself: a force, an energy, a penalty.

What it leaves in ``.grad`` is its own affair. The law: the step is that of the plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc.errors import CompositionError

Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    **{f"shard {n}": partial(zf.shard, stage=n) for n in range(4)},
    "accumulate": lambda step: zf.accumulate(step, 2),
    "accumulate, shard 0": lambda step: zf.shard(zf.accumulate(step, 2), stage=0),
    "accumulate, shard 3": lambda step: zf.shard(zf.accumulate(step, 2), stage=3),
    "remat, shard 3": lambda step: zf.shard(zf.remat(step), stage=3),
    "offload, shard 3": lambda step: zf.shard(zf.offload(step), stage=3),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zb_lean", "zbv")


class Layer(nn.Module):
    """A layer that moves along the gradient of an energy, with the weights that it has."""

    def __init__(self, is_moved: bool) -> None:
        super().__init__()
        self.linear, self.is_moved = nn.Linear(4, 4), is_moved

    def forward(self, x: Tensor) -> Tensor:
        if self.is_moved:
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                self.linear(at).square().sum().backward()
                assert at.grad is not None
                x = x - 0.1 * at.grad
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, is_moved: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(is_moved) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def losses(model: Any) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    def before(params: Any, x: Tensor) -> Tensor:
        model.apply(params, x + 1).square().mean().backward()
        return model.apply(params, x).square().mean()

    def of_the_same(params: Any, x: Tensor) -> Tensor:
        y = model.apply(params, x)
        (y**3).mean().backward(retain_graph=True)
        return y.square().mean()

    def behind(params: Any, x: Tensor) -> Tensor:
        y = model.apply(params, x)
        model.apply(params, 2 * x).mean().backward()
        return y.square().mean()

    return {f.__name__: f for f in (before, of_the_same, behind)}


def two_steps(wrap: Wrap, loss_fn: Any, model: Any, params: Any, x: Tensor) -> list[Any]:
    """The metrics of two steps, and the parameters behind them."""
    tx = zf.optim.adam(0.1)
    step = wrap(zf.train_step(loss_fn, tx))
    state = zf.TrainState.create(params, tx)
    if isinstance(step, zf.Step):
        state, x = step.place(state), step.local_batch(x)
    found: list[Any] = []
    for _ in range(2):
        state, metrics = step(state, x)
        found += [metrics["loss"], metrics["grad_norm"]]
    return [*map(float, found), *zf.tree.leaves(zf.full(state.params))]


def check(wrap: Wrap, loss_fn: Any, model: Any, ranks: int = 2) -> None:
    params, x = model.params, torch.randn(8, 4, dtype=torch.float64)
    expected = two_steps(lambda step: step, loss_fn, model, params, x)
    for found in zf.simulate(ranks)(lambda: two_steps(wrap, loss_fn, model, params, x))():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("where", ["before", "of_the_same", "behind"])
def test_a_loss_that_calls_backward(where: str, name: str) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Model().double())
    ranks = 1 if name == "accumulate" else 2
    check(WRAPS[name], losses(model)[where], model, ranks)


@pytest.mark.parametrize("name", [*WRAPS, *SCHEDULES])
def test_a_layer_that_calls_backward(name: str) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Model(is_moved=True).double())

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x).square().mean()

    def staged(step: Any) -> Any:
        return zf.pipeline(step, microbatches=4, pipe=2, schedule=name)

    check(WRAPS.get(name, staged), loss_fn, model, 1 if name == "accumulate" else 2)


def test_on_stages_a_loss_that_calls_backward_is_refused() -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Model().double())
    with pytest.raises(CompositionError, match="Do that inside a layer"):
        check(
            lambda step: zf.pipeline(step, microbatches=2, pipe=2),
            losses(model)["of_the_same"],
            model,
        )
