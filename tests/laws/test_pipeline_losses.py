"""What people write in losses and steps: the numbers of one process, or an error that says why.

Nothing in between: each of these ran somewhere else in a pipeline than it looks.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.laws import covering
from tests.laws.cases import assert_near
from tests.laws.layered import base, end, layer, layers_twice, params, through
from tests.laws.pipelines import F64, TX, Model, rows
from zfunc import tree
from zfunc.transforms.pipelining import stage as pipelining_stage

Loss = Callable[[Any, Any], Any]


def outputs_twice(p: Any, batch: Any) -> Tensor:
    x, outs = batch["x"], []
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(layer, each, x)
        outs.append(x)
    more = outs[0].mean() * outs[0].square().mean() + outs[2].sum() * 0.1
    return end(x, batch) + more + (outs[1] * outs[1] * outs[4]).mean()


def closing_over_an_early_value(p: Any, batch: Any) -> Tensor:
    early = x = zf.layer(layer, p["blocks"][0], batch["x"])
    for each in (*p["blocks"][1:], *p["more"]):
        x = zf.layer(lambda q, x: layer(q, x) + early, each, x)
    return end(x, batch)


def giving_an_early_value_to_later_layers(p: Any, batch: Any) -> Tensor:
    """Made of parameters, before the first layer, and given to a layer as it is."""
    early, x = p["s"] * p["first"]["w"][0], batch["x"]
    for i, each in enumerate([*p["blocks"], *p["more"]]):
        more = early if i in (3, 5) else torch.zeros(())
        x = zf.layer(lambda q, x, more: layer(q, x) + more, each, x, more)
    return end(x, batch)


def closing_over_a_parameter(p: Any, batch: Any) -> Tensor:
    scale = p["s"]
    return end(through(p, batch["x"], lambda q, x: layer(q, x) * scale), batch)


def structures(p: Any, batch: Any) -> Tensor:
    def fn(q: Any, given: Any) -> Any:
        y = layer(q, given[0])
        return y, {"a": given[1]["a"] + y.square(), "none": None}

    x, more = through(p, (batch["x"], {"a": batch["x"] * 0, "none": None}), fn)
    return end(x, batch) + more["a"].mean()


def written_in_place(p: Any, batch: Any) -> Tensor:
    x = zf.scan(lambda q, x: layer(q, x).mul_(0.9), p["blocks"], batch["x"]) + 0
    x.add_(1.0)
    return end(
        zf.scan(lambda q, x: x.add_(torch.tanh(x.clone() @ q["w"])), p["more"], x * 1), batch
    )


def a_layer_that_does_not_run(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for i, each in enumerate(p["blocks"]):
        x = x if i == 1 else zf.layer(layer, each, x)
    return end(zf.scan(layer, p["more"], x), batch)


def integers(p: Any, batch: Any) -> Tensor:
    x, count = batch["x"], 0
    for each in (*p["blocks"], *p["more"]):
        x, count = zf.layer(lambda q, x, n: (layer(q, x), (x > 0).sum(1) + n), each, x, count)
    return end(x + count[:, None] * 0.01, batch)


def penalties_of_roots(p: Any, batch: Any) -> Tensor:
    more = p["first"]["w"].square().sum() + p["s"].square().sum()
    return base(p, batch) + 0.01 * more


def first_of_two_detached(p: Any, batch: Any) -> Tensor:
    """Only the second call of each layer has a gradient."""
    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        seen = zf.layer(layer, each, x).detach()
        x = zf.layer(layer, each, x) + 0.1 * seen
    return end(x, batch)


def second_of_two_unused(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        y = zf.layer(layer, each, x)
        zf.layer(layer, each, 2 * x)
        x = y
    return end(x, batch)


def checkpointed(p: Any, batch: Any) -> Tensor:
    return end(
        through(p, batch["x"], lambda q, x: checkpoint(layer, q, x, use_reentrant=False)), batch
    )


def checkpointed_pairs(p: Any, batch: Any) -> Tensor:
    """Regions of two layers and what is between them; a cut is in one, or where one begins."""
    layers = [*p["blocks"], *p["more"]]

    def pair(x: Tensor, i: int) -> Tensor:
        for each in layers[i : i + 2]:
            x = x + zf.layer(layer, each, x) * 0.5
        return x

    x = layer(p["first"], batch["x"])
    for i in range(0, len(layers), 2):
        x = checkpoint(pair, x, i, use_reentrant=False)
    return end(x, batch)


def detached(p: Any, batch: Any) -> Tensor:
    x = zf.scan(layer, p["blocks"], batch["x"])
    x = zf.scan(layer, p["more"], x.detach() * x)
    return end(x, batch) + 0.1 * (x.detach() * x).sum()


def without_gradients(p: Any, batch: Any) -> Tensor:
    """Each stage meets a value first, and its head, in a block that does not record it."""
    blocks = [torch.no_grad, torch.inference_mode]
    x = layer(p["first"], batch["x"])
    for i, each in enumerate([*p["blocks"], *p["more"]]):
        with blocks[i % 2]():
            zf.layer(layer, each, x)
        with torch.no_grad():
            more = zf.layer(layer, each, x).square()
        x = zf.layer(layer, each, x + more) * p["s"]
    return end(x, batch)


class GradientOfNormOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def gradients_that_are_not_linear(p: Any, batch: Any) -> Tensor:
    """``norm(x)`` beside ``x``: of what two stages make, one has the gradient."""
    x = layer(p["first"], batch["x"])
    for each in (*p["blocks"], *p["more"]):
        y = GradientOfNormOne.apply(F.layer_norm(x, (6,)) * p["s"])
        y.register_hook(lambda g: g.sign() + g)
        x = x + 0.1 * zf.layer(layer, each, y)
    return end(x, batch)


def containers_that_come_back(p: Any, batch: Any) -> Tensor:
    """What a layer returns as it was given is the same object where the layer does not run."""
    x, kept = batch["x"], {"scale": p["s"], "seen": []}
    for each in (*p["blocks"], *p["more"]):
        x, same = zf.layer(lambda q, x, kept: (layer(q, x) * kept["scale"], kept), each, x, kept)
        same["scale"] = kept["scale"] * 0.9
        kept["seen"].append(x.mean())
    return end(x, batch) + sum(same["seen"])


def containers_given_twice(p: Any, batch: Any) -> Tensor:
    x, one, two, three = batch["x"], [1.0], {"a": p["s"]}, [batch["x"] * 5]
    for each in (*p["blocks"], *p["more"]):
        x, got = zf.layer(
            lambda q, x, *given: (layer(q, x), given[2]), each, x, one, one, two, three
        )
        assert got is two
    return end(x * got["a"], batch)


@functools.cache
def mask_of(n: int) -> Tensor:
    mask = torch.empty(n, dtype=F64).fill_(1.0)
    mask[n // 2 :] = 0.5
    return mask


def masks_that_are_kept(p: Any, batch: Any) -> Tensor:
    """Tensors that the loss makes, in place: kept in a cache, or its own."""
    mask_of.cache_clear()
    places, kept = torch.arange(len(batch["x"])), dict[int, Tensor]()
    places[places > 5] = 5

    def fn(q: Any, x: Tensor) -> Tensor:
        if 6 not in kept:
            kept[6] = torch.zeros(6, dtype=F64).add_(2.0)
        return layer(q, x) * mask_of(6) * kept[6]

    return end(through(p, batch["x"] + p["first"]["w"][places], fn) * mask_of(6), batch)


def compiled_between_layers(p: Any, batch: Any) -> Tensor:
    twice = torch.compile(lambda x: (x * 2 + 1) * 0.4, backend="eager")
    x, kept = batch["x"], []
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(layer, each, x)
        kept.append(twice(x) * 0.5)
    return end(x, batch) + sum(y.square().mean() for y in kept)


def noise_like_a_view(p: Any, batch: Any) -> Tensor:
    """How much torch draws for few numbers depends on how they lie in memory."""
    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(layer, each, x)
        heads = x.view(len(x), 2, 3).transpose(1, 2)
        x = x + 0.1 * torch.randn_like(heads).transpose(1, 2).reshape(x.shape)
    return end(F.dropout(x, 0.5), batch)


def numbers_of_the_batch(p: Any, batch: Any) -> Tensor:
    many = float(batch["x"].abs().mean())

    def fn(q: Any, x: Tensor, number: float) -> Tensor:
        return layer(q, x) * number

    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(fn, each, x, many)
    return end(x, batch) * many


def writing_to_containers(p: Any, batch: Any) -> Tensor:
    """Each chunk's run of a microbatch finds them as they came."""
    batch["x"] = batch["x"] * 0.5
    batch["seen"], y = [batch["x"]], batch.pop("y")
    x = through(p, batch["x"], lambda q, x: layer(q, x) + 0.1 * batch["x"])
    return end(x, {"y": y}) + len(batch["seen"])


