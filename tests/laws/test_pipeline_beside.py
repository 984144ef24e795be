"""What a loss and a state may be beside ``pipeline``: uneven means, frozen leaves, adapters."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same, numbers
from tests.laws.models import block, mean_square
from tests.laws.pipelines import F64, TX, Model, rows, stack, stack_loss
from zfunc import tree

PLACES = [
    (2, 1, 0, "1f1b"), (2, 2, 3, "zb"), (2, 2, 1, "zbv"), (3, 1, 2, "interleaved"), (2, 2, 0, "zb"),
]  # fmt: skip


def uneven(params: Any, batch: Any) -> Any:
    """A mean over tokens, of which each microbatch has another number, one of them none."""
    x = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
    squares = (x @ params["head"]["w"] + params["head"]["b"] - batch["y"]).square()
    return zf.Mean((squares * batch["w"]).sum(), batch["w"].sum())


def weighted(i: int) -> Any:
    weights = (torch.arange(24)[:, None] % (3 + i) > 0).double()
    weights[:6] = 0
    return {**rows(i), "w": weights}


def adapters() -> Any:
    params = stack()
    for i, p in enumerate(params["blocks"]):
        p["down"], p["up"] = numbers((6, 2), 50 + i, F64), numbers((2, 6), 70 + i, F64)
    return params


def adapted(p: Any, x: Tensor) -> Tensor:
    return block({**p, "w": p["w"] + p["down"] @ p["up"]}, x)


def adapted_loss(params: Any, batch: Any) -> Tensor:
    x = zf.scan(adapted, params["blocks"], block(params["first"], batch["x"]))
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def of(which: Callable[[str], bool], model: Any = stack_loss, params: Any = None) -> Model:
    return Model(params or stack(), model, rows, more={"trainable": which})


def unused_loss(params: Any, batch: Any) -> Tensor:
    """A leaf in the middle of a layer, and one outside, that nobody uses."""
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]) + x, params["blocks"], batch["x"])
    return mean_square(x @ params["head"]["w"], batch["y"])


MODELS: dict[str, tuple[Model, int]] = {
    "uneven tokens": (Model(stack(), uneven, weighted), 4),
    "uneven microbatches": (Model(stack(), uneven, weighted), 5),
    "adapters": (of(lambda x: x.endswith(("up", "down")), adapted_loss, adapters()), 4),
    "adapters of the last layer": (
        of(lambda x: x in ("blocks.5.up", "blocks.5.down"), adapted_loss, adapters()),
        4,
    ),
    "the first layer": (of(lambda x: x.startswith(("first", "blocks.0"))), 4),
    "the last layer": (of(lambda x: x.startswith(("head", "blocks.5"))), 4),
    "the head": (of(lambda x: x.startswith("head")), 4),
    "one leaf": (of(lambda x: x == "blocks.3.b"), 4),
    "unused leaves": (Model(stack(), unused_loss, rows), 4),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_beside_stages(name: str, place: tuple[int, int, int, str]) -> None:
    (model, m), (pipe, data, stage, schedule) = MODELS[name], place

    def wrap(f: Any) -> Any:
        mesh = zf.mesh(data=data, pipe=pipe)
        return zf.shard(zf.pipeline(f, m, schedule=schedule, mesh=mesh), stage=stage)

    wanted = model.trained(lambda f: zf.shard(zf.accumulate(f, m), stage=0))
    found = zf.simulate(pipe * data)(lambda: model.trained(wrap, local=True))()
    for run in found:
        assert_same(run, found[0])
        if data == 1:
            assert_same(run, wanted)
        else:
            assert_near(run, wanted, 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv"])
def test_all_ranks_are_told_the_same(schedule: str) -> None:
    """Loss, metrics and what is returned beside them, to the last bit."""

    def loss(params: Any, batch: Any) -> Any:
        x = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
        out = x @ params["head"]["w"] + params["head"]["b"]
        aux = {"size": out.abs().mean(), "largest": [out.max()], "rows": 3, "name": "aux"}
        return mean_square(out, batch["y"]), aux

    def wrap(f: Any) -> Any:
        mesh = zf.mesh(data=2, pipe=2)
        return zf.shard(zf.pipeline(f, 4, schedule=schedule, mesh=mesh), stage=1)

    model = Model(stack(), loss, rows)
    found = zf.simulate(4)(lambda: model.trained(wrap, local=True, has_aux=True))()
    wanted = model.trained(lambda f: zf.accumulate(f, 4), has_aux=True)
    for run in found:
        assert_same(run, found[0])
    assert found[0][0][0].keys() == wanted[0][0].keys()
    assert all(
        abs(float(mine["loss"] - theirs["loss"])) < 1e-9
        for mine, theirs in zip(found[0][0], wanted[0], strict=True)
    )


class Size(enum.IntEnum):
    SMALL, LARGE = 0, 1


def values(batch: Any) -> Any:
    """Numbers of a batch, which the rehearsal of the first one does not know."""
    x = batch["x"]
    more = Size(int(x[0, 0] > 0)), x.numpy().sum(), complex(float(x.max()), 2)
    return {"count": int((x > 0).sum()), "mean": float(x.mean()), "any": bool(x[0, 1] > 0)}, more


def on_two_stages(call: Any, given: Any) -> list[Any]:
    def body() -> list[Any]:
        placed = call.place(given)
        return [call(placed, rows(i)) for i in range(3)]

    return zf.simulate(2)(body)()


def test_numbers_beside_a_loss_are_those_of_its_batch() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return stack_loss(params, batch), values(batch)

    def fn(state: Any, batch: Any) -> Any:
        (_, aux), _ = zf.value_and_grad(loss, has_aux=True)(state.params, batch)
        return state, aux

    step = zf.pipeline(fn, 4, pipe=2)

    def body() -> Any:
        state = step.place(zf.TrainState.create(stack(), TX))
        return [step(state, rows(i))[1] for i in range(3)]

    wanted = [values({"x": rows(i)["x"][18:]}) for i in range(3)]
    for found in zf.simulate(2)(body)():
        assert found == wanted
        assert tree.map(type, found) == tree.map(type, wanted)
    assert wanted[0] != wanted[1]


def test_a_statistic_as_long_as_a_part_has_rows() -> None:
    """Of 24 rows in three parts."""

    def fn(params: Any, batch: Any) -> Any:
        out = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
        return out, out.mean(0).repeat(2)[:8]

    wanted = [fn(stack(), rows(i)) for i in range(3)]
    for found in on_two_stages(zf.pipeline(zf.evaluate(fn), 3, pipe=2), stack()):
        assert_near(found, wanted, 1e-12)


@pytest.mark.parametrize("by_rows", [False, True])
def test_numbers_that_are_evaluated_are_those_of_their_batch(by_rows: bool) -> None:
    def fn(params: Any, batch: Any) -> Any:
        out = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
        return (out if by_rows else out.mean()), values(batch)

    for found in on_two_stages(zf.pipeline(zf.evaluate(fn), 3, pipe=2), stack()):
        assert [each[1] for each in found] == [values(rows(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda x: None if x.sum() > 6 else x.sum(), r"returns \d values, and \d in the rehearsal"),
        (lambda x: x[x > 0], r"a result of shape \[\d+\], and one of shape \[\d+\] in the reh"),
    ],
)
def test_what_others_do_not_wait_for_is_refused(value: Any, text: str) -> None:
    def fn(params: Any, batch: Any) -> Any:
        return stack_loss(params, batch), value(batch["x"])

    with pytest.raises((zf.CompositionError, zf.DesyncError), match=text):
        on_two_stages(zf.pipeline(zf.evaluate(fn), 3, pipe=2), stack())


@pytest.mark.parametrize("value", [lambda n: f"{n} rows", lambda n: n << 70])
def test_what_cannot_be_told_is_refused_on_all_ranks(value: Callable[[int], Any]) -> None:
    def fn(params: Any, batch: Any) -> Any:
        return stack_loss(params, batch), value(int((batch["x"] > 0).sum()))

    predict = zf.pipeline(zf.evaluate(fn), 3, pipe=2)

    def body() -> str:
        placed = predict.place(stack())
        predict(placed, rows(0))
        with pytest.raises(zf.CompositionError) as raised:
            predict(placed, rows(1))
        predict(placed, rows(0))
        return str(raised.value)

    for told in zf.simulate(2)(body)():
        assert "result 1 of the last stage of a pipeline was" in told
