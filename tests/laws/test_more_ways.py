"""Other ways to the same numbers: nested gradients, meshes, states made in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import (
    ADAMW,
    Case,
    alone,
    assert_like_alone,
    assert_near,
    assert_same,
    cut_up,
    regression,
    train,
)
from tests.laws.models import CASES, forward, mean_square, stack, stack_loss, trained
from zfunc import optim, tree

F64 = torch.float64
STACK = CASES["stack"]


def adapted_loss(params: Any, batch: Any) -> Tensor:
    """The loss after one step of descent, differentiated through that step."""
    _, grads = zf.value_and_grad(stack_loss)(params, batch)
    return stack_loss(tree.map(lambda p, g: p - 0.1 * g, params, grads), batch)


def test_a_gradient_within_a_loss() -> None:
    """It is the rank's own: on one rank the plain one, on several the same at every stage."""
    case = trained(stack, adapted_loss)
    reference = alone(case)
    for stage in range(4):
        assert_like_alone(cut_up(case, 1, stage=stage), reference, 1e-9)
    there = cut_up(case, 2, stage=0)
    for stage in (1, 2, 3):
        for run, expected in zip(cut_up(case, 2, stage=stage, unit_bytes=1), there, strict=True):
            assert_near(run, expected, 1e-9)


def test_layers_that_would_enter_inside_torch_func_say_what_to_do() -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        return torch.func.vmap(lambda x: forward(params, x[None]).sum())(batch["x"]).mean()

    case = trained(stack, loss)
    alone(case)
    for stage in (1, 3):
        with pytest.raises(zf.PlacementError, match=r"blocks.*torch\.func.*zf\.tree\.map"):
            cut_up(case, 2, stage=stage, steps=1)


def test_parameters_that_require_gradients_leave_no_graph_behind() -> None:
    """A module's own Parameters, and tensors like them, are starting values."""
    model = nn.Linear(6, 1).double()

    def loss(p: Any, batch: Any) -> Tensor:
        return mean_square(batch["x"] @ p["weight"].T + p["bias"], batch["y"])

    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for params in (dict(model.named_parameters()), plain):
        value, grads = zf.value_and_grad(loss)(params, regression(0, F64))
        assert not value.requires_grad and not any(g.requires_grad for g in tree.leaves(grads))
        for wrap in (lambda f: f, zf.donate, lambda f: zf.shard(f, stage=1)):
            step = wrap(zf.train_step(loss, ADAMW))
            state = step.place(zf.TrainState.create(params, ADAMW))
            for i in range(3):
                state, metrics = step(state, regression(i, F64))
            for x in tree.leaves((state, metrics)):
                assert not x.requires_grad
    state, _ = zf.train_step(loss, ADAMW)(zf.TrainState.create(plain, ADAMW), regression(0, F64))
    assert not any(x.requires_grad for x in tree.leaves(state))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_axis_of_a_mesh(stage: int) -> None:
    """Two groups of two ranks, each cut among its own ranks; all end where one process does."""
    reference, full = alone(STACK), STACK.state(ADAMW, F64)

    def body() -> Any:
        mesh = zf.mesh(data=2, tensor=2)
        step = zf.shard(STACK.step(ADAMW), stage=stage, mesh=mesh)
        state, metrics = step.place(full), []
        for i in range(4):
            state, out = step(state, zf.local_batch(STACK.batch(i, F64), mesh))
            metrics.append(out)
        return metrics, step.unplace(state)

    assert_like_alone(zf.simulate(4)(body)(), reference, 1e-9)


def test_two_axes_of_a_mesh_as_one() -> None:
    reference, full = alone(STACK), STACK.state(ADAMW, F64)

    def body() -> Any:
        mesh, axes = zf.mesh(data=2, pipe=2), ("data", "pipe")
        step = zf.shard(STACK.step(ADAMW), stage=3, mesh=mesh, axis=axes)
        state, metrics = step.place(full), []
        for i in range(4):
            state, out = step(state, zf.local_batch(STACK.batch(i, F64), mesh, axes))
            metrics.append(out)
        return metrics, step.unplace(state)

    assert_like_alone(zf.simulate(4)(body)(), reference, 1e-9)


def made(seed: int) -> zf.TrainState:
    """A state from torch's own random functions, initialised as modules do it."""
    torch.manual_seed(seed)
    model = zf.functionalize(
        nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 1)).double()
    )
    return zf.TrainState.create(model.params, ADAMW, key=seed)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_state_made_in_place_is_the_placed_one(stage: int) -> None:
    def body() -> None:
        step = zf.shard(zf.train_step(stack_loss, ADAMW), stage=stage, unit_bytes=300)
        there = step.init(made, 3)
        assert_same(step.unplace(there), full)
        ranks_part = [x for x in tree.leaves(there) if isinstance(x, Tensor)]
        placed = [x for x in tree.leaves(step.place(full)) if isinstance(x, Tensor)]
        for x, y in zip(ranks_part, placed, strict=True):
            assert torch.equal(x, y)

    full = made(3)
    for ranks in (1, 2, 3):
        zf.simulate(ranks)(body)()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_a_move_to_another_world(stage: int) -> None:
    """Four ranks, then two at another stage, then one: the full state carries everything."""
    reference = alone(STACK, steps=6)

    def part(full: Any, stage: int, first: int) -> Any:
        later = Case(STACK.state, STACK.step, lambda i, t: regression(first + i, t))
        step = zf.shard(STACK.step(ADAMW), stage=stage)
        metrics, state = train(step, step.place(full), later, 2)
        return metrics, step.unplace(state)

    full, metrics = STACK.state(ADAMW, F64), []
    for ranks, at, first in ((4, stage, 0), (2, 3 - stage, 2), (1, stage, 4)):
        out, full = zf.simulate(ranks)(part)(full, at, first)[0]
        metrics += out
    assert_near((metrics, full), reference, 1e-9)


@pytest.mark.parametrize("added", [False, True])
def test_descent_by_hand_without_an_optimizer(added: bool) -> None:
    """``tree.map`` of params and gradients, plain and cut, keeps the state's representation."""

    def state(tx: Any, dtype: torch.dtype) -> Any:
        return {"params": stack(dtype), "opt_state": ()}

    def make(tx: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            value, grads = zf.value_and_grad(stack_loss)(state["params"], batch)
            if added:
                down = tree.map(lambda g: -0.05 * g, grads)
                return {**state, "params": optim.apply_updates(state["params"], down)}, {
                    "loss": value
                }
            params = tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
            return {**state, "params": params}, {"loss": value}

        return step

    case = Case(state, make, regression)
    reference = alone(case)
    for stage in range(4):
        for ranks in (1, 2, 3):
            assert_like_alone(cut_up(case, ranks, stage=stage), reference, 1e-9)
