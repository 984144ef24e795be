"""Which layers stages have: by the work on an example, by sizes, or as somebody chose."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zfunc as zf
from tests.laws.cases import assert_same
from tests.laws.models import block, dense, mean_square
from tests.laws.pipelines import F64, TX, Model, rows, stack, stack_loss
from zfunc.ranks.transfers import TensorSpec
from zfunc.schedules.partition import balanced_cuts

OFTEN = (1, 1, 1, 1, 4, 6)  # how often each layer runs its product


def often(p: Any, x: Tensor, many: int) -> Tensor:
    for _ in range(many):
        x = block(p, x)
    return x


def uneven(params: Any, batch: Any) -> Tensor:
    x = block(params["first"], batch["x"])
    for layer, many in zip(params["blocks"], OFTEN, strict=True):
        x = zf.layer(often, layer, x, many)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def backwards(params: Any, batch: Any) -> Tensor:
    """The layers run from the last to the first."""
    x = block(params["first"], batch["x"])
    for layer, many in zip(reversed(list(params["blocks"])), OFTEN, strict=True):
        x = zf.layer(often, layer, x, many)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def shapes(batch: Any) -> Any:
    return zf.tree.map(lambda x: torch.empty_like(x, device="meta"), batch)


def specs(batch: Any) -> Any:
    return {key: TensorSpec(tuple(x.shape), x.dtype) for key, x in batch.items()}


def trained(loss: Callable[..., Tensor], **how: Any) -> tuple[list[Any], str]:
    """What ranks end with, and what the first of them says of its step."""
    model = Model(stack(), loss, rows)

    def body() -> Any:
        found: list[Any] = []

        def wrap(f: Any) -> Any:
            found.append(zf.pipeline(f, 4, **{"pipe": 2, **how}))
            return found[0]

        return model.trained(wrap, 4), found[0].describe()

    runs = zf.simulate(2)(body)()
    return [run for run, _ in runs], runs[0][1]


def layers_of(said: str) -> list[str]:
    return re.findall(r"stage \d: (.*?); ", said)


@pytest.mark.parametrize("given", [lambda x: x, shapes, specs])
@pytest.mark.parametrize("loss", [uneven, backwards])
def test_an_example_balances_by_flops(given: Callable[..., Any], loss: Any) -> None:
    runs, said = trained(loss, example=given(rows(0)))
    ends = balanced_cuts(FLOPS, 2)
    names = [f"blocks.{i}" for i in (range(6) if loss is uneven else range(5, -1, -1))]
    wanted = [names[a:b] for a, b in itertools.pairwise(ends)]
    found = [" to ".join({x[0]: 0, x[-1]: 0}) for x in (sorted(part) for part in wanted)]
    assert layers_of(said) == found and ends != (0, 3, 6)
    assert "partition by the FLOPs of an example" in said and "differs by up to 0.0 points" in said
    alone = Model(stack(), loss, rows).trained(lambda f: zf.accumulate(f, 4), 4)
    for run in runs:
        assert_same(run, alone)


def counted() -> tuple[int, ...]:
    """FLOPs of each layer, counted by torch; what comes first and last is with its neighbour."""
    params, x = stack(), rows(0)["x"]
    found = []
    for layer, many in zip(params["blocks"], OFTEN, strict=True):
        with FlopCounterMode(display=False) as counter:
            often(layer, x, many)
        found.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        block(params["first"], x)
    found[0] += counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        x @ params["head"]["w"]
    found[-1] += counter.get_total_flops()
    return tuple(found)


FLOPS = counted()


def test_without_an_example_it_says_by_how_much_the_first_batch_differs() -> None:
    _, said = trained(uneven)
    assert layers_of(said) == ["blocks.0 to blocks.2", "blocks.3 to blocks.5"]
    first = 100 * sum(FLOPS[:3]) / sum(FLOPS)
    sizes = 100 * (3 * 36) / (6 * 36 + 6)
    assert "by the elements of matrices (for FLOPs give example=)" in said
    assert f"expected work of stages: {sizes:.1f}, {100 - sizes:.1f} %" in said
    assert f"first batch: {first:.1f}, {100 - first:.1f} %" in said
    assert f"differs by up to {sizes - first:.1f} points" in said


def test_cuts_and_parameters_are_what_they_were_asked_to_be() -> None:
    for how, names in (
        ({"partition": [0, 1, 6], "example": rows(0)}, ["blocks.0", "blocks.1 to blocks.5"]),
        ({"partition": "parameters"}, ["blocks.0 to blocks.2", "blocks.3 to blocks.5"]),
    ):
        assert layers_of(trained(uneven, **how)[1]) == names


class Text(nn.Module):
    """A large table, and a head."""

    def __init__(self, words: int, head: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 4), nn.Linear(4, head)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.last = nn.Linear(4, head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for each in self.blocks:
            x = x + torch.tanh(each(x))
        return self.last(x)


def said_of(module: nn.Module, **how: Any) -> str:
    model = zf.functionalize(module.double())
    params = model.params

    def loss(p: Any, ids: Tensor) -> Tensor:
        return model.apply(p, ids).square().mean()

    def body() -> str:
        step = zf.pipeline(zf.train_step(loss, TX), 2, pipe=2, **how)
        state = step.place(zf.TrainState.create(params, TX))
        step(state, torch.arange(8) % 3)
        return step.describe()

    return zf.simulate(2)(body)()[0]


def test_heads_count_and_tables_do_not() -> None:
    assert layers_of(said_of(Text(1000, 2))) == ["blocks.0 to blocks.1", "blocks.2 to blocks.3"]
    assert layers_of(said_of(Text(3, 100))) == ["blocks.0 to blocks.2", "blocks.3"]
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    assert layers_of(said_of(Text(3, 100), example=ids)) == ["blocks.0 to blocks.2", "blocks.3"]
    assert layers_of(said_of(Text(3, 2), example=ids)) == layers_of(said_of(Text(1000, 2)))


class Row(nn.Module):
    """Layers by their letters: of one letter one layer, several times; ``.`` has no parameters."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        made = {one: nn.Linear(4, 4) for one in sorted({*letters} - {"."})}
        self.blocks = nn.ModuleList(nn.Tanh() if one == "." else made[one] for one in letters)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = x + each(x)
        return x


