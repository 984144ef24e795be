"""Rules for gradients that are not averaged yet: which optimizer uses which, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.cases import Case, assert_same, train
from tests.laws.covering import each
from tests.laws.models import CASES
from tests.laws.zero_one import wrapped as in_zero_one
from zfunc import optim, tree
from zfunc.trees.reduction import Reduction

F64 = torch.float64
STACK = CASES["stack"]
HOW: dict[str, Any] = {"weight_decay": 0.1, "mask": lambda path: path != "head.b"}

WHERE: dict[str, Callable[[Any], Any]] = {
    "alone": lambda tx: tx,
    "chained last": lambda tx: optim.chain(optim.clip_by_global_norm(0.5), tx),
    "chained first": lambda tx: optim.chain(tx, optim.ema(0.5)),
    "masked": lambda tx: optim.masked(tx, lambda path: path != "head.b"),
    "by label": lambda tx: optim.multi_transform(
        {"a": tx, "b": optim.sgd(0.1)}, lambda path: "b" if path == "head.b" else "a"
    ),
    "guarded": lambda tx: optim.skip_nonfinite(tx),
}


def onebit(case: Case, tx: Any, freeze: int = 2) -> Any:
    return zf.compress_grads(zf.shard(case.step(tx), stage=0, unit_bytes=600), freeze_step=freeze)


def run_of(step: Any, tx: Any, steps: int = 5, ranks: int = 2) -> Any:
    """Metrics and the full state, of all ranks the same."""

    def body() -> Any:
        metrics, state = train(step, step.place(STACK.state(tx, F64)), STACK, steps)
        return metrics, step.unplace(state)

    return zf.simulate(ranks)(body)()[0]


RULES = {
    "adamw": (optim.adamw(0.02, **HOW), optim.onebit_adam(0.02, **HOW)),
    "adamw by 0/1": (optim.adamw(0.02, **HOW), optim.zero_one_adam(0.02, **HOW)),
    "lamb": (optim.lamb(0.02, **HOW), optim.onebit_lamb(0.02, **HOW)),
}


@pytest.mark.parametrize(("where", "name"), each(WHERE, RULES))
def test_an_optimizer_is_its_rule_under_compression(where: str, name: str) -> None:
    tx, rule = RULES[name]
    named, plain = WHERE[where](rule), WHERE[where](tx)
    found = run_of(onebit(STACK, named), named)
    assert int(found[1].aux["compress_grads"]["count"]) == 5
    assert_same(found, run_of(onebit(STACK, plain), plain))


@pytest.mark.parametrize(
    ("tx", "rule"), RULES.values(), ids=["onebit_adam", "zero_one_adam", "onebit_lamb"]
)
@pytest.mark.parametrize("stage", [None, 0, 2])
def test_a_rule_is_its_optimizer_without_compression(tx: Any, rule: Any, stage: int | None) -> None:
    def step(tx: Any) -> Any:
        return STACK.step(tx) if stage is None else zf.shard(STACK.step(tx), stage=stage)

    ranks = 1 if stage is None else 2
    if stage is None:
        runs = [train(step(x), STACK.state(x, F64), STACK, 3) for x in (tx, rule)]
        assert_same(*runs)
    else:
        assert_same(run_of(step(rule), rule, 3, ranks), run_of(step(tx), tx, 3, ranks))


def test_adamw_is_0_1_adam_where_ranks_go_their_own_ways() -> None:
    rule = optim.zero_one_adam(0.02, **HOW)
    plain = optim.adamw(0.02, **HOW)
    found = run_of(in_zero_one(STACK, rule), rule, 20)
    assert_same(found, run_of(in_zero_one(STACK, plain), plain, 20))


def test_1_bit_adam_says_that_its_ranks_go_together() -> None:
    tx = optim.onebit_adam(0.02)
    with pytest.raises(zf.CompositionError, match=r"works with optim\.adam"):
        run_of(in_zero_one(STACK, tx), tx, 1)


# An optimizer of a user's own


def signs(lr: float, seen: list[str]) -> optim.GradientTransformation:
    """Steps of the signs of gradients; where these are local, of what half of them sums to."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append("plain")
        return tree.map(lambda g: -lr * g.sign(), grads), state

    def unreduced(grads: Any, state: Any, params: Any) -> Any:
        seen.append("rule")
        halves = zf.reduced(tree.map(zf.linear_map(lambda g: g / 2), grads))
        return tree.map(lambda g: -lr * (2 * g).sign(), halves), state

    return optim.GradientTransformation(
        lambda params: optim.EmptyState(),
        update,
        unreduced=lambda: optim.GradientTransformation(
            lambda params: optim.EmptyState(), unreduced, checked=True
        ),
    )


@pytest.mark.parametrize("where", WHERE)
def test_a_rule_of_ones_own_is_used_wherever_it_stands(where: str) -> None:
    seen: list[str] = []
    tx = WHERE[where](signs(0.01, seen))
    run_of(onebit(STACK, tx), tx, 3)
    assert seen and set(seen) == {"rule"}
    seen.clear()
    run_of(zf.shard(STACK.step(tx), stage=0), tx, 1)
    assert seen and set(seen) == {"plain"}


def test_where_nothing_freezes_optimizers_are_given_means() -> None:
    seen: list[str] = []
    tx = signs(0.01, seen)
    run_of(zf.compress_grads(zf.shard(STACK.step(tx), stage=0), "int8"), tx, 2)
    assert seen and set(seen) == {"plain"}


def test_without_a_rule_gradients_are_reduced_first() -> None:
    """Bitwise what ``zf.reduced`` before the update gives, with errors kept."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        assert not any("Unreduced" in type(x).__name__ for x in tree.leaves(grads))
        return tree.map(lambda g: -0.1 * g, grads), state

    tx = optim.GradientTransformation(lambda params: optim.EmptyState(), update)
    linear = optim.GradientTransformation(
        lambda params: optim.EmptyState(),
        lambda grads, state, params: (tree.map(lambda g: -0.1 * g, zf.reduced(grads)), state),
        checked=True,
    )
    assert_same(run_of(onebit(STACK, tx), tx), run_of(onebit(STACK, linear), linear))


@pytest.mark.parametrize("name", ["reduce", "settle", "own_step"])
def test_a_transform_that_overrides_what_moved_is_told_so(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*has no such member.*Reduction"):
        type("Mine", (zf.Transform,), {name: lambda self, *args: args[0]})


def test_an_average_of_ones_own_is_what_optimizers_ask() -> None:
    """A transform needs no more than a ``Reduction``; one that does nothing changes nothing."""
    asked: list[tuple[str, Any]] = []

    class Noted(Reduction):
        freezes = True

        def reduce(self, tree: Any, momentum: bool = False) -> Any:
            asked.append(("reduce", momentum))
            return tree

        def settle(self, old: Any, new: Any, decay: float | None = None) -> Any:
            asked.append(("settle", decay))
            return new

    @dataclass(frozen=True)
    class Noting(zf.Transform):
        def configure(self, running: Any, state: Any) -> None:
            running.reduction = Noted()

    for tx, expected in (
        (optim.sgd(0.1, momentum=0.9), {("reduce", True), ("reduce", False)}),
        (optim.adamw(0.1, b2=0.5), {("reduce", False), ("settle", 0.5)}),
    ):
        asked.clear()
        noted = zf.transform_of(Noting)(STACK.step(tx))
        found = train(noted, noted.place(STACK.state(tx, F64)), STACK, 2)
        assert set(asked) == expected
        assert_same(found, train(STACK.step(tx), STACK.state(tx, F64), STACK, 2))
