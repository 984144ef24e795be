"""Leaves and submodules that are read between columns and rows, and elsewhere, too."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc.probing.plans import plan_of
from zfunc.trees import tree

F64, TX = torch.float64, zf.optim.sgd(1.0)


class Layer(nn.Module):
    def __init__(self, act: nn.Module, behind: bool = False) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 24), act, nn.Linear(24, 8)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        if self.behind:
            return self.act(x + self.down(self.up(x).relu()))  # type: ignore[no-any-return]
        return x + self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A temperature of all heads, and a gain of the stream: leaves of one submodule."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(8, 24), nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.full((1,), 0.7))
        self.before, self.behind = (nn.Parameter(torch.rand(8) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x * self.before).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in rows)
        y = (q @ k.mT * self.temperature).softmax(-1) @ v
        return x + self.behind * self.out(y.transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """A product of its own for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 6) for _ in range(4))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = (head(x).chunk(3, -1) for head in self.heads)
        y = torch.cat([F.scaled_dot_product_attention(q, k, v) for q, k, v in rows], -1)
        return x + self.out(y)  # type: ignore[no-any-return]


class Several(nn.Module):
    """One product for values, of which there are few, and for hidden features; two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.down = nn.Linear(8, 32), nn.Linear(8, 8), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        values, hidden = self.first(x).split([8, 24], -1)
        return x + self.out(values.softmax(-1)) + self.down(hidden.relu())  # type: ignore[no-any-return]


class States(nn.Module):
    """A norm over all heads beside numbers of each that three ranks cannot share evenly."""

    def __init__(self, heads: int = 4, size: int = 3) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.first, self.norm = nn.Linear(8, heads * (size + 1)), nn.RMSNorm(heads * size)
        self.rate, self.out = nn.Parameter(torch.rand(heads)), nn.Linear(heads * size, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.first(x).split([self.heads * self.size, self.heads], -1)
        gate = F.softplus(gate * self.rate)[..., None]
        y = (y.unflatten(-1, (self.heads, self.size)) * gate).flatten(-2)
        return x + self.out(self.norm(y))  # type: ignore[no-any-return]


class Mode(enum.Enum):
    PLAIN = 1


class Moded(Layer):
    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.mode = Mode.PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.mode is Mode.PLAIN else x


class Behind(nn.Module):
    """A submodule of the layers is called behind them, too."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.PReLU()
        self.layers = nn.ModuleList(Layer(act) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layers[0].act(x)  # type: ignore[no-any-return, operator]


def twice(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(layer(), layer())


def sharing(behind: bool) -> nn.Module:
    act = nn.PReLU()
    return nn.Sequential(Layer(act), Layer(act, behind), Layer(nn.GELU()))


def one_up() -> nn.Module:
    layers = [Layer(nn.GELU()) for _ in range(3)]
    for layer in layers[1:]:
        layer.up = layers[0].up
    return nn.Sequential(*layers)


def both_ways() -> nn.Module:
    layers = [Layer(nn.GELU()) for _ in range(2)]
    layers[0].up = layers[1].down = nn.Linear(8, 8)
    layers[0].down, layers[1].up = nn.Linear(8, 8), nn.Linear(8, 8)
    return nn.Sequential(*layers)


def inner() -> nn.Module:
    """Layers have all in common but their norms."""
    attention, network = Attention(), Layer(nn.GELU())
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), attention, network) for _ in range(3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "leaves of one submodule": (
        lambda: nn.Sequential(Attention(), Attention()),
        {"0", "1", "qkv", "out"},
    ),
    "a submodule of all layers": (lambda: sharing(False), {"act", "up", "down"}),
    "a submodule of layers that call it elsewhere": (lambda: sharing(True), {"up", "down"}),
    "a submodule that is called behind layers": (Behind, set()),
    "a column of all layers": (one_up, {"up", "down"}),
    "a column that is a row": (both_ways, set()),
    "layers that have all in common": (inner, {"qkv", "out", "up", "down", "1"}),
    "a product for each head": (
        lambda: nn.Sequential(Heads(), Heads()),
        {"0", "1", "2", "3", "out"},
    ),
    "several rows": (lambda: twice(Several), set()),
    "a norm beside numbers of heads": (lambda: twice(States), {"first", "out"}),
    "an enumeration": (lambda: twice(Moded), {"up", "down"}),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def trained(step: Any, model: Any, x: Tensor) -> dict[str, Tensor]:
    state, _ = step(step.place(zf.TrainState.create(model.params, TX)), x)
    return tree.flatten_names(step.unplace(state).params)


def plain_step(model: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x).square().mean()  # type: ignore[no-any-return]

    return zf.train_step(loss, TX)


def assert_as_on_one_process(model: Any, ways: int, sequence: bool = False) -> None:
    x = torch.randn(2, 5, 8, dtype=F64)
    want = trained(zf.Step(plain_step(model)), model, x)
    split = zf.split(plain_step(model), model, tensor=ways, example=(2, 5, 8), sequence=sequence)
    for got in zf.simulate(ways)(lambda: trained(split, model, x))():
        for leaf, value in want.items():
            torch.testing.assert_close(got[leaf], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(name: str, ways: int) -> None:
    module = built(name)
    model = zf.functionalize(module)
    plan = plan_of(model, ways, example=(2, 5, 8))
    assert {path.rpartition(".")[2] for path in plan.roles} == MODELS[name][1], plan
    if plan.splits:
        assert_as_on_one_process(model, ways)


@pytest.mark.parametrize("name", ["a column of all layers", "layers that have all in common"])
def test_submodules_of_several_layers_run_on_positions(name: str) -> None:
    first, last = nn.Linear(8, 8, dtype=F64), nn.Linear(8, 8, dtype=F64)
    module = nn.Sequential(first, *built(name).children(), last)
    assert_as_on_one_process(zf.functionalize(module), 2, sequence=True)