def of_row(letters: str, measure: bool = True, **how: Any) -> tuple[Tensor, Tensor, list[str]]:
    """The loss of a second step on two stages and on one process, and the layers of the stages."""
    torch.manual_seed(0)
    model = zf.functionalize(Row(letters).double(), units="blocks.*")
    params, x = model.params, torch.randn(8, 4, dtype=F64)

    def loss(p: Any, x: Tensor) -> Tensor:
        return model.apply(p, x).square().mean()

    def body(wrap: Any) -> Any:
        step = wrap(zf.train_step(loss, TX))
        state, _ = step(step.place(zf.TrainState.create(params, TX)), x)
        return step(state, x)[1]["loss"], step.describe()

    how |= {"example": x} if measure else {}
    runs = zf.simulate(2)(body)(lambda step: zf.pipeline(step, 4, pipe=2, **how))
    return runs[0][0], body(lambda step: zf.accumulate(step, 4))[0], layers_of(runs[0][1])


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("letters", ["aabc", "aabb", ".a.b", "abbb", "ab.."])
def test_layers_that_are_one_and_layers_of_nothing(letters: str, measure: bool) -> None:
    loss, alone, stages = of_row(letters, measure=measure)
    assert torch.equal(loss, alone)
    assert len(stages) == 2


def test_what_runs_between_two_calls_of_a_layer_is_not_cut_off() -> None:
    loss, alone, stages = of_row("abac")
    assert torch.equal(loss, alone)
    assert stages == ["blocks.0 to blocks.1", "blocks.3"]


@pytest.mark.parametrize(
    ("letters", "how", "text"),
    [
        ("aaaa", {"measure": False}, r"4 layers \(zf.Layers\), which are enough for 1 "),
        ("a...", {"measure": False}, r"4 layers \(zf.Layers\), which are enough for 1 "),
        ("abab", {}, r"4 layers \(zf.Layers\), which are enough for 1 .* between two calls"),
        ("aabc", {"partition": [0, 1, 2], "measure": False}, "must go from 0 to 4"),
        ("abaa", {"partition": [0, 2, 4]}, "gives chunk 1 the layers from 2 up to 4, and those"),
        ("ab..", {"partition": [0, 2, 4]}, "no parameters of their own"),
    ],
)
def test_chunks_without_parameters(letters: str, how: Any, text: str) -> None:
    with pytest.raises((zf.PlacementError, zf.CompositionError), match=text):
        of_row(letters, **how)


