"""``value_and_grad`` of placed trees and plain tensors together: soft prompts beside a model.

Law: the loss and all gradients are those of the plain tree in one process; those of plain leaves
are plain, and the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import numbers
from tests.laws.models import forward, stack
from zfunc import optim, tree
from zfunc.layout.freezing import freeze

F64 = torch.float64
TX = optim.sgd(0.1, momentum=0.9)
BATCH = {"x": numbers((11, 6), 1), "y": numbers((11, 1), 2)}
PROMPT = {
    "table": numbers((3, 6), 3),
    "more": zf.Layers([{"s": numbers((6,), 4 + i), "unused": numbers((2,), 8)} for i in range(2)]),
}


def loss(both: Any, batch: Any) -> zf.Mean:
    x = batch["x"] + both["prompt"]["table"].mean(0)
    x = zf.scan(lambda p, x: x * p["s"].cos(), both["prompt"]["more"], x)
    error = (forward(both["model"], x) - batch["y"]).square()
    return zf.Mean(error.sum(), len(x))


def tuned(state: Any, batch: Any) -> Any:
    """A step that trains the model by the optimizer, and the prompt by hand."""
    both = {"model": state.params, "prompt": state.aux["prompt"]}
    value, grads = zf.value_and_grad(loss)(both, batch)
    updates, opt_state = TX.update(grads["model"], state.opt_state, state.params)
    prompt = tree.map(lambda p, g: p - 0.1 * g, state.aux["prompt"], grads["prompt"])
    new = state.replace(
        params=optim.apply_updates(state.params, updates),
        opt_state=opt_state,
        step=state.step + 1,
        aux={**state.aux, "prompt": prompt},
    )
    return new, {"loss": value}


def start() -> zf.TrainState:
    return zf.TrainState.create(stack(F64), TX, key=7, aux={"prompt": PROMPT})


def run(wrap: Callable[[Any], Any], ranks: int, steps: int = 3) -> list[Any]:
    step = wrap(tuned)

    def body() -> Any:
        with step:
            state = step.place(start())
            for _ in range(steps):
                state, metrics = step(state, zf.local_batch(BATCH))
            assert all(type(x) is Tensor for x in tree.leaves(state.aux["prompt"]))
            full = step.unplace(state)
            return full.params, full.aux["prompt"], metrics["loss"]

    found: list[Any] = zf.simulate(ranks)(body)()
    return found


def alone() -> Any:
    state = start()
    for _ in range(3):
        state, metrics = tuned(state, BATCH)
    return state.params, state.aux["prompt"], metrics["loss"]


def same(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    optree.tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance),
        a, b, namespace=tree.NAMESPACE,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_equals_one_process(stage: int, ranks: int) -> None:
    for outcome in run(lambda f: zf.shard(f, stage=stage, unit_bytes=600), ranks):
        same(outcome, alone())


@pytest.mark.parametrize("stage", [0, 3])
def test_under_other_transforms(stage: int, tmp_path: Path) -> None:
    def sharded(f: Any) -> Any:
        return zf.shard(f, stage=stage, unit_bytes=600)

    wraps: list[Callable[[Any], Any]] = [
        lambda f: zf.donate(sharded(f)),
        lambda f: zf.remat(sharded(f)),
        lambda f: zf.offload(sharded(f), to="disk", path=tmp_path),
    ]
    for wrap in wraps:
        for outcome in run(wrap, 2):
            same(outcome, alone())
    low = run(lambda f: zf.precision(sharded(f), reduce=torch.float64), 2)
    for outcome in low:
        same(outcome, alone(), 0.05)
    accumulated = run(lambda f: zf.accumulate(sharded(f), 2), 2)
    for outcome in accumulated:
        same(outcome, alone())


@pytest.mark.parametrize("method", ["int8", "onebit"])
def test_compression_leaves_plain_leaves_alone(method: str) -> None:
    """What is not in the state has no errors to be kept in."""
    wrapped = run(
        lambda f: zf.compress_grads(
            zf.shard(f, stage=3, unit_bytes=600), method=method, freeze_step=0
        ),
        2, steps=1,
    )  # fmt: skip
    _, grads = zf.value_and_grad(loss)({"model": stack(F64), "prompt": PROMPT}, BATCH)
    expected = tree.map(lambda p, g: p - 0.1 * g, PROMPT, grads["prompt"])
    for _, prompt, _ in wrapped:
        same(prompt, expected, 1e-9)


def test_frozen_and_missing_leaves() -> None:
    both = {"a": freeze(numbers((2,), 1)), "b": None, "c": numbers((2,), 2)}

    def step(state: Any, batch: Any) -> Any:
        def total(params: Any) -> Tensor:
            return (
                forward(params["model"], batch["x"]).mean()
                + (params["a"] * params["c"]).sum() * batch["x"].mean()
            )

        return state, zf.value_and_grad(total)({"model": state.params, **both})[1]

    sharded = zf.shard(step, stage=3)

    def body() -> Any:
        grads = sharded(sharded.place(start()), zf.local_batch({"x": BATCH["x"][:10]}))[1]
        return grads["a"], grads["b"], grads["c"]

    expected = numbers((2,), 1) * BATCH["x"][:10].mean()
    for a, b, c in zf.simulate(2)(body)():
        assert a is None and b is None
        torch.testing.assert_close(c, expected)


def test_ranks_with_other_plain_leaves_are_told() -> None:
    sharded = zf.shard(tuned, stage=3)

    def body() -> Any:
        state = sharded.place(start())
        prompt = {**PROMPT, "table": PROMPT["table"] + zf.rank()}
        return sharded(state.replace(aux={"prompt": prompt}), zf.local_batch(BATCH))

    with pytest.raises(zf.PlacementError, match=r"different plain params.*prompt\.table has other"):
        zf.simulate(3)(body)()


def test_what_cannot_be_differentiated_is_named() -> None:
    sharded = zf.shard(tuned, stage=3)
    for wrong, message in (
        (torch.ones(2, dtype=torch.int64), "has dtype torch.int64"),
        ("text", "has type str"),
    ):

        def body(wrong: Any = wrong) -> Any:
            state = sharded.place(start())
            prompt = {**PROMPT, "table": wrong}
            return sharded(state.replace(aux={"prompt": prompt}), zf.local_batch(BATCH))

        with pytest.raises(zf.PlacementError, match=rf"prompt\.table {message}"):
            zf.simulate(2)(body)()
