"""What a loss does with values between layers, and gradients that do not come: as one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.layered import end, layer, params
from tests.laws.pipelines import F64, Model, rows
from zfunc import optim
from zfunc.errors import CompositionError

Loss = Callable[[Any, Any], Tensor]
SCHEDULES = ("1f1b", "zb", "zbv")


def layers(p: Any) -> list[Any]:
    return [*p["blocks"], *p["more"]]


def check(model: Model, schedule: str, **how: Any) -> None:
    wanted = model.trained(lambda f: zf.accumulate(f, 3), steps=2, **how)

    def run() -> Any:
        return model.trained(lambda f: zf.pipeline(f, 3, schedule, pipe=2), steps=2, **how)

    for found in zf.simulate(2)(run)():
        assert_near(found, wanted, 1e-9)


def as_it_is(same: Callable[[Tensor], Tensor]) -> Loss:
    """A value of an early stage, which a function gives back as it is on a later one."""

    def loss(p: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for i, each in enumerate(layers(p)):
            x = zf.layer(layer, each, x)
            if i == 1:
                early = x * 2
            if i == len(layers(p)) - 2:
                x = x + same(early) * 0.1
        return end(x, batch)

    return loss


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float64),
    "double": lambda x: x.double(),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SAME)
def test_an_operation_that_returns_its_argument(name: str, schedule: str) -> None:
    check(Model(params(), as_it_is(SAME[name]), rows), schedule)


def added_up(p: Any, batch: Any) -> Tensor:
    """A tensor of zeros to which the first stage adds, in place."""
    x, total = batch["x"], torch.zeros((), dtype=F64)
    for i, each in enumerate(layers(p)):
        x = zf.layer(layer, each, x)
        if i == 0:
            total += x.square().mean()
    return end(x, batch) + total


def added_to_the_batch(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for i, each in enumerate(layers(p)):
        x = zf.layer(layer, each, x)
        if i == 0:
            rest = batch["x"].clone()
            rest += 0.1 * x
    return end(x + rest.tanh(), batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loss", [added_up, added_to_the_batch])
def test_a_tensor_that_the_first_stage_writes_to(loss: Loss, schedule: str) -> None:
    check(Model(params(), loss, rows), schedule)


def written_views(p: Any, batch: Any) -> Tensor:
    """Layers write to what they are given, the first one to a view."""
    x = layer(p["first"], batch["x"]).view(-1, 2, 3)
    for each in layers(p):
        x = zf.layer(lambda q, x: x.add_(layer(q, x.clone().flatten(1)).view_as(x)), each, x)
    return end(x.flatten(1), batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_view_that_the_first_layer_writes_to(schedule: str) -> None:
    check(Model(params(), written_views, rows), schedule)


def returned_twice(looks: bool) -> Loss:
    """A layer's results have one tensor in two places, of which later ones use one each."""

    def fn(q: Any, x: Tensor, kept: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        y = layer(q, x) * (2 if looks and x.isnan().any() else 1)
        return y, [*kept, y]

    def loss(p: Any, batch: Any) -> Tensor:
        x, kept = batch["x"], list[Tensor]()
        for each in layers(p):
            x, kept = zf.layer(fn, each, x, kept)
            assert kept[-1] is x
        return end(x, batch) + sum((y.mean() for y in kept), torch.zeros((), dtype=F64))

    return loss


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("looks", [False, True])
def test_a_tensor_that_a_layer_returns_twice(looks: bool, schedule: str) -> None:
    check(Model(params(), returned_twice(looks), rows), schedule)


def in_slots(p: Any, batch: Any) -> Tensor:
    x, kept = batch["x"], torch.zeros(len(layers(p)), *batch["x"].shape, dtype=F64)
    for i, each in enumerate(layers(p)):
        kept[i] = x = zf.layer(layer, each, x)
    return end(kept.mean(0), batch)


def test_slots_that_several_stages_fill() -> None:
    with pytest.raises(CompositionError, match=r"take torch\.stack"):
        check(Model(params(), in_slots, rows), "1f1b")


def scored(q: Any, x: Tensor) -> Tensor:
    return x + 0.1 * torch.func.grad(lambda y: layer(q, y).square().sum())(x)


def along(q: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(layer(q, forward_ad.make_dual(x, x * 1)))
    return y + 0.1 * tangent


IN_LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": scored,
    "vjp": lambda q, x: x + torch.func.vjp(lambda y: layer(q, y), x)[1](x)[0],
    "jvp": lambda q, x: x + torch.func.jvp(lambda y: layer(q, y), (x,), (x,))[1],
    "forward_ad": along,
    "memory": lambda q, x: layer(q, x if x.data_ptr() else x + 1),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of jvp
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", IN_LAYERS)
def test_torch_func_in_layers(name: str, schedule: str) -> None:
    def loss(p: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for each in layers(p):
            x = zf.layer(IN_LAYERS[name], each, x)
        return end(x, batch)

    check(Model(params(), loss, rows), schedule)


def scaled_in_regions(p: Any, batch: Any) -> Tensor:
    """By a value of parameters alone, which each stage makes where it is used first: in a region
    that backward runs again."""
    x, scale = batch["x"], torch.tanh(p["s"])
    for each in layers(p):
        x = checkpoint(lambda x, q: zf.layer(layer, q, x) * scale, x, each, use_reentrant=False)
    return end(x, batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_of_parameters_in_regions_that_run_again(schedule: str) -> None:
    check(Model(params(), scaled_in_regions, rows), schedule)


def cut_off(at: int) -> Loss:
    """Layers before one have no gradient; the cut is within a stage, or at its end."""

    def loss(p: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for i, each in enumerate(layers(p)):
            x = zf.layer(layer, each, x.detach() if i == at else x)
        return end(x, batch)

    return loss


def tail_unused(p: Any, batch: Any) -> Tensor:
    """Layers behind one have none."""
    x = batch["x"]
    for i, each in enumerate(layers(p)):
        x = zf.layer(layer, each, x)
        if i == 1:
            early = x
    return end(early, batch) + x.detach().mean()


@pytest.mark.parametrize("schedule", ["gpipe", *SCHEDULES])
@pytest.mark.parametrize("loss", [cut_off(3), cut_off(4), cut_off(5), tail_unused])
def test_layers_without_a_gradient_rest(loss: Loss, schedule: str) -> None:
    """Also those of another stage than the one where the gradient ends."""
    tx = optim.adamw(0.05, weight_decay=0.5)
    check(Model(params(), loss, rows), schedule, tx=tx, skip_unused=True)


class Clamped(nn.Module):
    """Blocks whose gradients a hook of their node changes, as old versions of torch had it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))
        for block in self.layers:
            block[0].register_backward_hook(clamp)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = x + block(x)
        return x


def clamp(_: nn.Module, given: Any, out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in given)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_of_nodes(schedule: str) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Clamped().double())

    def loss(p: Any, batch: Any) -> Tensor:
        return model.apply(p, batch["x"]).square().mean()

    check(Model(model.params, loss, rows), schedule, tx=optim.sgd(1.0))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("given", [torch.as_tensor, Tensor.numpy])
def test_batches_of_one_shape_whose_memory_is_ordered_in_two_ways(
    given: Callable[[Tensor], Any], schedule: str
) -> None:
    """A mask of dropout is drawn in the order of memory: on each stage in that of this batch."""

    def dropped(w: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.tanh(x * w), 0.5)

    def loss(p: Any, batch: Any) -> Tensor:
        return zf.scan(dropped, p, torch.as_tensor(batch["x"])).square().mean()

    def batch(i: int) -> Any:
        x = rows(i, 30)["x"].view(6, 5, 6)
        return {"x": given(x.transpose(1, 2).contiguous().transpose(1, 2) if i % 2 else x)}

    check(Model(zf.Layers([*torch.ones(4, 6, dtype=F64)]), loss, batch), schedule)


def test_a_long_row_of_operations_on_parameters() -> None:
    """One after the other is made where it is used: longer rows than calls may be deep."""

    def loss(p: Any, batch: Any) -> Tensor:
        shift, x = p["s"], batch["x"]
        for _ in range(sys.getrecursionlimit() // 2):
            shift = shift * 0.999
        for i, each in enumerate(layers(p)):
            x = zf.layer(layer, each, x)
            if not i:
                zeros = torch.zeros_like(x)
                for _ in range(sys.getrecursionlimit() // 2):
                    zeros = zeros * 0.5
        return end(x + shift + zeros, batch)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(500)
    try:
        check(Model(params(), loss, rows), "1f1b")
    finally:
        sys.setrecursionlimit(limit)
