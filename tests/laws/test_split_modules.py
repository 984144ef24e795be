"""Modules on this rank's parts of their leaves compute what they do on whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.plans_by_hand import (
    gpt2,
    gpt2_plan,
    llama,
    llama_plan,
    local_params,
    loss_of,
    tokens,
)
from zfunc.modules.split_plans import SplitPlan
from zfunc.trees import tree

pytest.importorskip("transformers")

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (lambda: llama(4, 4), llama_plan),
    "llama, grouped": (lambda: llama(8, 4), llama_plan),
    "llama, 1 kv head": (lambda: llama(4, 1), llama_plan),
    "llama, 2 kv heads, biases": (lambda: llama(4, 2, attention_bias=True), llama_plan),
    "llama, 6 heads": (lambda: llama(6, 2), llama_plan),
    "llama, tied": (lambda: llama(4, 4, tie_word_embeddings=True, pad_token_id=1), llama_plan),
    "gpt2": (gpt2, gpt2_plan),
    "gpt2, 6 heads": (lambda: gpt2(n_head=6, n_embd=24), gpt2_plan),
}


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


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_one_process(name: str, ways: int) -> None:
    make, planner = MODELS[name]
    module = make()
    model = zf.functionalize(module, train=False)
    plan, ids = planner(module.config, ways), tokens()
    logits, grads = run(model, whole_params(model), ids)
    full = tree.flatten_names(model.params)

    def rank() -> tuple[Tensor, dict[str, Tensor]]:
        return run(model, local_params(model, full, plan, zf.rank()), ids)

    found = zf.simulate(ways)(rank)()
    for rank_index, (got, own) in enumerate(found):
        assert gap(got, logits) < 1e-9
        assert torch.equal(got, found[0][0])
        for leaf, g in own.items():
            assert gap(g, part(leaf, grads[leaf], plan, rank_index)) < 1e-9, leaf
            if leaf not in plan.splits:
                assert torch.equal(g, found[0][1][leaf]), leaf
