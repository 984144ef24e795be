"""A step that is given a state of another optimizer says where, what is there, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim
from zfunc.errors import CompositionError

PARAMS = {"a": torch.ones(3), "b": torch.ones(2, 2)}
ADAM, SGD = optim.adam(0.1), optim.sgd(0.1)
LABELS = {"x": SGD, "y": ADAM}

# The state's optimizer, the step's, and what is said.
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "adam, sgd": (
        ADAM,
        SGD,
        r"opt_state is AdamState\(count, mu, nu\), but .* keeps (Sgd|Empty)State",
    ),
    "sgd, adam": (SGD, ADAM, r"opt_state is \w+\(.*keeps AdamState\(count, mu, nu\) there"),
    "adam, lion": (ADAM, optim.lion(0.1), r"opt_state is AdamState.*keeps LionState\("),
    "32 bits, 8": (ADAM, optim.adamw(0.1, moments=8), r"AdamState.*keeps MultiTransformState"),
    "8 bits, 32": (optim.adamw(0.1, moments=8), ADAM, r"MultiTransformState.*keeps AdamState"),
    "one of a chain": (
        optim.chain(optim.clip(1.0), ADAM),
        optim.chain(optim.clip(1.0), optim.lion(0.1)),
        r"opt_state\.1 is AdamState.*keeps LionState",
    ),
    "no chain": (ADAM, optim.chain(optim.clip(1.0), ADAM), r"AdamState.*keeps a tuple of 2"),
    "a leaf more": (
        optim.masked(ADAM, lambda path: path == "a"),
        optim.masked(ADAM, lambda path: True),
        r"opt_state\.inner_state\.mu\.b is nothing, but .* keeps (a leaf|f32\[2,2\])",
    ),
    "other labels": (
        optim.multi_transform(LABELS, lambda path: "x" if path == "a" else "y"),
        optim.multi_transform(LABELS, lambda path: "x" if path == "b" else "y"),
        r"opt_state\.inner_states\.[xy]\..*\.?[ab] is (nothing|a leaf|f32.*), but",
    ),
}


def after_one_step(made: Any, given: Any, stage: int | None) -> Any:
    step = zf.train_step(lambda p, x: p["a"].sum() * p["b"].sum() * x, given)
    step = step if stage is None else zf.shard(step, stage=stage)
    return step(step.place(zf.TrainState.create(PARAMS, made)), torch.ones(()))


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_it_says_what_is_there_and_what_should_be(name: str, stage: int | None) -> None:
    made, given, said = PAIRS[name]

    def run() -> None:
        with pytest.raises(CompositionError, match=f"{said}.*same optimizer, or begin"):
            after_one_step(made, given, stage)

    run() if stage is None else zf.simulate(2)(run)()


def test_errors_of_an_optimizer_of_your_own_are_its_own() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        raise TypeError("mine")

    tx = optim.GradientTransformation(lambda params: optim.EmptyState(), update)
    with pytest.raises(TypeError, match=r"^mine$"):
        after_one_step(tx, tx, None)
