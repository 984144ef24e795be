"""What people write in steps, and which modules, schedules and cuts they give: the numbers of one
process, or an error that says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import assert_near
from tests.laws.layered import base, end, layer, layers_twice, params, through
from tests.laws.pipelines import F64, TX, Model, rows, stack, stack_loss
from zfunc import optim, tree
from zfunc.engine.unit_runs import UnitRun


def updated(state: Any, grads: Any) -> Any:
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    new = optim.apply_updates(state.params, updates)
    return state.replace(params=new, opt_state=opt_state, step=state.step + 1)


def two_losses(state: Any, batch: Any) -> Any:
    def other(p: Any, batch: Any) -> Tensor:
        return 0.5 * layers_twice(p, batch) + p["s"].square().sum()

    first, grads = zf.value_and_grad(base)(state.params, batch)
    second, more = zf.value_and_grad(other)(state.params, batch)
    return updated(state, tree.map(torch.add, grads, more)), (first, second)


def with_a_teacher(state: Any, batch: Any) -> Any:
    """One that is evaluated before, and is no part of what is differentiated."""
    wanted = zf.evaluate(lambda p, batch: through(p, batch["x"]))(state.params, batch)

    def once(p: Any, batch: Any) -> Tensor:
        x = through(p, layer(p["first"], batch["x"]))
        return end(x, batch) + (x - batch["wanted"]).square().mean()

    value, grads = zf.value_and_grad(once)(state.params, {**batch, "wanted": wanted})
    return updated(state, grads), value


def reading_the_state(state: Any, batch: Any) -> Any:
    def loss(p: Any, batch: Any) -> Tensor:
        return base(p, batch) + state.params["s"].square().sum()

    value, grads = zf.value_and_grad(loss)(state.params, batch)
    return updated(state, grads), value


def evaluating_within(state: Any, batch: Any) -> Any:
    def loss(p: Any, batch: Any) -> Tensor:
        wanted = zf.evaluate(lambda q, x: through(q, x))(state.params, batch["x"])
        return base(p, batch) + wanted.mean()

    value, grads = zf.value_and_grad(loss)(state.params, batch)
    return updated(state, grads), value


def a_second_tree(state: Any, batch: Any) -> Any:
    def loss(p: Any, batch: Any, teacher: Any) -> Tensor:
        return base(p, batch) + through(teacher, batch["x"]).mean()

    value, grads = zf.value_and_grad(loss)(state.params, batch, state.params)
    return updated(state, grads), value


def run(fn: Any, wrap: Callable[..., Any]) -> Any:
    step = wrap(fn)
    state = step.place(zf.TrainState.create(params(), TX))
    out = []
    for i in range(2):
        state, metrics = step(state, rows(i))
        out.append(metrics)
    return out, step.unplace(state).params


@pytest.mark.parametrize("fn", [two_losses, with_a_teacher])
def test_steps_that_are_right(fn: Any) -> None:
    wanted = run(fn, lambda f: zf.accumulate(f, 3))
    for found in zf.simulate(2)(run)(fn, lambda f: zf.pipeline(f, 3, "zb", pipe=2)):
        assert_near(found, wanted, 1e-9)


@pytest.mark.parametrize("data", [1, 2])
def test_a_pass_has_no_units_of_other_stages(data: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch costs a stage the layers that it has, however many there are."""
    made: list[Any] = []
    init = UnitRun.__post_init__

    def counted(run: UnitRun) -> None:
        made.append(run.owner)
        init(run)

    monkeypatch.setattr(UnitRun, "__post_init__", counted)

    def rank() -> int:
        mesh = zf.mesh(data=data, pipe=4)
        step = zf.shard(zf.pipeline(zf.train_step(stack_loss, TX), 4, mesh=mesh), stage=1)
        state = step.place(zf.TrainState.create(stack(16), TX))
        units = len(state.params.layout.units)
        step(state, step.local_batch(rows(0, 16)))
        return units

    (units, *_) = zf.simulate(4 * data)(rank)()
    of_passes = Counter(map(id, made))
    assert len(of_passes) >= 4 * data * 4
    assert sum(n > units // 2 for n in of_passes.values()) <= 4 * data  # one of each rank's step


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (reading_the_state, r"a placed tree from outside, state\.params"),
        (evaluating_within, "Evaluate it before"),
        (a_second_tree, "a second placed tree"),
    ],
)
@pytest.mark.parametrize(("data", "stage"), [(1, 0), (2, 3)])
def test_steps_that_are_refused(fn: Any, text: str, data: int, stage: int) -> None:
    def wrap(f: Any) -> Any:
        return zf.shard(zf.pipeline(f, 3, mesh=zf.mesh(data=data, pipe=2)), stage=stage)

    with pytest.raises(zf.CompositionError, match=text):
        zf.simulate(2 * data, timeout=20)(run)(fn, wrap)


