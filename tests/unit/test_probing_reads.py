"""What code beside a pair of products reads, and what it is given: tried, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.unit.test_probing import WIDTH, check, functional
from zfunc.errors import PlacementError
from zfunc.modules.split_plans import Role
from zfunc.probing.exactness import Doubled
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


class Product(nn.Module):
    """It has no bias, nor an attribute of that name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t().t())


def twice() -> nn.Module:
    layer = Layer()
    layer.up, layer.down = Product(8, 24), Product(24, 8)  # type: ignore[assignment]
    return Stack(layer, layer, Layer())


def test_a_layer_that_is_called_twice_is_split() -> None:
    model = zf.functionalize(twice().double())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    want = model.apply(model.params, x)

    def rank() -> float:
        placed = zf.split(model.apply, model, tensor=2, example=(2, 3, 8)).place(model.params)
        assert placed["layers"][0]["up"]["weight"].shape == (12, 8)
        return float((model.apply(placed, x) - want).abs().max())

    assert max(zf.simulate(2)(rank)()) < 1e-12


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


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_norms_of_weights_are_tried_on_sizes_that_fit() -> None:
    """torch._weight_norm does not look at sizes, and writes into the memory of others."""
    with Doubled(), pytest.raises(ValueError, match="do not fit"):
        torch._weight_norm(torch.ones(2, 3), torch.ones(4, 1), 0)
    layers = [Layer(), Layer()]
    layers[0].up = nn.utils.parametrizations.weight_norm(layers[0].up)
    layers[1].up = nn.utils.weight_norm(layers[1].up)
    assert not plan_of(zf.functionalize(Stack(*layers)), 2, example=(2, 3, 8)).splits


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


class Repeated(nn.Module):
    """Gates from a product that is called twice, for values that a column and a row could share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) + self.gate(x.roll(1, dims=-2))
        return x + self.down(self.up(x) * gate)  # type: ignore[no-any-return]


def test_what_rows_read_of_a_product_that_is_called_twice_keeps_them_whole() -> None:
    """Its gradients would be a rank's own: that was so of DeBERTa's shared queries and keys."""
    plan = plan_of(zf.functionalize(nn.Sequential(Repeated(), Repeated())), 2, example=(2, 3, 8))
    assert not plan.splits
    assert plan.whole["0.down"] == "down read what gate gives, of which all ranks have all"


class Written(nn.Linear):
    """A product as Falcon writes it: its own forward adds its bias."""

    def forward(self, input: Tensor) -> Tensor:
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("sequence", [False, True])
def test_a_row_whose_own_forward_adds_its_bias(sequence: bool) -> None:
    """The plan made it a row, and the first step refused it."""

    def made() -> nn.Module:
        return nn.Sequential(Written(WIDTH, 24), nn.ReLU(), Written(24, WIDTH))

    model = functional(made)
    plan = plan_of(model, 3, sequence=sequence)
    assert plan.roles["layers.0.2"] is Role.ROW
    assert "counted" not in str(plan) and bool(plan.streams) == sequence
    check(model, plan)