def test_init_and_restore_keep_to_the_example(tmp_path: Path) -> None:
    def step_of(**how: Any) -> Any:
        return zf.pipeline(zf.train_step(uneven, TX), 4, "1f1b", pipe=2, **how)

    def full() -> Any:
        return zf.TrainState.create(stack(), TX, key=7)

    def save() -> Any:
        step = step_of()
        state, _ = step(step.place(full()), rows(0))
        zf.save(tmp_path, state)
        return step.unplace(state)

    def restore() -> Any:
        step = step_of(example=shapes(rows(0)))
        state = zf.restore(tmp_path, step.init(full))
        return step.unplace(state), layers_of(step.describe())

    wanted = zf.simulate(2)(save)()[0]
    for found, names in zf.simulate(2)(restore)():
        assert_same(found, wanted)
        assert names == layers_of(trained(uneven, example=rows(0))[1]) != ["blocks.0 to blocks.2"]


def test_beside_tensor_and_data() -> None:
    from tests.laws import split_steps
    from tests.laws.test_pipeline import deep

    def body() -> Any:
        batch = split_steps.batch(0, rows=12)
        split = zf.split(zf.train_step(split_steps.loss_of, TX), rules=split_steps.RULES)
        staged = zf.pipeline(split, 2, example=batch)
        step = zf.shard(staged, stage=1, mesh=zf.mesh(pipe=2, data=2, tensor=2))
        state = step.place(zf.TrainState.create(deep(), TX))
        return step(state, step.local_batch(batch))[1]["loss"], step.describe()

    alone = zf.accumulate(zf.train_step(split_steps.loss_of, TX), 2)
    state = alone.place(zf.TrainState.create(deep(), TX))
    wanted = alone(state, split_steps.batch(0, rows=12))[1]["loss"]
    for loss, said in zf.simulate(8)(body)():
        assert abs(loss - wanted) < 1e-9
        assert "by the FLOPs of an example" in said


@pytest.mark.parametrize(
    ("example", "error"),
    [
        ({"x": rows(0)["x"]}, KeyError),
        (3, TypeError),
        ({**rows(0), "x": rows(0)["x"][:, :5]}, RuntimeError),
    ],
)
def test_an_example_that_does_not_fit(example: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        trained(uneven, example=example)


def test_examples_that_differ_between_ranks() -> None:
    def body() -> None:
        example = rows(0, 24 + 4 * zf.rank())
        step = zf.pipeline(zf.train_step(uneven, TX), 4, pipe=2, example=example)
        step.place(zf.TrainState.create(stack(), TX))

    with pytest.raises(zf.PlacementError, match="example of the same shapes"):
        zf.simulate(2)(body)()


def test_steps_that_cannot_come_to_their_loss() -> None:
    def none(state: Any, batch: Any) -> Any:
        return state, {}

    def breaks(state: Any, batch: Any) -> Any:
        return zf.value_and_grad(stack_loss)(state.params, batch["z"])

    def body(fn: Any) -> None:
        step = zf.pipeline(fn, 4, pipe=2, example=rows(0))
        step.place(zf.TrainState.create(stack(), TX))

    for fn, text in ((none, "never called"), (breaks, "raised KeyError on the example")):
        with pytest.raises(zf.CompositionError, match=text):
            zf.simulate(2)(body)(fn)


def test_gradients_that_each_stage_sums() -> None:
    said = trained(stack_loss)[1]
    one = sum(x.numel() for x in zf.tree.leaves(dense(10, F64)))
    assert "gradients that a rank of each stage sums before it reduces them: " in said
    found = re.search(r"sums before it reduces them: ([\d,]+), ([\d,]+) bytes", said)
    assert found is not None
    numbers = [int(x.replace(",", "")) for x in found.groups()]
    assert all(n >= 3 * one * 8 for n in numbers)
