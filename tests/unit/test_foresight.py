"""``zf.foresee``: what is guessed, what is refused, what a cluster takes."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.covering import Covering
from tests.unit.foreseen import SHAPE, TX, WIDE, alone, trained, trained_on
from zfunc.foresight.assumptions import ForesightError
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

pytestmark = pytest.mark.usefixtures("thawed")


# What is guessed


def test_values_that_are_read_are_listed_with_their_place() -> None:
    def step(state: Any, x: Tensor) -> Any:
        total = x.sum()
        scale = 1.0 if total.item() > 3 else 2.0
        return {"params": {"w": state["params"]["w"] * scale}}, total

    guess, *_ = alone(step).assumptions
    assert __file__.rpartition("/")[2] in guess.place and "float32[]" in guess.what


def test_values_that_are_known_are_no_guesses() -> None:
    """Of a small tensor of the state, through views and in place."""

    def step(state: Any, x: Tensor) -> Any:
        count = state["count"] + 1
        assert int(count) >= 8 and bool((count.view(1) > 7).all())
        return {**state, "count": count}, x.sum()

    assert alone(step, {**WIDE, "count": torch.tensor(7)}).assumptions[:-1] == ()


def test_what_ranks_compare_is_no_guess() -> None:
    """Stages have the same rows of a batch: whether they do is not asked of ranks that are not
    there."""
    params = {"layers": zf.Layers([{"w": torch.ones(4)} for _ in range(2)])}

    def loss(params: Any, x: Tensor) -> Tensor:
        return zf.scan(lambda p, x: p["w"] * x, params["layers"], x).square().mean()

    step = zf.pipeline(zf.train_step(loss, TX), microbatches=2, pipe=2)
    state = zf.TrainState.create(params, TX)
    seen = zf.foresee(step, state, torch.ones(2, 4), ranks=2, device="cpu")
    assert [guess.place for guess in seen.assumptions if "zfunc" in guess.place] == []


def test_shapes_that_depend_on_values_are_refused_by_name() -> None:
    def step(state: Any, x: Tensor) -> Any:
        return state, x[x > 0].sum()

    with pytest.raises(ForesightError, match=r"index|nonzero"):
        alone(step)


def test_an_operator_without_shapes_is_refused_by_name() -> None:
    library = torch.library.Library("zfunc_test_foresight", "FRAGMENT")
    library.define("shapeless(Tensor x) -> Tensor")
    library.impl("shapeless", lambda x: x + 1, "CPU")

    def step(state: Any, x: Tensor) -> Any:
        return state, torch.ops.zfunc_test_foresight.shapeless(x)

    with pytest.raises(ForesightError, match=r"shapeless.*no kernel for the meta device"):
        alone(step)


def test_an_operator_of_functions_is_refused_by_name() -> None:
    def step(state: Any, x: Tensor) -> Any:
        return state, torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)).sum()

    with pytest.raises(ForesightError, match="cond is an operator of functions"):
        alone(step)
    assert zf.profile(step, WIDE, torch.ones(80, 100), warmup=1).operators["cond"].calls == 1


def test_what_was_guessed_is_told_where_the_step_raises() -> None:
    def step(state: Any, x: Tensor) -> Any:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return state, x.sum()

    with pytest.raises(ValueError, match="not a number") as raised:
        alone(step)
    assert any("guessed before" in note and "bool[]" in note for note in raised.value.__notes__)


# What does not fit


@pytest.mark.parametrize("step", [None, "step", nn.Linear(2, 2)])
def test_what_is_no_step(step: Any) -> None:
    for who in (alone, lambda step: zf.profile(step, WIDE, torch.ones(2, 2))):
        with pytest.raises(TypeError, match=rf"step is a {type(step).__name__}, expected a step"):
            who(step)


def test_a_captured_step_is_foreseen_by_what_is_in_it() -> None:
    step = zf.captured(zf.donate(zf.train_step(lambda p, x: (x @ p["w"]).sum(), TX)))
    with pytest.raises(zf.CompositionError, match=r"Foresee its \.step, donate"):
        alone(step)


def test_a_batch_that_does_not_fit_raises_what_the_step_raises() -> None:
    with pytest.raises(ForesightError, match=r"mm .*\[8, 99\], \[100, 100\].*test_foresight.py"):
        alone(lambda s, x: (s, x @ s["params"]["w"]), WIDE, torch.zeros(8, 99))


def test_training_in_inference_mode_raises_what_the_step_raises() -> None:
    """And not what torch says of the first operator that would be differentiated."""
    shape = GPTConfig(vocab=512, width=256, depth=2, heads=4)
    step = zf.train_step(lambda p, ids: gpt.loss(p, ids, shape), TX)
    state, ids = zf.TrainState.create(gpt.shapes(shape), TX), torch.zeros(8, 65, dtype=torch.int64)
    for wrapped in (step, zf.pipeline(zf.shard(step, stage=1), 2, pipe=2)):
        with torch.inference_mode(), pytest.raises(ValueError, match="Call the step outside"):
            zf.foresee(wrapped, state, ids, ranks=4)
        with torch.no_grad():
            zf.foresee(wrapped, state, ids, ranks=4)


def test_evaluation_in_inference_mode_is_foreseen() -> None:
    def step(state: Any, ids: Tensor) -> Any:
        return state, zf.evaluate(lambda p: gpt.loss(p, ids, SHAPE))(state["params"])

    params, seen = {"params": gpt.shapes(SHAPE)}, []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            seen.append(alone(step, params, torch.zeros(4, 17, dtype=torch.int64)))
    assert (seen[0].flops, seen[0].peak_bytes) == (seen[1].flops, seen[1].peak_bytes)


def test_what_the_step_itself_raises_says_which_batch_it_was() -> None:
    with pytest.raises(TypeError, match="slice") as raised:
        trained_on({"ids": torch.zeros(4, 17, dtype=torch.int64)})
    assert any("does the batch fit" in note and "ids" in note for note in raised.value.__notes__)


def test_a_rank_or_a_device_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="ranks=0, expected 1 or more"):
        trained(ranks=0)
    with pytest.raises(ValueError, match=r"rank=4, expected 0 to 3"):
        trained(rank=4)
    with pytest.raises(ValueError, match=r"rank=1.5, expected 0 to 3"):
        trained(rank=1.5)
    with pytest.raises(ValueError, match="device='tpu'"):
        trained(device="tpu")
    with pytest.raises(ValueError, match="steps=1"):
        trained(steps=1)


def test_a_mesh_for_a_step_that_names_none() -> None:
    replicated = trained(mesh=zf.mesh(replica=2))
    assert set(replicated.sent.by_axis) > {"data", "replica"}
    assert replicated.state_bytes > trained().state_bytes


def test_meshes_that_do_not_fit() -> None:
    def on(step: Any) -> Any:
        return zf.shard(step, stage=3, mesh=zf.mesh(replica=2))

    step = on(zf.train_step(lambda p, x: (x @ p["w"]).sum(), TX))
    state, x = zf.TrainState.create({"w": torch.zeros(100, 100)}, TX), torch.zeros(8, 100)
    with pytest.raises(zf.CompositionError, match="mesh"):
        zf.foresee(step, state, x, ranks=8, mesh=zf.mesh(replica=4))
    zf.foresee(step, state, x, ranks=8, mesh=zf.mesh(data=4, replica=2))  # the same
    with pytest.raises(ValueError, match="needs a multiple of 2 ranks, this world has 7"):
        zf.foresee(step, state, x, ranks=7)
    with pytest.raises(TypeError, match=r"mesh='data', expected zf\.mesh"):
        zf.foresee(step, state, x, ranks=8, mesh="data")
    with pytest.raises(zf.CompositionError, match="lays ranks out"):
        zf.foresee(lambda s, x: (s, x), WIDE, x, ranks=8, mesh=zf.mesh(data=8))


def test_more_ranks_than_a_mesh_holds() -> None:
    with pytest.raises(ValueError, match="needs 6 ranks, this world has 12"):
        trained(ranks=12, mesh=zf.mesh(replica=2, data=3))


def test_a_step_that_knows_of_no_other_ranks_is_told_so() -> None:
    step = zf.train_step(lambda p, x: (x @ p["w"]).sum(), TX)
    state = zf.TrainState.create({"w": torch.zeros(100, 100)}, TX)
    for wrapped, told in ((step, True), (zf.remat(step), True), (zf.shard(step), False)):
        seen = zf.foresee(wrapped, state, torch.zeros(8, 100), ranks=8)
        assert ("knows of other ranks: each of 8" in str(seen)) is told


def test_gradients_that_are_not_compressed_yet_are_told() -> None:
    def seen(**how: Any) -> str:
        return str(trained(lambda step: zf.compress_grads(step, **how), stage=1, steps=3))

    assert "not compressed yet" in seen() and "not compressed yet" not in seen(freeze_step=1)


def test_frozen_parameters_stay_frozen() -> None:
    """Nobody reduces their gradients."""
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    module[0].requires_grad_(False)
    model = zf.functionalize(module)
    step = zf.train_step(lambda p, x: model.apply(p, x).square().mean(), TX)
    state = zf.TrainState.create(model.params, TX)
    seen = zf.foresee(zf.shard(step, stage=0), state, torch.zeros(8, 100), ranks=2)
    reduced = sum(n for label, n in seen.sent.by_label.items() if label.startswith("reduce"))
    assert reduced == pytest.approx(4 * (100 * 100 + 100), rel=0.02)  # with gaps between leaves


# A cluster


def test_175_billion_parameters_on_1024_ranks() -> None:
    """With 4 of 96 layers, unless all are asked for."""
    depth = 96 if Covering.whole else 4
    shape = GPTConfig(vocab=51200, width=12288, depth=depth, heads=96)
    step = zf.train_step(lambda p, ids: gpt.loss(p, ids, shape), TX)
    step = zf.precision(zf.donate(zf.shard(step, stage=3)), compute=torch.bfloat16)

    def state() -> Any:
        return zf.TrainState.create(gpt.init(shape, zf.random.key(0)), TX)

    ids = torch.zeros(8, 1025, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = zf.foresee(zf.remat(step), state, ids, ranks=1024, rank=5)
    count = sum(x.numel() for x in zf.tree.leaves(gpt.shapes(shape)))
    assert seen.state_bytes == pytest.approx(14 * count / 1024, rel=1e-3)
    # Narayanan et al. 2021, for forward; flash attention takes 5 products in backward, not 4. What
    # is recomputed ends before the last product of a layer, whose result nobody needs.
    tokens, h, s, v = 8 * 1024, 12288, 1024, 51200
    products, scores = 24 * tokens * depth * h * h, 4 * tokens * depth * s * h
    head = 2 * tokens * h * v
    assert seen.flops.by_phase == {
        "forward": products + scores + head,
        "backward": 2 * products + scores * 5 // 2 + 2 * head,
        "recomputed": products * 2 // 3 + scores,
    }
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20
