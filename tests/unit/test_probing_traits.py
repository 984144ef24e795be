"""What one run of a layer does not tell: other layers of its class, training, gradients."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc.modules.split_plans import Role
from zfunc.probing.calls import probed
from zfunc.probing.plans import plan_of


class Layer(nn.Module):
    """Width 8, and 24 between; ``act`` lies between."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu, number: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.act, self.layer_number = act, number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Heads(nn.Module):
    def __init__(self, heads: int, width: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        every = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k))
        q, k = every
        v = self.v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


def mixed(x: Tensor) -> Tensor:
    return x.softmax(-1)


def hooked() -> Layer:
    layer = Layer()
    layer.down.register_forward_pre_hook(lambda _, args: (args[0].softmax(-1),))
    return layer


class Settled(Layer):
    """Whether features meet is said by something that it keeps."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        kept = self.settings
        mixes = kept["mix"] if isinstance(kept, dict) else getattr(kept, "mix", kept)
        y = self.up(x).relu()
        return x + self.down(y.softmax(-1) if mixes is not None and mixes > 0.5 else y)


class Scaled(nn.Module):
    """A product, if the scale is 1."""

    def __init__(self, inputs: int, outputs: int, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(outputs, inputs)), scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.scale


class Weighted(Layer):
    """How much features meet is said by a buffer."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.up(x), self.get_buffer("weights")
        return x + self.down(weights[0] * y + weights[1] * y.softmax(-1))


def scaled(scale: float) -> Layer:
    layer = Layer()
    layer.down = Scaled(24, 8, scale)  # type: ignore[assignment]
    return layer


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "another function": (Layer, lambda: Layer(mixed)),
    "another submodule": (lambda: Layer(nn.ReLU()), lambda: Layer(nn.Softmax(-1))),
    "a hook": (Layer, hooked),
    "settings in a dict": (lambda: Settled({"mix": 0.0}), lambda: Settled({"mix": 1.0})),
    "settings in an object": (
        lambda: Settled(types.SimpleNamespace(mix=False)),
        lambda: Settled(types.SimpleNamespace(mix=True)),
    ),
    "a tensor": (lambda: Settled(torch.zeros(())), lambda: Settled(torch.ones(()))),
    "a buffer of several numbers": (lambda: Weighted(1, 0), lambda: Weighted(0.5, 0.5)),
    "a float in the place of None": (lambda: Settled(None), lambda: Settled(1.0)),
    "a product that scales": (lambda: scaled(1.0), lambda: scaled(0.5)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_that_runs_otherwise_is_tried_by_itself(name: str) -> None:
    module = nn.Sequential(*(made() for made in PAIRS[name]))
    roles = plan_of(zf.functionalize(module), 2, example=(2, 3, 8)).roles
    assert {layer.partition(".")[0] for layer in roles} == {"0"}


@pytest.mark.parametrize("other", [0.4, 0.6])
def test_layers_with_other_floats_are_tried_with_these(other: float) -> None:
    module = nn.Sequential(Settled(0.3), Settled(other))
    plan = plan_of(zf.functionalize(module), 2, example=(2, 3, 8))
    assert ("1.down" in plan.roles) == (other < 0.5), plan


def test_heads_of_each_layer_are_divided() -> None:
    model = zf.functionalize(nn.Sequential(Heads(4), Heads(2)))
    attributes = plan_of(model, 2, example=(2, 3, 8)).attributes
    assert attributes == {"0": {"heads": (2, 2)}, "1": {"heads": (1, 1)}}


def test_which_one_a_layer_is_makes_it_no_other() -> None:
    model = zf.functionalize(nn.Sequential(*(Layer(lambda x: x.relu(), i) for i in range(3))))
    assert [kind.names for kind in probed(model, (2, 3, 8)).kinds] == [["0", "1", "2"]]


class Odd(Layer):
    """Features meet in every second layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + self.down(y.softmax(-1) if self.layer_number % 2 else y.relu())


def test_layers_whose_code_reads_which_one_they_are_are_tried_by_themselves() -> None:
    model = zf.functionalize(nn.Sequential(*(Odd(number=i) for i in range(4))))
    roles = plan_of(model, 2, example=(2, 3, 8)).roles
    assert {layer.partition(".")[0] for layer in roles} == {"0", "2"}


def test_heads_that_grow_by_one_are_those_of_each_layer() -> None:
    model = zf.functionalize(nn.Sequential(*(Heads(n, 12) for n in (2, 3, 4))))
    attributes = plan_of(model, 2, example=(2, 3, 12)).attributes
    assert [attributes[f"{i}"]["heads"] for i in range(3)] == [(1, 1), (2, 1), (2, 2)]


class Told(Layer):
    def forward(self, x: Tensor, layer_idx: int) -> Tensor:  # type: ignore[override]
        y = self.up(x)
        return x + self.down(y.softmax(-1) if layer_idx % 2 else y.relu())


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Told() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, i)
        return x


def test_layers_that_are_told_which_one_they_are_are_tried_as_several() -> None:
    assert not plan_of(zf.functionalize(Telling()), 2, example=(2, 3, 8)).roles


class Gated(nn.Module):
    """Heads and texts are in one dimension, heads slowest, and a gate is given for each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.heads = nn.Linear(12, 12), nn.Linear(12, 12), 4

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.q(x).unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3)
        y = y.flatten(0, 1) * gate[:, None, None]
        return x + self.o(y.unflatten(0, (self.heads, -1)).permute(1, 2, 0, 3).flatten(2))


