"""Bad input gets a clear, early error that names the place and the fix."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim

TX = optim.adamw(1e-2)


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["blocks"], batch)
    return (x @ params["head"]).square().mean()


def params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(4, 4, generator=gen, dtype=dtype)} for _ in range(2)]
    return {"blocks": zf.Layers(blocks), "head": torch.randn(4, 1, generator=gen, dtype=dtype)}


def state(**kw: Any) -> zf.TrainState:
    return zf.TrainState.create(params(), TX, **kw)


def batch(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 4)


def sharded(stage: int = 3, **kw: Any) -> Any:
    return zf.shard(zf.train_step(loss_fn, TX), stage=stage, **kw)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # what jvp imports
@pytest.mark.parametrize(
    "around",
    [
        lambda f: torch.func.vmap(f)(torch.ones(2, 4)),
        lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),)),
        lambda f: torch.func.grad(lambda w: f(w).sum())(torch.ones(4)),
    ],
)
def test_gradients_inside_torch_func(around: Any) -> None:
    def gradient(w: torch.Tensor) -> torch.Tensor:
        return zf.value_and_grad(lambda p: (p * p).sum())(w)[1]

    with pytest.raises(zf.CompositionError, match=r"take torch\.func\.grad_and_value"):
        around(gradient)


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", None, True])
def test_a_stage_outside_0_to_3(stage: Any) -> None:
    with pytest.raises(ValueError, match="stages 0"):
        sharded(stage)


def test_unknown_keywords_are_type_errors() -> None:
    with pytest.raises(TypeError, match="stages"):
        zf.shard(zf.train_step(loss_fn, TX), stages=3)
    with pytest.raises(TypeError, match="now"):
        zf.donate(zf.train_step(loss_fn, TX), now=True)


@pytest.mark.parametrize("wrap", [zf.shard, zf.donate])
def test_a_transform_wrapped_in_itself(wrap: Any) -> None:
    with pytest.raises(zf.CompositionError, match="already"):
        wrap(wrap(zf.train_step(loss_fn, TX)))


def test_a_step_that_never_differentiates() -> None:
    step = zf.shard(lambda state, batch: (state, {}), stage=3)
    placed = step.place(state())
    with pytest.raises(zf.CompositionError, match="value_and_grad"):
        step(placed, batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_placed_state_is_not_placed_again(stage: int) -> None:
    step = sharded(stage)
    with pytest.raises(zf.PlacementError, match="placed already"):
        step.place(step.place(state()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_unplaced_state_names_place(stage: int) -> None:
    with pytest.raises(zf.PlacementError, match=r"step\.place"):
        sharded(stage)(state(), batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_placed_state_in_a_bare_step(stage: int) -> None:
    placed = sharded(stage).place(state())
    with pytest.raises(zf.PlacementError, match="unplace"):
        zf.train_step(loss_fn, TX)(placed, batch())


def test_a_state_of_another_stage() -> None:
    with pytest.raises(zf.PlacementError, match="params"):
        sharded(1)(sharded(3).place(state()), batch())
    with pytest.raises(zf.PlacementError, match="cut"):
        sharded(3)(sharded(1).place(state()), batch())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_from_another_world(stage: int) -> None:
    placed = zf.simulate(4)(lambda: sharded(stage).place(state()))()
    with pytest.raises(zf.PlacementError, match=r"4 ranks.* 2"):
        zf.simulate(2)(lambda: sharded(stage)(placed[zf.rank()], batch()))()


def test_mismatched_trees_name_the_leaf() -> None:
    with pytest.raises(zf.PlacementError, match="extra"):
        zf.tree.map(torch.add, params(), {**params(), "extra": torch.ones(1)})
    step = sharded(3)
    placed = step.place(state())
    with pytest.raises(zf.PlacementError):
        zf.tree.map(torch.add, placed.params, {"other": torch.ones(1)})


@pytest.mark.parametrize("leaf", [torch.ones(2, dtype=torch.int64), 3.0, "w"])
def test_parameters_that_are_no_float_tensors(leaf: Any) -> None:
    bad = params()
    bad["blocks"][0]["bad"] = leaf
    with pytest.raises(zf.PlacementError, match=r"blocks\.0\.bad"):
        zf.TrainState.create(bad, TX)


def test_nothing_trainable() -> None:
    with pytest.raises(zf.PlacementError, match="trainable"):
        state(trainable=lambda path: False)


def test_losses_that_are_no_scalars() -> None:
    with pytest.raises(ValueError, match="0-d"):
        zf.value_and_grad(lambda p: p["w"])({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="has_aux"):
        zf.value_and_grad(lambda p: (p["w"].sum(), 1))({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="depends on none"):
        zf.value_and_grad(lambda p: torch.ones(()))({"w": torch.ones(2)})


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_step_under_inference_mode_says_so(stage: int | None) -> None:
    step = zf.train_step(lambda p, x: (p["w"] * x).sum(), optim.sgd(0.1))
    step = step if stage is None else zf.shard(step, stage=stage)
    state = step.place(zf.TrainState.create({"w": torch.ones(2)}, optim.sgd(0.1)))
    with torch.no_grad():
        state, _ = step(state, torch.ones(2))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        step(state, torch.ones(2))


def test_a_state_without_params_names_roles() -> None:
    with pytest.raises(zf.PlacementError, match="roles"):
        sharded().place({"weights": params(), "opt_state": TX.init(params())})
    with pytest.raises(ValueError, match="role"):
        sharded(roles={"weights": "parameters"})


def test_an_unknown_leaf_suggests_its_neighbours() -> None:
    with pytest.raises(zf.PlacementError, match="head"):
        zf.tree.get(params(), "haed")
    with pytest.raises(zf.PlacementError, match="no leaf"):
        zf.tree.get(sharded().place(state()).params, "blocks.7.w")
    with pytest.raises(zf.PlacementError, match="shape"):
        zf.tree.set(sharded().place(state()).params, "head", torch.ones(3))


def test_a_batch_with_fewer_rows_than_ranks() -> None:
    with pytest.raises(zf.PlacementError, match="1 rows"):
        zf.simulate(2)(lambda: zf.local_batch(batch(1)))()


def test_ranks_that_start_apart() -> None:
    def body() -> Any:
        mine = params()
        mine["head"] = mine["head"] + zf.rank()
        return sharded().place(zf.TrainState.create(mine, TX))

    with pytest.raises(zf.PlacementError, match="head has other values"):
        zf.simulate(2)(body)()


def test_collectives_of_different_shapes() -> None:
    with pytest.raises(zf.DesyncError, match="pmean"):
        zf.simulate(2)(lambda: zf.pmean(torch.ones(2 + zf.rank())))()


def test_a_rank_that_runs_a_layer_once_more_is_told_the_unit() -> None:
    """Fewer layers, and other orders, are right: see tests/laws/test_mixtures.py."""
    more = threading.local()

    def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for i in (0, 1, 0) if getattr(more, "here", False) else (0, 1):
            x = zf.layer(lambda q, x: x @ q["w"], p["blocks"][i], x)
        return x.sum() + p["head"].sum()

    def body() -> Any:
        step = zf.shard(zf.train_step(loss, TX), stage=3, unit_bytes=64)
        placed, _ = step(step.place(state()), batch())
        more.here = zf.rank() == 0
        return step(placed, batch())

    with pytest.raises(zf.DesyncError, match=r"blocks\.[01]"):
        zf.simulate(2, timeout=5)(body)()


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_donated_state_is_spent(stage: int | None) -> None:
    bare = zf.train_step(loss_fn, TX)
    step = zf.donate(bare if stage is None else zf.shard(bare, stage=stage))
    spent = step.place(state())
    step(spent, batch())
    for use in (
        lambda: step(spent, batch()),
        lambda: step.place(spent),
        lambda: step.unplace(spent),
        lambda: zf.full(spent.params),
        lambda: zf.tree.global_norm(spent.params),
        lambda: zf.evaluate(loss_fn)(spent.params, batch()),
    ):
        with pytest.raises(zf.DonatedStateError, match=r"donated|placed already"):
            use()


def test_a_donated_state_is_spent_also_if_nothing_was_overwritten() -> None:
    step = zf.donate(zf.train_step(loss_fn, optim.sgd(0.1)))
    spent = step.place(zf.TrainState.create(params(), optim.sgd(0.1)))
    step(spent, batch())
    with pytest.raises(zf.DonatedStateError, match="donated"):
        step(spent, batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_placed_params_outside_a_step(stage: int) -> None:
    """Each rank would go on along its own gradients, and they would drift apart unseen."""

    def body() -> None:
        placed = sharded(stage).place(state())
        with pytest.raises(zf.PlacementError, match="outside a step"):
            zf.value_and_grad(loss_fn)(placed.params, batch())
        copies = sharded(stage, mesh=zf.mesh(data=1, replica=2)).place(state())
        with pytest.raises(zf.PlacementError, match="outside a step"):
            zf.value_and_grad(loss_fn)(copies.params, batch())

    zf.simulate(2)(body)()
    if stage == 3:
        placed = sharded(stage).place(state())
        with pytest.raises(zf.PlacementError, match="outside a step"):
            zf.value_and_grad(loss_fn)(placed.params, batch())


def test_module_parameters_leave_no_graph_behind() -> None:
    tx = optim.adamw(0.1)
    leaf = torch.nn.Parameter(torch.ones(4))
    for wrap in (lambda s: s, zf.shard, lambda s: zf.shard(s, stage=0)):
        step = wrap(zf.train_step(lambda p, b: (p["w"] * b).sum(), tx))
        current = step.place(zf.TrainState.create({"w": leaf}, tx))
        for _ in range(2):
            current, metrics = step(current, torch.ones(4))
        assert metrics["loss"].grad_fn is None
        assert all(x.grad_fn is None for x in zf.tree.leaves(current))


@pytest.mark.parametrize(
    "make",
    [
        lambda tx: zf.train_step(loss_fn, tx),
        lambda tx: zf.TrainState.create(params(), tx),
    ],
    ids=["train_step", "TrainState.create"],
)
def test_an_optimizer_of_torch(make: Any) -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"torch\.optim.*Adam.*zf\.optim\.adamw\(1e-3\)"):
        make(torch.optim.Adam(module.parameters()))


def test_a_module_where_params_or_a_step_belong() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(zf.PlacementError, match=r"a module \(Linear\).*zf\.functionalize"):
        zf.TrainState.create(module, TX)
    with pytest.raises(zf.PlacementError, match=r"params is a Functional; give its \.params"):
        zf.TrainState.create(zf.functionalize(module), TX)
    with pytest.raises(TypeError, match=r"torch\.optim.*SGD for the optimizer"):
        zf.train_step(loss_fn, torch.optim.SGD)
    with pytest.raises(TypeError, match=r"shard\(\) got a Linear; expected the step to wrap"):
        zf.shard(module, stage=1)


def test_gathered_layers_that_are_read_behind_their_loss() -> None:
    kept: list[Any] = []

    def keeping(p: Any, batch: torch.Tensor) -> torch.Tensor:
        kept.append(p["blocks"][1])
        return loss_fn(p, batch)

    def rank() -> None:
        step = zf.shard(zf.train_step(keeping, TX), stage=3)
        placed = step.place(state())
        step(placed, step.local_batch(batch()))
        with pytest.raises(
            zf.PlacementError, match=r"layer blocks\.1 were read after the function"
        ):
            kept[0]["w"]

    zf.simulate(2)(rank)()