def sequence() -> nn.Module:
    """Layers without parameters at the beginning, in the middle and at the end."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Tanh(), *(x for _ in range(4) for x in (nn.Linear(6, 6), nn.GELU())))
    return made.double()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("example", [None, {"x": torch.empty(24, 6, device="meta", dtype=F64)}])
def test_layers_without_parameters(schedule: str, example: Any) -> None:
    model = zf.functionalize(sequence())
    full = model.params

    def loss(p: Any, batch: Any) -> Tensor:
        return model.apply(p, batch["x"]).square().mean()

    case = Model(full, loss, rows)
    wanted = case.trained(lambda f: zf.accumulate(f, 3), steps=2)
    how = {"schedule": schedule, "pipe": 2, "example": example}
    for found in zf.simulate(2)(
        lambda: case.trained(lambda f: zf.pipeline(f, 3, **how), steps=2)
    )():
        assert_near(found, wanted, 1e-9)


def test_a_module_that_two_stages_would_share() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.blocks[3] = self.blocks[0]

        def forward(self, x: Tensor) -> Tensor:
            for each in self.blocks:
                x = torch.tanh(each(x))
            return x

    model = zf.functionalize(Sharing().double())

    def loss(p: Any, batch: Any) -> Tensor:
        return model.apply(p, batch["x"]).square().mean()

    case = Model(model.params, loss, rows)
    with pytest.raises(zf.CompositionError, match=r"layer blocks\.0, of stage 0 .* has one stage"):
        zf.simulate(2)(lambda: case.trained(lambda f: zf.pipeline(f, 3, pipe=2)))()


def test_fewer_layers_and_schedules_that_cannot_run() -> None:
    """What is wrong with a schedule is said before anything runs: at once where it is a value."""
    from zfunc.schedules.in_turn import one_f_one_b

    def placed(schedule: Any) -> None:
        step = zf.pipeline(zf.train_step(base, TX), 3, schedule, pipe=2)
        zf.simulate(2)(lambda: step.place(zf.TrainState.create(params(), TX)))()

    good = one_f_one_b(2, 3)
    row = good.actions[1]
    stuck = zf.Schedule(good.rank_of, 3, (good.actions[0], (row[1], row[0], *row[2:])))
    twice = zf.Schedule(good.rank_of, 3, (good.actions[0], (*row, row[0])))
    short = zf.Schedule(good.rank_of, 3, (good.actions[0], row[:-1]))
    for schedule, text in (
        (stuck, "waits for ever"),
        (twice, "twice"),
        (short, "missing"),
        (one_f_one_b(2, 4), "4 microbatches"),
        (lambda ranks, n: 3, "returns int"),
    ):
        with pytest.raises(zf.errors.ScheduleError, match=text):
            placed(schedule)


@pytest.mark.parametrize(("schedule", "text"), [("1f2b", "there is no schedule"), (3, "is no sch")])
@pytest.mark.parametrize("pipe", [1, 2])
def test_what_is_no_schedule_is_refused_at_once(schedule: Any, text: str, pipe: int) -> None:
    """On one rank, too, which follows none."""
    with pytest.raises(zf.errors.ScheduleError, match=text):
        zf.pipeline(zf.train_step(base, TX), 3, schedule, pipe=pipe)