class Gating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.arange(1.0, 1 + 4 * len(x), dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, gate)
        return x


def test_an_argument_is_divided_so_for_other_numbers_of_texts() -> None:
    plan = plan_of(zf.functionalize(Gating()), 2, example=(2, 3, 12))
    assert not plan.inputs and "layers.0" not in plan.attributes, plan


class Drawn(Layer):
    """Features meet in training alone, in which the layer draws numbers, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + self.down(F.gumbel_softmax(y) if self.training else y)


class Trained(Layer):
    """Features meet in training alone; numbers are dropped there, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.up(x), 0.5, self.training)
        return x + self.down(F.normalize(y, dim=-1) if self.training else y)


class Clipped(nn.Linear):
    """A product whose weight is another one in training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.clamp(-0.1, 0.1) if self.training else self.weight)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.a
        return (y.softmax(-1) if self.training else y.relu()) @ self.b


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def clipped() -> nn.Module:
    return Around(nn.Sequential(Clipped(8, 24), nn.ReLU(), Clipped(24, 8)))


class Gain(Layer):
    """A number that is read between, where a rank has a part of its gradient, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.down(self.up(x).relu() * self.gain)


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.norm(dim=-1, keepdim=True)


def shortened(x: Tensor) -> Tensor:
    """Long ones alone."""
    return x * (50 / x.norm(dim=-1, keepdim=True)).clamp(max=1)


class Square(nn.Module):
    """A column whose weight is that of its row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def patched() -> nn.Module:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).tanh()

    layer = Layer()
    layer.down.forward = types.MethodType(forward, layer.down)  # type: ignore[method-assign]
    return layer


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "a layer in training": Trained,
    "a layer that draws in training": Drawn,
    "products in training": clipped,
    "a network in training": lambda: Around(Network()),
    "a parameter that is read behind, too": Gain,
    "a backward that mixes": lambda: Layer(Normed.apply),
    "large numbers mix": lambda: Layer(shortened),
    "a sum far from a threshold": lambda: Layer(lambda x: torch.where(x.sum() > 1e9, 2 * x, x)),
    "an if that is not taken": lambda: Layer(lambda x: 2 * x if x.max() > 1e9 else x),
    "a norm below a clamp": lambda: Layer(lambda x: x / x.norm(dim=-1, keepdim=True).clamp(1e9)),
    "features of one text alone": lambda: Layer(lambda x: x.softmax(-1) if len(x) == 1 else x),
    "a column tied to its row": Square,
    "a product with a forward of its own": patched,
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_share_of_the_whole_stays_whole(name: str) -> None:
    module = nn.Sequential(WHOLE[name](), Layer(nn.Dropout(0.5)))
    roles = plan_of(zf.functionalize(module), 2, example=(2, 3, 8)).roles
    assert roles == {"1.up": Role.COLUMN, "1.down": Role.ROW}


class Texts(nn.Module):
    """A layer that mixes features where it generates, one position at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Layer(lambda x: x.softmax(-1) if x.shape[1] == 1 else x)])

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layers[0](self.table(ids))
        return out


def test_features_that_meet_at_one_position_alone_stay_whole() -> None:
    assert set(plan_of(zf.functionalize(Texts()), 2).roles) == {"table"}
