"""What a loss and a state may be beside ``pipeline``: uneven means, frozen leaves, adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import assert_near, assert_same, numbers
from tests.laws.models import block, mean_square
from tests.laws.pipelines import F64, Model, rows, stack, stack_loss

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
