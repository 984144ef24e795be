"""Modules on this rank's parts of their leaves compute what they do on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws import plans_by_hand as by_hand
from tests.laws.architectures import TEXT, built
from tests.laws.covering import Covering, each
from tests.laws.plans_by_hand import llama, llama_plan, local_params, loss_of, split_step, tokens
from zfunc import optim
from zfunc.errors import PlacementError
from zfunc.huggingface import decoder_layers
from zfunc.huggingface.likeness import watched
from zfunc.modules.split_plans import SplitPlan
from zfunc.trees import tree
from zfunc.trees.nodes import NAMESPACE

pytest.importorskip("transformers")

TX = optim.adamw(1e-2, weight_decay=0.1)
Make, Planner = Callable[[], Any], Callable[[Any, int], SplitPlan]
MODELS: dict[str, tuple[Make, Planner]] = {
    "llama": (lambda: llama(4, 4), llama_plan),
    "llama, grouped": (lambda: llama(8, 4), llama_plan),
    "llama, 1 kv head": (lambda: llama(4, 1), llama_plan),
    "llama, 2 kv heads, biases": (lambda: llama(4, 2, attention_bias=True), llama_plan),
    "llama, 6 heads": (lambda: llama(6, 2), llama_plan),
    "llama, tied": (lambda: llama(4, 4, tie_word_embeddings=True, pad_token_id=1), llama_plan),
    "gpt2": (by_hand.gpt2, by_hand.gpt2_plan),
    "gpt2, 6 heads": (lambda: by_hand.gpt2(n_head=6, n_embd=24), by_hand.gpt2_plan),
    "qwen3": (by_hand.qwen3, by_hand.qwen3_plan),
    "mixtral": (by_hand.mixtral, by_hand.mixtral_plan),
}
STEPS = [
    ("llama, 6 heads", 4, 1, 3),
    ("llama, tied", 2, 2, 0),
    ("gpt2", 3, 1, 2),
    ("qwen3", 4, 1, 1),
]
if Covering.whole:
    STEPS = [
        (name, ways, data, stage)
        for name in MODELS
        for ways, data in ((2, 1), (3, 1), (4, 1), (2, 2), (2, 3))
        for stage in range(4)
    ]


def run(model: Any, params: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = tree.flatten_names(params)
    logits = model.apply(params, input_ids=ids).logits
    grads = torch.autograd.grad(loss_of(logits, ids), [*leaves.values()])
    return logits.detach(), dict(zip(leaves, grads, strict=True))


def whole_params(model: Any) -> Any:
    return tree.map(lambda x: x.detach().clone().requires_grad_(), model.params)


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference as a part of the largest number; infinite where shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) if a.numel() else 0.0


def part(name: str, x: Tensor, plan: SplitPlan, rank: int) -> Tensor:
    split = plan.splits.get(name)
    return x if split is None else split.local(x, rank)


def planned(name: str, ways: int) -> tuple[Any, SplitPlan]:
    make, planner = MODELS[name]
    module = make()
    return zf.functionalize(module, train=False), planner(module.config, ways)


@pytest.mark.parametrize(("name", "ways"), each(MODELS, [1, 2, 3, 4], times=2))
def test_logits_and_gradients_are_those_of_one_process(name: str, ways: int) -> None:
    model, plan = planned(name, ways)
    full, ids = tree.flatten_names(model.params), tokens()
    logits, grads = run(model, whole_params(model), ids)

    def rank() -> tuple[Tensor, dict[str, Tensor]]:
        return run(model, local_params(model, full, plan, zf.rank()), ids)

    found = zf.simulate(ways)(rank)()
    for r, (got, own) in enumerate(found):
        assert gap(got, logits) < 1e-9
        assert torch.equal(got, found[0][0])
        for leaf, g in own.items():
            assert gap(g, part(leaf, grads[leaf], plan, r)) < 1e-9, leaf
            if leaf not in plan.splits:
                assert torch.equal(g, found[0][1][leaf]), leaf


def test_indices_that_several_ranks_have_get_the_same_gradient_there() -> None:
    model, plan = planned("llama, 1 kv head", 4)
    full = tree.flatten_names(model.params)
    name = "model.layers.0.self_attn.k_proj.weight"

    def rank() -> Tensor:
        return run(model, local_params(model, full, plan, zf.rank()), tokens())[1][name]

    first, *others = zf.simulate(4)(rank)()
    assert plan.splits[name].shared
    assert all(torch.equal(first, g) for g in others)


# --- steps -------------------------------------------------------------------------------------


def trained(params: Any, loss: Any, wrap: Callable[[Any], Any], ways: int) -> list[Any]:
    """Losses and params after three steps on every rank."""
    full = zf.TrainState.create(params, TX)

    def rank() -> Any:
        step = wrap(zf.train_step(loss, TX))
        state, losses = step.place(full), []
        for i in range(3):
            state, metrics = step(state, step.local_batch(tokens(i, 6)))
            losses.append(float(metrics["loss"]))
        return losses, tree.flatten_names(step.unplace(state).params)

    return zf.simulate(ways)(rank)()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("name", "ways", "data", "stage"), STEPS)
def test_a_step_trains_as_one_process_does(
    name: str, ways: int, data: int, stage: int, remat: bool
) -> None:
    model, plan = planned(name, ways)

    def wrap(step: Any) -> Any:
        made = split_step(step, plan, stage, data)
        return zf.remat(made) if remat else made

    def loss(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, input_ids=ids).logits, ids)

    ((losses, params),) = trained(model.params, loss, lambda step: step, 1)
    for got, end in trained(model.params, loss, wrap, ways * data):
        assert got == pytest.approx(losses, abs=1e-9)
        assert max(gap(end[k], params[k]) for k in params) < 1e-9


def test_copies_in_a_step_are_told_what_they_are() -> None:
    model, plan = planned("llama", 2)

    def loss(params: Any, ids: Tensor) -> Tensor:
        copies = optree.tree_map(lambda x: x * 1, params, namespace=NAMESPACE)
        return loss_of(model.apply(copies, input_ids=ids).logits, ids)

    def rank() -> Any:
        step = split_step(zf.train_step(loss, TX), plan)
        return step(step.place(zf.TrainState.create(model.params, TX)), tokens())

    with pytest.raises(PlacementError, match="of another shape") as error:
        zf.simulate(2)(rank)()
    assert "do not say that they are parts" in "".join(error.value.__notes__)


def test_a_split_model_beside_a_whole_one() -> None:
    student, plan = planned("llama", 2)
    teacher = zf.functionalize(llama(2, 1), train=False)
    ids = tokens()

    def rank() -> Tensor:
        mine = local_params(student, tree.flatten_names(student.params), plan, zf.rank())
        out: Tensor = student.apply(mine, input_ids=ids).logits.detach()
        return out - teacher.apply(teacher.params, input_ids=ids).logits

    want = student.apply(student.params, input_ids=ids).logits
    want = want - teacher.apply(teacher.params, input_ids=ids).logits
    assert all(gap(got, want) < 1e-9 for got in zf.simulate(2)(rank)())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_model_in_the_tree_of_a_split_one(stage: int) -> None:
    model, plan = planned("llama, grouped", 2)
    other = zf.functionalize(llama(2, 1, num_hidden_layers=1), train=False)
    params = {"first": model.params, "second": other.params}

    def loss(params: Any, ids: Tensor) -> Tensor:
        first = model.apply(params["first"], input_ids=ids).logits
        return loss_of(first + other.apply(params["second"], input_ids=ids).logits, ids)

    ((losses, want),) = trained(params, loss, lambda step: step, 1)
    for got, end in trained(params, loss, lambda step: split_step(step, plan, stage), 2):
        assert got == pytest.approx(losses, abs=1e-9)
        assert max(gap(end[k], want[k]) for k in want) < 1e-9


@pytest.mark.parametrize(("name", "ways"), [("llama, 6 heads", 4), ("gpt2", 3)])
def test_texts_that_split_models_generate(name: str, ways: int) -> None:
    model, plan = planned(name, ways)
    ids, full = tokens()[:, :4], zf.TrainState.create(model.params, TX)
    want = zf.generate(model, model.params, ids, max_new_tokens=6)

    def rank() -> Tensor:
        step = split_step(zf.train_step(lambda p, _: p, TX), plan)
        return zf.generate(model, step.place(full).params, ids, max_new_tokens=6)

    assert all(torch.equal(got, want) for got in zf.simulate(ways)(rank)())


# --- kernels -----------------------------------------------------------------------------------


def plain_llama() -> Any:
    """One whose classes are Hugging Face's own, as kernels know them."""
    torch.manual_seed(0)
    settings = {**TEXT, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return built("LlamaForCausalLM", **settings, head_dim=by_hand.HEAD_DIM).double().eval()


def test_layers_for_single_tokens_leave_alone_what_ends_in_a_sum() -> None:
    module = plain_llama()
    pool = zf.functionalize(module)._pool.fused(decoder_layers.fuse)
    for found in (pool, pool.split(llama_plan(module.config, 2), 0)):
        with found.lend() as template:  # what layers did before their calls were routed
            fused = [isinstance(forward, partial) for forward in template.forwards]
        assert fused == [found is pool] * 2


def test_kernels_of_parts_of_layers_run_on_parts_of_leaves() -> None:
    module = plain_llama()
    model, plan = zf.functionalize(module, train=False, fuse=True), llama_plan(module.config, 2)
    full, ids = tree.flatten_names(model.params), tokens()
    with model._pool.split(plan, 0).lend() as template:
        assert watched(template.modules["model.layers.0.mlp"])
    logits, grads = run(model, whole_params(model), ids)

    def rank() -> tuple[Tensor, dict[str, Tensor]]:
        return run(model, local_params(model, full, plan, zf.rank()), ids)

    for r, (got, own) in enumerate(zf.simulate(2)(rank)()):
        assert gap(got, logits) < 1e-9
        assert max(gap(g, part(leaf, grads[leaf], plan, r)) for leaf, g in own.items()) < 1e-9


# --- what goes over the wire -------------------------------------------------------------------


def sent(remat: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Numbers of sums of activations of a step, and their bytes; and those of one activation."""
    model, plan = planned("llama", 2)
    full = zf.TrainState.create(model.params, TX)

    def loss(params: Any, ids: Tensor) -> Tensor:
        return loss_of(model.apply(params, input_ids=ids).logits, ids)

    def rank() -> Any:
        step = split_step(zf.train_step(loss, TX), plan)
        step = zf.remat(step) if remat else step
        state = step.place(full)
        with zf.comm.ledger() as led:
            step(state, tokens())
        return led.calls_by_label, led.by_label

    calls, payload = zf.simulate(2)(rank)()[0]
    return calls, payload, tokens().numel() * model.config.hidden_size * 8


def test_a_layer_sums_twice_forward_and_twice_backward() -> None:
    calls, payload, once = sent(remat=False)
    layers = 2
    assert calls["tensor forward"] == calls["tensor backward"] == 2 * layers
    assert payload["tensor forward"] == payload["tensor backward"] == 2 * layers * once
    assert (calls["tensor embed"], payload["tensor embed"]) == (1, once)
    assert calls["tensor head"] == 2  # its outputs are gathered, its input's gradient is summed
    assert calls["tensor between"] == calls["tensor shared rows"] == 0


def test_what_is_computed_again_sums_three_times_forward() -> None:
    calls, payload, once = sent(remat=True)
    assert calls["tensor forward"] == 6 and calls["tensor backward"] == 4
    assert payload["tensor forward"] == 6 * once