def sums_of_early_values(p: Any, batch: Any) -> Tensor:
    x, total = batch["x"], 0
    for each in (*p["blocks"], *p["more"]):
        x, part = zf.layer(lambda q, x: (layer(q, x), x.sum()), each, x)
        total = total + part
    return end(x, batch) + total


def distributions(p: Any, batch: Any) -> Tensor:
    """They look whether their arguments are in range; compilers switch that off."""
    looks = {"validate_args": True}
    x, total = batch["x"], torch.zeros((), dtype=F64)
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(layer, each, x)
        found = Normal(x.mean(1, keepdim=True), x.square().mean(1, keepdim=True), **looks)
        total = total - found.log_prob(batch["y"]).mean()
        total = total - Categorical(logits=x, **looks).entropy().mean()
    return end(x, batch) + 0.1 * total


def a_distribution_out_of_range(p: Any, batch: Any) -> Tensor:
    x = through(p, batch["x"])
    return -Normal(x, -x.square(), validate_args=True).log_prob(batch["y"]).mean()


RIGHT: list[Loss] = [base, layers_twice, outputs_twice, closing_over_an_early_value]
RIGHT += [giving_an_early_value_to_later_layers, closing_over_a_parameter, structures]
RIGHT += [written_in_place, a_layer_that_does_not_run, sums_of_early_values]
RIGHT += [integers, penalties_of_roots, checkpointed, detached, numbers_of_the_batch]
RIGHT += [first_of_two_detached, second_of_two_unused]
RIGHT += [without_gradients, noise_like_a_view, gradients_that_are_not_linear]
RIGHT += [containers_given_twice, masks_that_are_kept]
RIGHT += [distributions]
RIGHT += [compiled_between_layers, checkpointed_pairs, containers_that_come_back]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
@pytest.mark.parametrize(
    ("loss", "schedule"),
    covering.each(RIGHT, ["1f1b", "zb", "zbv"]),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_losses_that_are_right(loss: Loss, schedule: str) -> None:
    model = Model(params(), loss, rows)
    wanted = model.trained(lambda f: zf.accumulate(f, 3), steps=2)
    found = zf.simulate(2)(
        lambda: model.trained(lambda f: zf.pipeline(f, 3, schedule, pipe=2), steps=2)
    )()
    for run in found:
        assert_near(run, wanted, 1e-9)


def test_a_distribution_says_what_is_out_of_range() -> None:
    model = Model(params(), a_distribution_out_of_range, rows)
    with pytest.raises((ValueError, zf.DesyncError), match="to satisfy the constraint"):
        zf.simulate(2)(lambda: model.trained(lambda f: zf.pipeline(f, 3, pipe=2), steps=1))()


def writing_to_arrays(p: Any, batch: Any) -> Tensor:
    x = torch.from_numpy(batch["x"]).mul_(0.5)
    x = through(p, x, lambda q, y: layer(q, y) + 0.1 * x)
    return end(x, {"y": torch.from_numpy(batch["y"])})


def arrays(i: int) -> Any:
    return {name: x.numpy() for name, x in rows(i).items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    ("loss", "batch"), [(writing_to_containers, rows), (writing_to_arrays, arrays)]
)
def test_losses_that_write_to_what_is_their_own(
    loss: Loss, batch: Callable[[int], Any], schedule: str
) -> None:
    model = Model(params(), loss, batch)
    wanted = model.trained(lambda f: zf.accumulate(f, 3), steps=2)
    for run in zf.simulate(2)(
        lambda: model.trained(lambda f: zf.pipeline(f, 3, schedule, pipe=2), steps=2)
    )():
        assert_near(run, wanted, 1e-9)


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("kind", [Pair, UserDict, dict])
def test_batches_of_another_length(kind: Any) -> None:
    """What they are made of is looked into: arrays, dataclasses, kinds of dicts."""

    def batch(i: int) -> Any:
        made = rows(i, 24 if i == 0 else 12)
        return kind(**({k: x.numpy() for k, x in made.items()} if kind is dict else made))

    def loss(p: Any, batch: Any) -> Tensor:
        x, y = vars(batch).values() if kind is Pair else (batch["x"], batch["y"])
        return base(p, {"x": torch.as_tensor(x), "y": torch.as_tensor(y)})

    model = Model(params(), loss, batch)
    wanted = model.trained(lambda f: zf.accumulate(f, 3), steps=3)
    for run in zf.simulate(2)(
        lambda: model.trained(lambda f: zf.pipeline(f, 3, pipe=2), steps=3)
    )():
        assert_near(run, wanted, 1e-9)


def test_what_is_remembered_of_numbers_that_change_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is rehearsed anew ends where it would have."""
    monkeypatch.setattr(pipelining_stage, "REMEMBERED", 3)

    def batch(i: int) -> Any:
        return {**rows(i), "factor": 1.0 + i % 5}

    def loss(p: Any, batch: Any) -> Tensor:
        return base(p, batch) * batch["factor"]

    model = Model(params(), loss, batch)

    def run() -> Any:
        step = zf.pipeline(zf.train_step(loss, TX), 3, pipe=2)
        state = step.place(zf.TrainState.create(params(), TX))
        losses = []
        for i in range(7):
            state, metrics = step(state, batch(i))
            losses.append(metrics)
        memo = step._memo()
        assert len(memo["rehearsed"]) == len(memo["messages"]) == 3
        return losses, step.unplace(state).params

    losses, state = model.trained(lambda f: zf.accumulate(f, 3), steps=7)
    for found in zf.simulate(2)(run)():
        assert_near(found, (losses, state.params), 1e-9)


# What stages cannot do


def in_a_loop(p: Any, batch: Any) -> Tensor:
    return end(through(p, through(p, batch["x"])), batch)


def from_the_last_to_the_first(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for each in reversed([*p["blocks"], *p["more"]]):
        x = zf.layer(layer, each, x)
    return end(x, batch)


def another_layers_weight(p: Any, batch: Any) -> Tensor:
    other = p["blocks"][0]
    return end(through(p, batch["x"], lambda q, x: layer(q, x) + x @ other["w"]), batch)


def penalties_of_layers(p: Any, batch: Any) -> Tensor:
    return base(p, batch) + sum(each["w"].square().sum() for each in p["blocks"])


def nothing(p: Any, batch: Any) -> None:
    """The line that returns was forgotten."""


def a_gradient_in_the_loss(p: Any, batch: Any) -> Tensor:
    w = p["first"]["w"]
    (grad,) = torch.autograd.grad((batch["x"] @ w).square().mean(), w, create_graph=True)
    return base(p, batch) + grad.square().sum()


def value_and_grad_in_the_loss(p: Any, batch: Any) -> Tensor:
    _, grad = zf.value_and_grad(lambda w, x: (x @ w).square().mean())(p["first"]["w"], batch["x"])
    return base(p, batch) + grad.square().sum()


def a_branch_on_numbers(p: Any, batch: Any) -> Tensor:
    x = zf.scan(layer, p["blocks"], batch["x"])
    return end(zf.scan(layer, p["more"], x * 2 if x.max() > 0 else x), batch)


def layers_by_the_batch(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for i, each in enumerate(p["blocks"]):
        x = x if i == 1 and batch["x"][0, 0] == rows(0)["x"][0, 0] else zf.layer(layer, each, x)
    return end(zf.scan(layer, p["more"], x), batch)


def a_number_of_a_layer(p: Any, batch: Any) -> Tensor:
    x, total = batch["x"], 0.0
    for each in (*p["blocks"], *p["more"]):
        x, number = zf.layer(lambda q, x: (layer(q, x), float(x.detach().sum())), each, x)
        total += number
    return end(x, batch) * total


def a_number_of_the_batch_from_a_layer(p: Any, batch: Any) -> Tensor:
    x, total, many = batch["x"], 0.0, float(batch["x"].sum())
    for each in (*p["blocks"], *p["more"]):
        x, number = zf.layer(lambda q, x: (layer(q, x), many), each, x)
        total += number
    return end(x, batch) * total


class Seen:
    def __init__(self, many: int) -> None:
        self.many = many


class Side(enum.Enum):
    LEFT, RIGHT = 0, 1


def a_value_of_a_layer(made: Callable[[Tensor], Any], read: Callable[[Any], float]) -> Loss:
    def loss(p: Any, batch: Any) -> Tensor:
        x, total = batch["x"], 0.0
        for each in (*p["blocks"], *p["more"]):
            x, value = zf.layer(lambda q, x: (layer(q, x), made(x.detach())), each, x)
            total += read(value)
        return end(x, batch) * total

    return loss


def writing_to_the_batch(p: Any, batch: Any) -> Tensor:
    batch["x"].mul_(0.5)
    return base(p, batch)


@dataclass
class Total:
    value: Tensor


def filling(fill: Callable[[Any, Tensor], None], made: Callable[[], Any]) -> Loss:
    """A loss of which each layer changes what it is given."""

    def fn(q: Any, x: Tensor, kept: Any) -> Tensor:
        y = layer(q, x)
        fill(kept, y.square().mean())
        return y

    def loss(p: Any, batch: Any) -> Tensor:
        x, kept = batch["x"], made()
        for each in (*p["blocks"], *p["more"]):
            x = zf.layer(fn, each, x, kept)
        return end(x, batch) + (kept.value if type(kept) is Total else sum(tree.leaves(kept)))

    return loss


def adds_to_the_first(kept: Any, x: Tensor) -> None:
    kept[0] = kept[0] + x


def adds_to_a_field(kept: Any, x: Tensor) -> None:
    kept.value = kept.value + x


def renames(kept: Any, x: Tensor) -> None:
    name, value = kept.popitem()
    kept[name + "'"] = value


def a_table_of_layers(p: Any, batch: Any) -> Tensor:
    """Each layer counts in one tensor of the loss, which others read."""
    count, x = torch.zeros((), dtype=F64), batch["x"]
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(lambda q, x: layer(q, x) * (1 + 0.1 * count.add_(1)), each, x)
    return end(x, batch)


def hooks_of_parameters(p: Any, batch: Any) -> Tensor:
    scale = p["s"] * 2
    scale.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return end(through(p, batch["x"], lambda q, x: layer(q, x) * scale), batch)


def a_memo_of_the_first_layer(p: Any, batch: Any) -> Tensor:
    kept: dict[str, Tensor] = {}

    def fn(q: Any, x: Tensor) -> Tensor:
        if "first" not in kept:
            kept["first"] = x.tanh()
        return layer(q, x) + kept["first"]

    return end(through(p, batch["x"], fn), batch)


def hooks_of_arguments(p: Any, batch: Any) -> Tensor:
    p["s"].register_hook(torch.sign)
    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(lambda q, x, s: layer(q, x) * s, each, x, p["s"])
    return end(x, batch)


KEPT = torch.zeros(6, dtype=F64)


def read_first_and_written_last(p: Any, batch: Any) -> Tensor:
    """An average of what comes last, which the next microbatch begins with."""
    x = through(p, batch["x"] - KEPT)
    KEPT.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return end(x, batch)


def read_by_the_first_layer(p: Any, batch: Any) -> Tensor:
    x = batch["x"]
    for each in (*p["blocks"], *p["more"]):
        x = zf.layer(lambda q, x: layer(q, x) - KEPT, each, x)
    last = p["more"][1]
    return end(zf.layer(lambda q, x: layer(q, x) - KEPT.copy_(x.detach().mean(0)), last, x), batch)


def writing_to_views_of_arguments(p: Any, batch: Any) -> Tensor:
    x, mask = batch["x"], torch.zeros_like(batch["x"])
    for each in (*p["blocks"], *p["more"]):
        x, part = zf.layer(lambda q, x, m: (layer(q, x) + m, m[:, :3]), each, x, mask)
        part.add_(1.0)
    return end(x, batch)


def halves(kept: Any, x: Tensor) -> None:
    kept *= 0.5


FILLED = "changes a list, dict, set, array or dataclass that it was given"
WRONG: list[tuple[Loss, str]] = [
    (in_a_loop, "example= of a batch"),
    (from_the_last_to_the_first, "example= of a batch"),
    (another_layers_weight, r"blocks\.0\.w is a parameter of layer blocks\.0"),
    (penalties_of_layers, r"read outside of its call"),
    (nothing, "no layer runs in this loss"),
    (a_gradient_in_the_loss, "no stage has the whole way"),
    (value_and_grad_in_the_loss, r"value_and_grad was called within a loss"),
    (a_branch_on_numbers, "it looks at its numbers"),
    (layers_by_the_batch, "in the place of layer .* zf.drop_layers does it"),
    (a_number_of_a_layer, "What depends on numbers is to be a tensor"),
    (a_number_of_the_batch_from_a_layer, "What depends on numbers is to be a tensor"),
    (a_value_of_a_layer(lambda x: (x > 0).numpy().sum(), int), "is to be a tensor"),
    (a_value_of_a_layer(lambda x: x.numpy().copy(), np.mean), "is to be a tensor"),
    (a_value_of_a_layer(lambda x: Side(int(x.max() > 1)), lambda e: e.value), "is to be a tensor"),
    (a_value_of_a_layer(lambda x: None if (x > 2).any() else 1.0, bool), "is to be a tensor"),
    (
        a_value_of_a_layer(lambda x: slice(int((x > 0).sum())), lambda s: s.stop),
        "is to be a tensor",
    ),
    (a_value_of_a_layer(lambda x: math.nan if (x > 2).any() else 0, float), "is to be a tensor"),
    (a_value_of_a_layer(lambda x: Seen(int((x > 0).sum())), lambda s: s.many), "is to be a tensor"),
    (a_value_of_a_layer(lambda x: {int((x > 0).sum()): 1}, min), "in other containers"),
    (writing_to_the_batch, r"x\.clone\(\)"),
    (filling(list.append, list), FILLED),
    (filling(adds_to_the_first, lambda: [torch.zeros((), dtype=F64)]), FILLED),
    (filling(adds_to_a_field, lambda: Total(torch.zeros((), dtype=F64))), FILLED),
    (filling(halves, lambda: np.ones(1)), FILLED),
    (filling(lambda kept, x: kept.add(len(kept)), set), FILLED),
    (hooks_of_parameters, "stages 0, 1 of the pipeline have a part of the gradient each"),
    (hooks_of_arguments, "stages 0, 1 of the pipeline have a part of the gradient each"),
    (read_first_and_written_last, "writes to a tensor that stage 0 reads, for the next"),
    (read_by_the_first_layer, "writes to a tensor that stage 0 reads, for the next"),
    (a_memo_of_the_first_layer, "a value that layer .* has kept"),
    (a_table_of_layers, "a value that layer .* has kept"),
    (writing_to_views_of_arguments, r"let the layer return x\.clone\(\)"),
    (filling(renames, lambda: {"a": torch.zeros((), dtype=F64)}), FILLED),
]


@pytest.mark.parametrize(("loss", "text"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_losses_that_are_refused(loss: Loss, text: str) -> None:
    model = Model(params(), loss, rows)
    with pytest.raises(zf.CompositionError, match=text):
        zf.simulate(2, timeout=20)(
            lambda: model.trained(lambda f: zf.pipeline(f, 3, pipe=2), steps=1)
        )()


def test_statistics_that_a_loss_keeps_between_layers() -> None:
    """Each stage has those of its own layers; those of others are as they were, and tensors."""
    model = Model(params(), base, rows)

    def run(wrap: Callable[..., Any]) -> list[Tensor]:
        kept = [torch.zeros(6, dtype=F64) for _ in range(6)]

        def loss(p: Any, batch: Any) -> Tensor:
            x = batch["x"]
            for i, each in enumerate([*p["blocks"], *p["more"]]):
                x = zf.layer(layer, each, x)
                kept[i].mul_(0.9).add_(x.detach().mean(0))
            return end(x, batch)

        replace(model, loss=loss).trained(wrap, steps=2)
        return kept

    wanted = run(lambda f: zf.accumulate(f, 3))
    found = zf.simulate(2)(lambda: run(lambda f: zf.pipeline(f, 3, pipe=2)))()
    for i, (x, one, two) in enumerate(zip(wanted, *found, strict=True)):
        assert type(one) is type(two) is Tensor
        mine, other = (one, two) if i < 3 else (two, one)
        assert torch.equal(mine, x)
        assert torch.equal(other, x) if i == 2 else not other.any()  # what is sent both have


def test_a_loss_that_writes_to_a_tensor_of_the_users() -> None:
    """The rehearsal puts it back; with several chunks on a stage it would be written to twice."""

    def run(wrap: Callable[..., Any]) -> Any:
        mean, var = torch.zeros(6, dtype=F64), torch.ones(6, dtype=F64)

        def loss(p: Any, batch: Any) -> Tensor:
            x = F.batch_norm(batch["x"], mean, var, training=True)
            return base(p, {**batch, "x": x}) + (mean * p["s"]).sum()

        return Model(params(), loss, rows).trained(wrap, steps=2), mean

    wanted = run(lambda f: zf.accumulate(f, 3))
    for found in zf.simulate(2)(lambda: run(lambda f: zf.pipeline(f, 3, pipe=2)))():
        assert_near(found, wanted, 1e-9)
    with pytest.raises(zf.CompositionError, match=r"batch_norm at .* each of the 2 chunks"):
        zf.simulate(2)(lambda: run(lambda f: zf.pipeline(f, 3, "zbv", pipe=2)))()
