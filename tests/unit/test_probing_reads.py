"""What code beside a pair of products reads, and what it is given: tried, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from zfunc.errors import PlacementError
from zfunc.modules.split_plans import Role
from zfunc.probing.plans import plan_of

Act = Callable[[Tensor], Tensor]
NETWORK = {"up": Role.COLUMN, "down": Role.ROW}


class Layer(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        y = self.up(x).relu()
        return x + self.down(y.softmax(-1) if mixed else y)


class Heads(Layer):
    """What ``also`` does with the number of heads."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.heads, self.also = 4, also
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def attend(self, x: Tensor) -> Tensor:
        rows = [part(x).view(*x.shape[:2], self.heads, 2) for part in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*(row.transpose(1, 2) for row in rows))
        return x + self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        x = self.attend(x)
        n = self.heads
        if self.also == "between":
            return x + self.down(self.up(x).relu() / n)
        return x + self.down(self.up(x / n if self.also == "before" else x).relu())


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Outside(Stack):
    """Code around layers that reads a number of theirs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.layers[0].heads  # type: ignore[operator]


class Measured(Stack):
    """Code around layers that reads a weight of theirs, without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.layers[0].up.weight.detach().norm()  # type: ignore


class Told(Stack):
    """Layers are told that they are other ones."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, mixed=i == 1)
        return x


class Weighed(Layer):
    """A weight too large to be made up is read without a gradient."""

    def __init__(self) -> None:
        super().__init__(1024)

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        return x + self.down(self.up(x).relu() / (1 + self.up.weight.detach().norm()))


class Counting(Layer):
    """A statistic of hidden features, which nobody reads in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        y = self.up(x).relu()
        if self.training:
            self.seen = self.seen + y.detach().sum()
        return x + self.down(y)


class Telling(Layer):
    """It also gives a number that it takes of hidden features."""

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        y = self.up(x).relu()
        return x + self.down(y), y.square().mean()


class OfFirst(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, more = layer(x)
            x = x * more
        return x


class Rms(torch.autograd.Function):
    """Its backward takes a mean of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x * scale, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        y, scale = ctx.saved_tensors
        found: Tensor = scale * (grad - y * (grad * y).mean(-1, keepdim=True))
        return found


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Rms.apply(x)
        return found


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor, mixed: bool = False) -> Any:
        return x + self.down(self.norm(self.up(x)))


WHOLE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a number that the other pair reads": (lambda: Stack(Heads("between")), {"up", "down"}),
    "a number that the other pair's input has": (
        lambda: Stack(Heads("before")),
        {"up", "down"},
    ),
    "a number that is read outside": (lambda: Outside(Heads()), {"up", "down"}),
    "a weight that is read outside": (lambda: Measured(Layer()), set()),
    "a weight that is read without a gradient": (lambda: Stack(Weighed()), set()),
    "layers that are told otherwise": (lambda: Told(Layer(), Layer()), set()),
    "a buffer that is written": (lambda: Stack(Counting()), set()),
    "a result of hidden features": (lambda: OfFirst(Telling()), set()),
    "a norm with a backward of its own": (lambda: Stack(Normed()), set()),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_others_would_see_in_parts_stays_whole(name: str) -> None:
    made, split = WHOLE[name]
    plan = plan_of(zf.functionalize(made()), 2, example=(2, 3, 8))
    assert {path.rpartition(".")[2] for path in plan.roles} == split, plan


def test_a_leaf_between_that_a_rule_leaves_whole_keeps_its_pair_whole() -> None:
    class Gained(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(24))

        def forward(self, x: Tensor, mixed: bool = False) -> Any:
            return x + self.down(self.up(x) * self.gain)

    model = zf.functionalize(Stack(Gained()))
    assert "layers.0.gain" in plan_of(model, 2, example=(2, 3, 8)).splits
    plan = plan_of(model, 2, example=(2, 3, 8), whole=lambda name: name == "layers.0.gain")
    assert not plan.splits, plan


def test_a_network_of_many_leaves_ends() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(self.inner(x)[0])  # type: ignore[no-any-return]

    plan = plan_of(zf.functionalize(Stack(Around(), Layer())), 2, example=(2, 3, 8))
    assert plan.roles == {"layers.1.up": Role.COLUMN, "layers.1.down": Role.ROW}


def test_code_that_multiplies_by_itself_calls_what_is_split() -> None:
    """torch's own layers read weights themselves where nothing has a gradient."""
    torch.manual_seed(0)
    module = Stack(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)))
    model = zf.functionalize(module.double(), train=False)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        want = model.apply(model.params, x)

    def rank() -> float:
        placed = zf.split(model.apply, model, tensor=2, example=(2, 3, 8)).place(model.params)
        with torch.no_grad():
            return float((model.apply(placed, x) - want).abs().max())

    assert max(zf.simulate(2)(rank)()) < 1e-12


def test_what_a_loss_makes_of_a_split_leaf_is_refused() -> None:
    model = zf.functionalize(Stack(Layer(), Layer()).double())

    def loss(params: Any, x: Tensor) -> Tensor:
        first, second = params["layers"]
        weight = second["up"]["weight"]
        second = {**second, "up": {**second["up"], "weight": weight / weight.norm()}}
        out: Tensor = model.apply({"layers": zf.Layers([first, second])}, x)
        return out.square().mean()

    tx = zf.optim.sgd(0.1)

    def rank() -> None:
        step = zf.split(zf.train_step(loss, tx), model, tensor=2, example=(2, 3, 8))
        state = step.place(zf.TrainState.create(model.params, tx))
        step(state, torch.ones(2, 3, 8, dtype=torch.float64))

    with pytest.raises(PlacementError, match=r"layers\.1\.up\.weight is split over 2 ranks"):
        zf.simulate(2)(rank)()
