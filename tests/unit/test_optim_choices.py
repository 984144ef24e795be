"""A mask or a label that no leaf of the whole tree meets is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim, tree

PARAMS = {
    "blocks": zf.Layers([{"w": torch.ones(2, 2), "bias": torch.ones(2)} for _ in range(3)]),
    "head": torch.ones(2, 1),
}


def wrong(path: str) -> bool:
    return path.endswith(".weight")


def right(path: str) -> bool:
    return path.endswith(".w")


def labelled(name: str) -> Callable[[str], str]:
    return lambda path: name if right(path) else "rest"


MASKED: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda mask: optim.adamw(0.1, mask=mask),
    "lamb": lambda mask: optim.lamb(0.1, weight_decay=0.1, mask=mask),
    "lion": lambda mask: optim.lion(0.1, weight_decay=0.1, mask=mask),
    "add_decayed_weights": lambda mask: optim.add_decayed_weights(0.1, mask),
    "masked": lambda mask: optim.masked(optim.sgd(0.1), mask),
}


def said_by(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in met]


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_without_leaves(name: str) -> None:
    none = tree.map(lambda p: False, PARAMS)
    for mask in (wrong, none):
        tx = MASKED[name](mask)
        with pytest.warns(UserWarning, match=rf"{name}: .* none of the 7 .*'blocks\.0\.bias'"):
            zf.TrainState.create(PARAMS, tx)
        assert said_by(lambda tx=tx: zf.TrainState.create(PARAMS, tx)) == []  # once
    for mask in (right, {"blocks": True, "head": False}, lambda path: True):
        assert said_by(lambda mask=mask: zf.TrainState.create(PARAMS, MASKED[name](mask))) == []


def test_a_label_without_leaves() -> None:
    kinds = {"fast": optim.sgd(0.1), "rest": optim.sgd(0.2)}
    found = said_by(
        lambda: zf.TrainState.create(PARAMS, optim.multi_transform(kinds, lambda path: "rest"))
    )
    assert len(found) == 1 and "the label 'fast' is that of none of the 7" in found[0]
    good = optim.multi_transform(kinds, labelled("fast"))
    assert said_by(lambda: zf.TrainState.create(PARAMS, good)) == []


def test_inside_of_others() -> None:
    """Where a part of the leaves has no value, all of them count."""
    inner = {"fast": optim.adamw(0.1, mask=lambda path: path == "head"), "rest": optim.sgd(0.1)}
    fine = optim.chain(
        optim.clip_by_global_norm(1.0), optim.multi_transform(inner, labelled("fast"))
    )
    assert said_by(lambda: zf.TrainState.create(PARAMS, fine)) == []
    inner["fast"] = optim.adamw(0.1, mask=wrong)
    found = said_by(
        lambda: zf.TrainState.create(
            PARAMS, optim.skip_nonfinite(optim.multi_transform(inner, labelled("fast")))
        )
    )
    assert len(found) == 1 and "adamw: the mask chooses none of the 7" in found[0]


def test_frozen_leaves_count() -> None:
    """A mask is often written for the whole model, and then used on a part of it."""
    tx = optim.adamw(0.1, mask=right)
    assert said_by(lambda: zf.TrainState.create(PARAMS, tx, trainable=lambda p: p == "head")) == []


def test_nobody_judges_by_a_sample_or_a_part() -> None:
    decayed = optim.adamw(0.1, mask=right)
    users = optim.GradientTransformation(decayed.init, decayed.update)  # is tried on a sample
    step = zf.shard(zf.train_step(loss, users), stage=3, unit_bytes=8)

    def run() -> float:
        state = step.place(zf.TrainState.create(PARAMS, users))
        state, metrics = step(state, torch.ones(2, 2))
        part = tree.select(state.params, lambda path: path == "head")
        optim.adamw(0.1, mask=right).init(part)
        return float(metrics["loss"])

    assert said_by(zf.simulate(2)(run)) == []


def loss(params: Any, x: Any) -> Any:
    out = zf.scan(lambda p, x: torch.tanh(x @ p["w"] + p["bias"]), params["blocks"], x)
    return (out @ params["head"]).square().mean()


def test_one_rank_speaks_for_all() -> None:
    def run() -> Any:
        return zf.TrainState.create(PARAMS, optim.adamw(0.1, mask=wrong)).step

    assert len(said_by(zf.simulate(3)(run))) == 1
    placed = zf.shard(zf.train_step(loss, optim.sgd(0.1)), stage=3)

    def later() -> Any:  # of a tree that is cut already: its leaves are known
        state = placed.place(zf.TrainState.create(PARAMS, optim.sgd(0.1)))
        optim.adamw(0.1, mask=right).init(state.params)
        return optim.adamw(0.1, mask=wrong).init(state.params)

    assert len(said_by(zf.simulate(2)(later))) == 1


def test_functions_that_know_some_leaves_only() -> None:
    known = {"head": True}
    tx = optim.multi_transform(
        {"fast": optim.adamw(0.1, mask=lambda path: known[path]), "rest": optim.sgd(0.1)},
        lambda path: "fast" if path == "head" else "rest",
    )
    assert said_by(lambda: zf.TrainState.create(PARAMS, tx)) == []
    tx = optim.masked(optim.sgd(0.1), {"head": True})
    with pytest.raises(zf.PlacementError, match="says nothing about the leaf 'blocks"):
        zf.TrainState.create(PARAMS, tx)
