"""All ranks of a pipeline mean the same by it, and a state lies as its step runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import pytest

import zfunc as zf
from tests.laws.cases import assert_same
from tests.laws.pipelines import TX, rows, stack, stack_loss
from zfunc.errors import PlacementError

How = Mapping[str, Any]
Draw = Callable[[Any, Any], Any]


def _swapped(ranks: int, n: int) -> zf.Schedule:
    """gpipe of two stages, of which the second has the first chunk."""
    acts = [[(kind, i, k) for kind in "FB" for i in range(n)] for k in (1, 0)]
    return zf.Schedule((1, 0), n, tuple(map(tuple, acts)))


def _step(how: How, stage: int | None = None) -> Any:
    given = {"microbatches": 4, **how}
    axes = {"pipe": 2} if stage is None else {"mesh": zf.mesh(data=2, pipe=2)}
    step = zf.pipeline(zf.train_step(stack_loss, TX), **axes, **given)
    return step if stage is None else zf.shard(step, stage=stage)


def _state() -> Any:
    return zf.TrainState.create(stack(), TX, key=7)


def _all_told(world: int, fn: Callable[[], Any]) -> str:
    """The same error on all ranks."""

    def body() -> str:
        with pytest.raises(PlacementError) as told:
            fn()
        return str(told.value)

    found = set(zf.simulate(world)(body)())
    assert len(found) == 1, found
    return found.pop()


DIFFERENT = {
    "gap": ({"partition": [0, 3, 6]}, {"partition": [0, 4, 6]}, "partition: (0, 3, 6) and (0, 4"),
    "overlap": ({"partition": [0, 4, 6]}, {"partition": [0, 3, 6]}, "partition: (0, 4, 6) and"),
    "balance": ({}, {"partition": "parameters"}, "partition: 'flops' and 'parameters'"),
    "microbatches": ({}, {"microbatches": 2}, "microbatches: 4 and 2"),
    "schedule": ({}, {"schedule": "gpipe"}, "schedule: '1f1b' and 'gpipe'"),
    "own": ({"schedule": "gpipe"}, {"schedule": _swapped}, "schedule: 'gpipe' and its own"),
    "chunks": (
        {"schedule": "interleaved"},
        {"schedule": "interleaved", "chunks": 3},
        "chunks in all: 4 and 6",
    ),
    "example": ({}, {"example": rows(0)}, "example: not asked for and given"),
}


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_arguments_are_told_all(name: str, stage: int | None) -> None:
    first, other, text = DIFFERENT[name]
    world = 2 if stage is None else 4
    # The last rank alone differs: along pipe from the first one, or along data from its stage.
    told = _all_told(
        world, lambda: _step(other if zf.rank() == world - 1 else first, stage).place(_state())
    )
    assert f"ranks 0 and {world - 1} were given different arguments of pipeline: " in told
    assert text in told


def test_ranks_of_one_stage_have_one_partition() -> None:
    """At stage 0 nobody cuts along data, and sums of other layers may have the same sizes."""
    parts = {"partition": [0, 3, 6]}, {"partition": [0, 4, 6]}
    told = _all_told(4, lambda: _step(parts[zf.rank() % 2], 0).place(_state()))
    assert "ranks 0 and 1 were given different arguments of pipeline: partition" in told


@pytest.mark.parametrize("other", [{"partition": [0, 4, 6]}, {"microbatches": 2}])
def test_inference_asks_as_well(other: How) -> None:
    def apply(params: Any, x: Any) -> Any:
        return zf.scan(lambda p, x: x @ p["w"], params["blocks"], x)

    def body() -> None:
        how: dict[str, Any] = {"microbatches": 3, **(other if zf.rank() else {})}
        zf.pipeline(zf.evaluate(apply), pipe=2, **how).place(stack())

    assert "different arguments of pipeline" in _all_told(2, body)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("other", [{"microbatches": 2}, {"schedule": "gpipe"}])
def test_a_step_that_has_placed_nothing_asks_as_well(other: How, seen: bool) -> None:
    """Another step of the same layers takes the state over, and is another one on a rank."""

    def body() -> None:
        step = _step({})
        state = step.place(_state())
        if seen:
            state, _ = step(state, rows(0))
        _step(other if zf.rank() else {})(state, rows(0))

    assert "other arguments for the step, or of pipeline" in _all_told(2, body)


HOWS: dict[str, How] = {
    "1f1b": {},
    "zbv": {"schedule": "zbv"},
    "two chunks": {"schedule": "interleaved"},
    "three chunks": {"schedule": "interleaved", "chunks": 3},
    "swapped": {"schedule": _swapped},
}


@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize(("before", "after"), list(permutations(HOWS, 2)))
def test_a_state_of_other_owners_is_refused(before: str, after: str, stage: int | None) -> None:
    def body() -> None:
        state = _step(HOWS[before], stage).place(_state())
        step = _step(HOWS[after], stage)
        step(state, step.local_batch(rows(0)))

    told = _all_told(2 if stage is None else 4, body)
    assert "this state was placed by another step: its chunks lie on the stages" in told


def test_a_state_of_another_partition_runs_where_it_lies() -> None:
    def body(before: How, after: How) -> float:
        state = _step(before).place(_state())
        return float(_step(after)(state, rows(0))[1]["loss"])

    for after in ({"partition": [0, 2, 6]}, {"schedule": "zb"}):
        losses = zf.simulate(2)(body)({}, after)
        assert losses == zf.simulate(2)(body)({}, {})


def _noisy(draw: Draw, evaluated: bool = False) -> Draw:
    """A step that draws noise outside of its loss."""

    def noised(params: Any, batch: Any, noise: Any) -> Any:
        return stack_loss(params, {**batch, "x": batch["x"] + noise})

    def step(state: Any, batch: Any) -> Any:
        noise = draw(state, batch["x"])
        if evaluated:
            return state, zf.evaluate(noised)(state.params, batch, noise)
        loss, grads = zf.value_and_grad(noised)(state.params, batch, noise)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = zf.optim.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), loss

    return step


def _keyed(state: Any, x: Any) -> Any:
    return zf.random.normal(zf.random.fold_in(state.key, state.step), x.shape).double()


def _own(state: Any, x: Any) -> Any:
    return _keyed(state, x) + zf.rank()


def _own_later(state: Any, x: Any) -> Any:
    return _keyed(state, x) + zf.rank() * (state.step > 0)


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_a_step_draws_is_alike_on_all_stages(evaluated: bool) -> None:
    with pytest.raises(PlacementError, match="the step gave a loss other arguments on some"):
        zf.simulate(2)(_run_noisy)(_own, evaluated)


def test_what_differs_later_is_known_in_the_next_step() -> None:
    assert _all_told(2, lambda: _run_noisy(_own_later)).count("in the call before") == 1


def test_noise_of_a_shared_key_is_that_of_one_process() -> None:
    mine, other = zf.simulate(2)(_run_noisy)(_keyed)
    assert_same(mine, other)
    assert_same(mine, _run_noisy(_keyed, alone=True))


def _run_noisy(draw: Draw, evaluated: bool = False, alone: bool = False) -> Any:
    step: Any = _noisy(draw, evaluated)
    step = zf.accumulate(step, 4) if alone else zf.pipeline(step, 4, pipe=2)
    state, losses = step.place(_state()), []
    for i in range(3):
        state, loss = step(state, rows(i))
        losses.append(loss)
    return losses, step.unplace(state)
