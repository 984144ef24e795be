"""``pipeline(f, n)`` is ``accumulate(f, n)``: whatever the schedule, stages and ZeRO stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfunc as zf
from tests.laws import split_steps
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering, each
from tests.laws.models import block, mean_square
from tests.laws.pipelines import (
    MODELS,
    MODULES,
    TX,
    Model,
    Wrap,
    alone,
    model_of,
    rows,
    stack,
    stack_loss,
    staged,
)
from zfunc import optim, tree

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
# Stages along pipe, ranks along data, ZeRO's stage (None: without shard), microbatches.
PLACES = (
    *((2, 1, 0, 4), (2, 2, 1, 4), (2, 2, 3, 3), (3, 1, 2, 8), (2, 2, 0, 4)),
    *((4, 1, 1, 4), (2, 1, 3, 8), (3, 2, 3, 4), (2, 2, 2, 3), (2, 1, None, 1), (4, 1, 3, 2)),
)
EVERY = [
    (name, schedule, *place)
    for name, schedule, place in itertools.product(MODELS, SCHEDULES, PLACES)
]
# Each model under each schedule once, and each place from model to model. Modules of Hugging Face
# are in test_pipeline_models.py.
FEW = [
    (name, schedule, *PLACES[(2 * i + 5 * k) % len(PLACES)])
    for i, name in enumerate(x for x in MODELS if x not in MODULES)
    for k, schedule in enumerate(SCHEDULES)
]


def fits(name: str, schedule: str, pipe: int) -> bool:
    """Whether the model has enough layers for so many chunks."""
    chunks = pipe * (2 if schedule in ("interleaved", "zbv") else 1)
    return len(zf.tree.flatten_names(model_of(name).params)) > 0 and chunks <= layers_of(name)


def layers_of(name: str) -> int:
    from zfunc.layout.layout import find_layers

    return len(find_layers(model_of(name).params)[1])


@pytest.mark.parametrize(
    ("name", "schedule", "pipe", "data", "stage", "n"), EVERY if Covering.whole else FEW
)
def test_stages_end_where_one_process_does(
    name: str, schedule: str, pipe: int, data: int, stage: int | None, n: int
) -> None:
    if not fits(name, schedule, pipe):
        with pytest.raises(zf.PlacementError, match="layers"):
            staged(name, n, pipe, data, stage, schedule=schedule)
        return
    for run in staged(name, n, pipe, data, stage, schedule=schedule):
        if data == 1 and not model_of(name).tied:
            assert_same(run, alone(name, n))
        else:
            assert_near(run, alone(name, n), 1e-9)


def weighted(params: Any, batch: Any) -> Any:
    x = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
    squares = (x @ params["head"]["w"] + params["head"]["b"] - batch["y"]).square()
    return zf.Mean((squares * batch["w"]).sum(), batch["w"].sum())


def with_weights(i: int) -> Any:
    return {**rows(i), "w": (torch.arange(24)[:, None] % (3 + i) > 0).double()}


def with_aux(params: Any, batch: Any) -> Any:
    x = zf.scan(block, params["blocks"], block(params["first"], batch["x"]))
    out = x @ params["head"]["w"] + params["head"]["b"]
    return mean_square(out, batch["y"]), {"size": out.abs().mean(), "rows": 3}


def dropping(params: Any, batch: Any) -> Tensor:
    x = F.dropout(block(params["first"], batch["x"]), 0.1)
    x = zf.scan(lambda p, x: F.dropout(block(p, x), 0.2), params["blocks"], x)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def between(params: Any, batch: Any) -> Tensor:
    """Values that no layer is given: the stream itself, a sum, the first value."""
    x = first = block(params["first"], batch["x"])
    total = torch.zeros((), dtype=x.dtype)
    for p in params["blocks"]:
        y = zf.layer(block, p, F.layer_norm(x, x.shape[-1:]))
        total = total + y.square().mean()
        x = F.dropout(x, 0.1) + y
    out = (x + first) @ params["head"]["w"] + params["head"]["b"]
    return mean_square(out, batch["y"]) + 0.01 * total


def regions(params: Any, batch: Any) -> Tensor:
    """What backward runs again has layers of several stages, or begins where one does."""

    layers = list(params["blocks"])

    def region(x: Tensor, first: int, last: int) -> Tensor:
        for p in layers[first:last]:
            x = zf.layer(lambda p, x: F.dropout(block(p, x), 0.2), p, x)
        return torch.tanh(x) * 2

    x = block(params["first"], batch["x"])
    for first, last in ((0, 1), (1, 3), (3, len(layers))):
        x = checkpoint(region, x, first, last, use_reentrant=False)
    return mean_square(x @ params["head"]["w"] + params["head"]["b"], batch["y"])


def some(path: str) -> bool:
    return "blocks.2" not in path and "head.b" not in path


STACK = Model(stack(), stack_loss, rows)
BESIDE: dict[str, tuple[Model, Wrap, dict[str, Any]]] = {
    "remat": (STACK, zf.remat, {}),
    "between": (Model(stack(), between, rows), lambda f: f, {}),
    "regions": (Model(stack(), regions, rows), lambda f: f, {}),
    "between, recomputed": (Model(stack(), between, rows), zf.remat, {}),
    "donate": (STACK, zf.donate, {}),
    "drop_layers": (STACK, lambda f: zf.drop_layers(f, theta=0.3), {}),
    "means": (Model(stack(), weighted, with_weights), lambda f: f, {}),
    "aux": (Model(stack(), with_aux, rows), lambda f: f, {"has_aux": True}),
    "dropout": (Model(stack(), dropping, rows), lambda f: f, {}),
    "frozen": (Model(stack(), stack_loss, rows, more={"trainable": some}), lambda f: f, {}),
    "quantize": (STACK, lambda f: zf.quantize(f, start_bits=8, group_size=2), {}),
    "skip_unused": (STACK, lambda f: f, {"skip_unused": True}),
    "offload": (STACK, lambda f: zf.offload(f, to="cpu"), {}),
    "lamb": (STACK, lambda f: f, {"tx": optim.lamb(0.01)}),
    "precision": (STACK, zf.precision, {}),
    "fp16": (STACK, lambda f: zf.precision(f, compute=torch.float16), {}),
}
ROUNDS = ("precision", "fp16", "lamb")  # sums over ranks in another order tell
ADDS = ("between", "between, recomputed", "lamb")  # gradients of several stages, or norms


@pytest.mark.parametrize(
    ("place", "name"), each([(2, 1, 0, "1f1b"), (2, 2, 3, "zb"), (2, 1, 1, "zbv")], BESIDE)
)
def test_beside_another_transform(name: str, place: tuple[int, int, int, str]) -> None:
    (model, other, how), (pipe, data, stage, schedule) = BESIDE[name], place
    if data > 1 and name in ROUNDS:
        data = 1

    def plain(f: Any) -> Any:
        return zf.shard(zf.accumulate(other(f), 4), stage=min(stage, 1))

    def wrap(f: Any) -> Any:
        mesh = zf.mesh(data=data, pipe=pipe)
        return zf.shard(zf.pipeline(other(f), 4, schedule=schedule, mesh=mesh), stage=stage)

    wanted = zf.simulate(data)(lambda: model.trained(plain, local=True, **how))()
    found = zf.simulate(pipe * data)(lambda: model.trained(wrap, local=True, **how))()
    same: Callable[..., None] = assert_same if data == 1 and name not in ADDS else assert_near
    for run in found:
        same(run, wanted[0], *([] if same is assert_same else [1e-9]))


@pytest.mark.parametrize(
    ("pipe", "data", "tensor", "stage", "schedule"),
    [(2, 1, 2, 0, "1f1b"), (2, 2, 2, 1, "1f1b"), (2, 2, 2, 3, "zbv"), (2, 2, 2, 0, "zbv")],
)
def test_three_dimensions(pipe: int, data: int, tensor: int, stage: int, schedule: str) -> None:
    def run(wrap: Wrap) -> Any:
        model = Model(deep(), split_steps.loss_of, lambda i: split_steps.batch(i, rows=12))
        return model.trained(wrap, local=True)

    def wrap(f: Any) -> Any:
        split = zf.split(f, rules=split_steps.RULES)
        mesh = zf.mesh(pipe=pipe, data=data, tensor=tensor)
        return zf.shard(zf.pipeline(split, 2, schedule=schedule), stage=stage, mesh=mesh)

    wanted = run(lambda f: zf.accumulate(f, 2))
    for found in zf.simulate(pipe * data * tensor)(lambda: run(wrap))():
        assert_near(found, wanted, 1e-9)


def deep() -> Any:
    """The GPT of split's laws, with four blocks."""
    full = split_steps.params()
    blocks = [tree.map(torch.clone, full["blocks"][i % 2]) for i in range(4)]
    return {"table": full["table"], "blocks": zf.Layers(blocks)}


