"""Laws 1 and 3 to 6: round trip, commutation, identity, purity, donation, composition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, Case, alone, assert_same, cut_up, numbers, regression, train
from tests.laws.handwritten import CASES as HAND_WRITTEN
from tests.laws.models import CASES as READY_MADE
from tests.laws.models import forward, stack, stack_loss
from zfunc import optim, tree

F64 = torch.float64
STAGES = (0, 1, 2, 3)
STACK = READY_MADE["stack"]
SOME = {
    name: {**READY_MADE, **HAND_WRITTEN}[name]
    for name in (
        "stack",
        "tiny leaves",
        "frozen",
        "strided",
        "keys of all kinds",
        "gan",
        "the head",
    )
}


def odd_values(state: Any) -> Any:
    """The state with numbers of which only a copy of the bits is right."""
    special = torch.tensor([float("nan"), -0.0, float("inf"), 1e-310, 3.0], dtype=F64)

    def salted(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        out = x.detach().clone().contiguous()
        out.view(-1)[: special.numel()] = special[: out.numel()].to(x.dtype)
        return out

    return tree.map(salted, state)


@pytest.mark.parametrize("name", SOME)
def test_round_trip_is_bitwise(name: str) -> None:
    """Before training and after it; nothing that was given is shared or changed."""
    case = SOME[name]
    full = odd_values(case.state(ADAMW, F64))
    if isinstance(full, zf.TrainState):
        full = full.replace(
            aux={"seen": torch.arange(3), "gap": None, "n": 4}, key=zf.random.key(9)
        )
    before = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, full)

    def body(stage: int) -> Any:
        step = zf.shard(case.step(ADAMW), stage=stage, unit_bytes=600, roles=case.roles)
        placed = step.place(full)
        back = step.unplace(placed)
        for leaf in tree.leaves(placed):
            if isinstance(leaf, Tensor):
                leaf.zero_()  # had it shared memory with the full state, that would show
        return back

    for ranks in (1, 2, 3):
        for stage in STAGES:
            for back in zf.simulate(ranks)(body)(stage):
                assert_same(back, before, f"stage {stage} on {ranks} ranks")
    assert_same(full, before, "the input")


@pytest.mark.parametrize("name", [name for name in SOME if name != "strided"])
def test_one_rank_changes_nothing(name: str) -> None:
    """Bitwise, where leaves are contiguous: others are laid out anew, and so added up anew."""
    case = SOME[name]
    reference = alone(case)
    for stage in STAGES:
        for run in cut_up(case, 1, stage=stage):
            assert_same(run, reference, f"stage {stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_transforms_commute(stage: int) -> None:
    """Whatever the order of wrapping, it is the same step; donating changes no bit."""

    def wraps() -> list[Callable[[Any], Any]]:
        return [
            lambda f: zf.shard(zf.donate(f), stage=stage),
            lambda f: zf.donate(zf.shard(f, stage=stage)),
            lambda f: zf.shard(f, stage=stage),
            lambda f: zf.shard(stage=stage)(zf.donate()(f)),
        ]

    full = STACK.state(ADAMW, F64)

    def body(i: int) -> Any:
        step = wraps()[i](STACK.step(ADAMW))
        metrics, state = train(step, step.place(full), STACK, 4)
        return metrics, step.unplace(state)

    runs = [zf.simulate(3)(body)(i) for i in range(4)]
    for run in runs[1:]:
        assert_same(run, runs[0])
    bare = STACK.step(ADAMW)
    assert zf.shard(zf.donate(bare), stage=stage) == zf.donate(zf.shard(bare, stage=stage))


@pytest.mark.parametrize("name", SOME)
def test_a_step_is_pure(name: str) -> None:
    """Twice the same call gives the same bits, and leaves its input as it was."""
    case = SOME[name]
    full = case.state(ADAMW, F64)

    def body(stage: int) -> None:
        step = zf.shard(case.step(ADAMW), stage=stage, roles=case.roles)
        batch = zf.local_batch(case.batch(0, F64))
        state, _ = step(step.place(full), batch)  # moments that are not zero
        kept = [x.clone() for x in tree.leaves(state) if isinstance(x, Tensor)]
        first, second = step(state, batch), step(state, batch)
        assert_same(step.unplace(first[0]), step.unplace(second[0]))
        assert_same(first[1], second[1])
        for x, y in zip(tree.leaves(state), kept, strict=False):
            assert torch.equal(x, y)

    for stage in STAGES:
        zf.simulate(2)(body)(stage)
    step = case.step(ADAMW)
    assert_same(step(full, case.batch(0, F64)), step(full, case.batch(0, F64)))


def uses(step: Any) -> dict[str, Callable[[Any], Any]]:
    """Everything that one can do with a state."""
    batch = regression(0, F64, rows=4)
    return {
        "step": lambda s: step(s, batch),
        "place": step.place,
        "unplace": step.unplace,
        "full": zf.full,
        "full params": lambda s: zf.full(s.params),
        "map": lambda s: tree.map(lambda p: p + 1, s.params),
        "map beside another": lambda s: tree.map(torch.add, s.params, stack(F64)),
        "map_leaves": lambda s: tree.map_leaves(lambda path, p: p, s.params),
        "whole": lambda s: tree.whole(lambda p: p, s.params),
        "global_norm": lambda s: tree.global_norm(s.params),
        "leaf_norms": lambda s: tree.leaf_norms(s.opt_state),
        "get": lambda s: tree.get(s.params, "blocks.1.w"),
        "set": lambda s: tree.set(s.params, "head.b", torch.zeros(1, dtype=F64)),
        "flatten_names": lambda s: tree.flatten_names(s.params),
        "value_and_grad": lambda s: zf.value_and_grad(stack_loss)(s.params, batch),
        "evaluate": lambda s: zf.evaluate(forward)(s.params, batch["x"]),
        "item": lambda s: s.params["head"]["w"] + 1,
    }


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_donated_state_is_spent(stage: int | None) -> None:
    def body() -> None:
        step = zf.donate(STACK.step(ADAMW))
        step = step if stage is None else zf.shard(step, stage=stage)
        old = step.place(STACK.state(ADAMW, F64))
        new, _ = step(old, zf.local_batch(regression(0, F64)))
        for name, use in uses(step).items():
            if name == "item" and stage in (None, 0, 1, 2):
                continue  # a plain tensor, of which nothing is left to be read
            with pytest.raises(zf.DonatedStateError, match=r"donated.*that the step returned"):
                use(old)
        step(new, zf.local_batch(regression(1, F64)))

    zf.simulate(1 if stage is None else 2)(body)()


def test_donation_leaves_what_the_next_state_keeps() -> None:
    """Parts that pass through a donating step, and full copies made before it, stay valid."""
    case = HAND_WRITTEN["the head"]

    def body(stage: int) -> None:
        step = zf.donate(zf.shard(case.step(ADAMW), stage=stage))
        state = step.place(case.state(ADAMW, F64))
        copy = zf.full(state)
        for i in range(3):
            state, _ = step(state, zf.local_batch(case.batch(i, F64)))
        end = step.unplace(state)
        assert_same(end["params"]["blocks"], copy["params"]["blocks"])
        assert not torch.equal(end["params"]["head"]["w"], copy["params"]["head"]["w"])

    for stage in STAGES:
        zf.simulate(3)(body)(stage)


def test_memory_is_reused_where_it_is_donated() -> None:
    def pointers(state: Any) -> set[int]:
        return {
            x.untyped_storage().data_ptr()
            for x in tree.leaves((state.params, state.opt_state))
            if x.numel() > 1
        }

    def body(stage: int) -> None:
        step = zf.donate(zf.shard(STACK.step(ADAMW), stage=stage))
        state = step.place(STACK.state(ADAMW, F64))
        before = pointers(state)
        for i in range(3):
            state, _ = step(state, zf.local_batch(regression(i, F64)))
        assert pointers(state) == before

    for stage in STAGES:
        zf.simulate(2)(body)(stage)


def test_two_leaves_in_one_memory_are_not_overwritten() -> None:
    """A bare donating step on a state in which a tensor stands twice."""
    tx = optim.adamw(0.1)
    params = {"w": numbers((6, 1), 1)}

    def loss(p: Any, batch: Any) -> Tensor:
        return (batch["x"] @ p["w"]).square().mean()

    def run(donated: bool) -> Any:
        shared = tree.map(torch.clone, params)
        state = zf.TrainState.create(shared, tx, aux={"start": shared})
        step = zf.donate(zf.train_step(loss, tx)) if donated else zf.train_step(loss, tx)
        return step(state, regression(0, F64))

    assert_same(run(True), run(False))


def test_compositions_that_mean_nothing_raise_when_wrapping() -> None:
    step = STACK.step(ADAMW)
    for wrap in (lambda f: zf.shard(f, stage=1), zf.donate):
        with pytest.raises(zf.CompositionError, match="already"):
            wrap(zf.donate(zf.shard(step)))  # type: ignore[operator]


def test_an_error_in_the_loss_leaves_nothing_behind() -> None:
    """The same step on the same state works after a call that failed."""
    reference = cut_up(STACK, 2, stage=3, steps=1)

    def broken(params: Any, batch: Any) -> Tensor:
        value = stack_loss(params, batch)
        if batch.get("bad"):
            raise ZeroDivisionError("on purpose")
        return value

    case = Case(STACK.state, lambda tx: zf.train_step(broken, tx), regression)

    def body() -> Any:
        step = zf.shard(case.step(ADAMW), stage=3)
        state, batch = step.place(case.state(ADAMW, F64)), zf.local_batch(regression(0, F64))
        with pytest.raises(ZeroDivisionError):
            step(state, {**batch, "bad": True})
        new, metrics = step(state, batch)
        return [metrics], step.unplace(new)

    for run, expected in zip(zf.simulate(2)(body)(), reference, strict=True):
        assert_same(run, expected)
