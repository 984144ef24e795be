"""What a loss does with parameters outside of the calls of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.pipelines import Model, rows
from tests.laws.test_pipeline_state import Stack, made
from zfunc.errors import CompositionError
from zfunc.trees.nodes import NAMESPACE

Leaves = Callable[[Any], list[Any]]

WAYS: dict[str, Leaves] = {
    "torch": torch.utils._pytree.tree_leaves,
    "optree": lambda p: optree.tree_leaves(p, namespace=NAMESPACE),
    "by hand": lambda p: [p["head"]["weight"], *(x["linear"]["weight"] for x in p["blocks"])],
}
SCHEDULES = ("1f1b", "zb", "zbv")


def with_parameters(of: Callable[[list[Any]], Any]) -> Callable[[str], Model]:
    def make(way: str) -> Model:
        model = made(Stack)
        return Model(model.params, lambda p, batch: model.loss(p, batch) + of(WAYS[way](p)), rows)

    return make


counted = with_parameters(lambda leaves: sum(x.numel() + len(x.shape) for x in leaves) / 100)
penalised = with_parameters(lambda leaves: sum(x.square().sum() for x in leaves))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_shapes_of_all_parameters(way: str, schedule: str) -> None:
    wanted = counted(way).trained(lambda f: zf.accumulate(f, 4))

    def run() -> Any:
        return counted(way).trained(lambda f: zf.pipeline(f, 4, pipe=2, schedule=schedule))

    for found in zf.simulate(2)(run)():
        assert_near(found, wanted, 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_layers_are_refused(way: str, schedule: str) -> None:
    """No stage has them all."""

    def run() -> Any:
        return penalised(way).trained(lambda f: zf.pipeline(f, 4, pipe=2, schedule=schedule))

    with pytest.raises(CompositionError, match=r"is a parameter of layer blocks\.0, and is read"):
        zf.simulate(2)(run)()


def with_norm(part: str | None) -> Model:
    model = made(Stack)

    def loss(p: Any, batch: Any) -> Any:
        return model.loss(p, batch) * (1 + zf.tree.global_norm(p[part] if part else p))

    return Model(model.params, loss, rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_norm_of_what_is_outside_of_layers(schedule: str) -> None:
    wanted = with_norm("head").trained(lambda f: zf.accumulate(f, 4))

    def run() -> Any:
        return with_norm("head").trained(lambda f: zf.pipeline(f, 4, pipe=2, schedule=schedule))

    for found in zf.simulate(2)(run)():
        assert_near(found, wanted, 1e-9)


def test_a_norm_of_all_parameters_is_refused() -> None:
    def run() -> Any:
        return with_norm(None).trained(lambda f: zf.pipeline(f, 4, pipe=2))

    with pytest.raises(CompositionError, match=r"is a parameter of layer blocks\.0, and is read"):
        zf.simulate(2)(run)()