def step_at(place: Any, model: Model) -> Any:
    pipe, data, stage, schedule = place
    step = zf.train_step(model.loss, TX)
    if pipe:
        mesh = zf.mesh(data=data, pipe=pipe)
        step = zf.pipeline(step, 4, schedule=schedule, mesh=mesh)
    return zf.shard(step, stage=stage)


SAVED = [
    ((2, 2, 1, "1f1b"), (4, 1, 3, "gpipe")),
    ((2, 1, 0, "zbv"), (0, 3, 3, "")),
    ((0, 1, 0, ""), (2, 2, 0, "zb")),
    ((4, 1, 3, "1f1b"), (2, 1, 2, "zbv")),
    ((2, 1, 3, "1f1b"), (1, 1, 0, "1f1b")),
]


@pytest.mark.parametrize(("before", "after"), SAVED)
@pytest.mark.parametrize("name", ["gpt", "tied llama"])
def test_any_stages_restore_what_any_others_have_saved(
    name: str, before: Any, after: Any, tmp_path: Path
) -> None:
    model = model_of(name)
    if max(before[0], after[0]) * 2 > layers_of(name) and "zbv" in (before[3], after[3]):
        before, after = ((2, *x[1:]) if x[0] == 4 else x for x in (before, after))

    def begin(place: Any) -> Any:
        step = step_at(place, model)
        return step, step.place(zf.TrainState.create(model.params, TX, key=7))

    def save() -> Any:
        step, state = begin(before)
        for i in range(2):
            state, _ = step(state, step.local_batch(model.batch(i)))
        zf.save(tmp_path, state)
        return step.unplace(state)

    def restore() -> Any:
        step, state = begin(after)
        return step.unplace(zf.restore(tmp_path, state))

    full = zf.simulate(max(1, before[0]) * before[1])(save)()[0]
    for found in zf.simulate(max(1, after[0]) * after[1])(restore)():
        assert_same(found, full)


@pytest.mark.parametrize(("pipe", "data", "stage"), [(2, 1, 0), (2, 2, 3), (3, 1, 1)])
def test_stages_evaluate_what_one_process_does(pipe: int, data: int, stage: int) -> None:
    model = model_of("tied gpt")

    def body() -> Any:
        def fn(state: Any, batch: Any) -> Any:
            loss, grads = zf.value_and_grad(model.loss)(state.params, batch)
            return state, (
                zf.evaluate(model.loss)(state.params, batch),
                loss,
                len(zf.tree.leaves(grads)),
            )

        step = zf.shard(zf.pipeline(fn, 4, mesh=zf.mesh(data=data, pipe=pipe)), stage=stage)
        state = step.place(zf.TrainState.create(model.params, TX, key=7))
        batch = model.batch(0)
        return zf.evaluate(model.loss)(state.params, batch), step(state, batch)[1][0]

    wanted = model.loss(model.params, model.batch(0)).detach()
    for outside, inside in zf.simulate(pipe * data)(body)():
        assert_near((outside, inside), (wanted, wanted), 1e-12)


def test_one_stage_accumulates() -> None:
    wanted = alone("stack", 4)
    assert_same(model_of("stack").trained(lambda f: zf.pipeline(f, 4)), wanted)
    assert_same(model_of("stack").trained(lambda f: zf.shard(zf.pipeline(f, 4, pipe=1))), wanted)


def test_what_a_step_says_of_its_stages() -> None:
    def body() -> Any:
        step = zf.pipeline(zf.train_step(stack_loss, TX), 4, pipe=2)
        state = step.place(zf.TrainState.create(stack(), TX))
        before = step.describe()
        with zf.comm.ledger() as sent:
            step(state, rows(0))
        return before, step.describe(), sent.by_label

    for rank, (before, after, sent) in enumerate(zf.simulate(2)(body)()):
        assert "4 microbatches on 2 stages, 1f1b" in before and "blocks.0 to blocks.2" in before
        assert before.sent_bytes is None
        ways = [label for label in sent if label.startswith(("forward", "backward"))]
        assert sum(sent[label] for label in ways) == 4 * 288  # 6 rows of 6 numbers, each way
        assert f"{'gradients' if rank else 'values'} between stages 1152" in after
        assert "of a microbatch: 0 to 1 288 in 1 message, 1 to 0 288 in 1 message" in after


# What makes no sense


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"partition": [0, 2]}, zf.CompositionError, "cuts"),
        ({"pipe": 7}, zf.PlacementError, "6 layers"),
        ({"schedule": "1b1f"}, zf.errors.ZfuncError, "1b1f"),
        ({"microbatches": 5}, zf.CompositionError, "24 rows"),
    ],
)
def test_bad_input_on_all_ranks(how: dict[str, Any], error: type, text: str) -> None:
    def body() -> None:
        given = {"microbatches": 4, "pipe": 2, **how}
        STACK.trained(lambda f: zf.pipeline(f, **given), steps=1)

    with pytest.raises(error, match=text):
        zf.simulate(how.get("pipe", 2))(body)()


def test_accumulate_is_refused_beside_it() -> None:
    step = zf.train_step(stack_loss, TX)
    for make in (
        lambda: zf.accumulate(zf.pipeline(step, 4), 2),
        lambda: zf.pipeline(zf.accumulate(step, 2), 4),
    ):
        with pytest.raises(zf.CompositionError, match="microbatches="):
            make()
    with pytest.raises(zf.CompositionError, match="already"):
        zf.pipeline(zf.pipeline(step, 4), 4)
    with pytest.raises(ValueError, match="microbatches=0"):
        zf.pipeline(step, 0)


def test_rows_that_differ_between_stages_raise_on_all() -> None:
    def body() -> None:
        STACK.trained(lambda f: zf.pipeline(f, 4, pipe=2), steps=0)
        step = zf.pipeline(zf.train_step(stack_loss, TX), 4, pipe=2)
        state = step.place(zf.TrainState.create(stack(), TX))
        step(state, rows(zf.rank()))

    with pytest.raises(zf.PlacementError, match=r"step\.local_batch"):
        zf.simulate(2)(body)()


def test_buffers_are_refused_on_all_ranks() -> None:
    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        return stack_loss(params, batch) + 0 * buffers["n"].sum(), buffers

    def body() -> None:
        step = zf.pipeline(zf.train_step(loss, TX), 4, pipe=2)
        state = zf.TrainState.create(stack(), TX, buffers={"n": torch.zeros(2)})
        step(step.place(state), rows(0))

    with pytest.raises(zf.CompositionError, match="buffers"):
        zf.simulate(2)(body)()


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_cut_is_said_of_pipeline(world: int) -> None:
    def body() -> None:
        step = zf.pipeline(zf.train_step(stack_loss, TX), 5, pipe=world)
        with pytest.raises(
            zf.CompositionError, match=r"^pipeline\(\.\.\., 5\) cannot cut batch\.x of 24"
        ):
            step(step.place(zf.TrainState.create(stack(), TX)), rows(0))

    zf.simulate(world)(body)()


def test_place_asks_how_many_are_stages() -> None:
    step = zf.pipeline(zf.train_step(stack_loss, TX), 4)

    def body() -> None:
        with pytest.raises(zf.CompositionError, match="pipeline over how many of the 2 ranks"):
            step.place(zf.TrainState.create(stack(), TX))

    zf.simulate(2)(body)()


@pytest.mark.parametrize("axis", ["data", "replica", "tensor", "foo", 3])
@pytest.mark.parametrize("how", [{"pipe": 2}, {"mesh": zf.mesh(data=2, pipe=2)}])
def test_axes_that_are_not_of_stages_are_refused(axis: Any, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"here may be \['pipe'\]"):
        zf.pipeline(zf.train_step(stack_loss, TX), 4, axis=axis, **how)


@pytest.mark.parametrize("partition", [3, None, {0: 3}, "flop", [0.0, 3]])
def test_what_is_no_partition_is_refused(partition: Any) -> None:
    with pytest.raises(zf.CompositionError, match='expected "flops", "parameters", or the layers'):
        zf.pipeline(zf.train_step(stack_loss, TX), 4, pipe=2, partition=partition)


def test_what_is_no_mesh_is_refused() -> None:
    wrong: Any = {"pipe": 2}
    with pytest.raises(TypeError, match="pipeline takes a mesh"):
        zf.pipeline(zf.train_step(stack_loss, TX), 4, mesh=wrong)
