"""``functionalize(fuse=True)``: unmodified Hugging Face models with kernels in them.

On a machine without a GPU the kernels' torch twins run; that the kernels are their twins is
shown in ``tests/kernels``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.kernels.closeness import assert_near
from tests.laws import architectures
from tests.laws.architectures import ALL, batch_of, model_of
from tests.unit.fused_models import (
    TX,
    VOCAB,
    bert,
    build,
    flat,
    gpt2,
    llama,
    loss_of,
    modernbert,
    of_family,
    qwen2,
    tokens,
)
from zfunc import kernels
from zfunc.huggingface.fusion import fusible
from zfunc.modules.functional import functionalize

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")


PARTS = {
    llama: {"LlamaForCausalLM": 1, "LlamaAttention": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5},
    qwen2: {"Qwen2ForCausalLM": 1, "Qwen2Attention": 2, "Qwen2MLP": 2, "Qwen2RMSNorm": 5},
    gpt2: {"GPT2LMHeadModel": 1, "LayerNorm": 5, "NewGELUActivation": 2},
    bert: {"LayerNorm": 6, "BertSelfOutput": 2, "BertOutput": 2, "GELUActivation": 3},
    modernbert: {"ModernBertForMaskedLM": 1, "LayerNorm": 6, "GELUActivation": 3},
    # Weights that begin at zero; norms of queries and keys.
    of_family("Gemma2", head_dim=8, num_key_value_heads=1): {
        "Gemma2Attention": 2,
        "Gemma2RMSNorm": 9,
        "Gemma2MLP": 2,
    },
    of_family("Olmo2"): {"Olmo2Attention": 2, "Olmo2RMSNorm": 9, "Olmo2MLP": 2},
    # A part of each head turns, by halves or by neighbours; one product for gate and up.
    of_family(
        "Phi3",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ): {"Phi3Attention": 2, "Phi3MLP": 2},
    of_family("Glm", head_dim=8): {"GlmAttention": 2, "GlmMLP": 2, "GlmRMSNorm": 5},
    of_family("GPTNeoX"): {"GPTNeoXAttention": 2, "LayerNorm": 5, "GELUActivation": 2},
    of_family("Cohere"): {"CohereAttention": 2, "CohereMLP": 2},
    of_family("Helium", head_dim=8, num_key_value_heads=1): {
        "HeliumAttention": 2,
        "HeliumMLP": 2,
        "HeliumRMSNorm": 5,
    },
    of_family("Granite"): {"GraniteAttention": 2, "GraniteMLP": 2, "GraniteRMSNorm": 5},
    # Norms without weights.
    of_family("NanoChat"): {"NanoChatForCausalLM": 1, "NanoChatRMSNorm": 9},
}


def outcome(model: zf.Functional, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, logits and gradients of a few batches: the errors of a single one are a lottery."""

    def outputs(params: Any, ids: Tensor) -> Any:
        out = model.apply(params, input_ids=ids, labels=ids)
        return out.loss, out.logits.detach()

    batches = [zf.value_and_grad(outputs, has_aux=True)(model.params, tokens(i)) for i in range(6)]
    losses = torch.stack([loss for (loss, _), _ in batches]).to(kind)  # float32 of 16-bit logits
    logits = torch.stack([logits for (_, logits), _ in batches])
    return losses, logits, torch.stack([flat(grads) for _, grads in batches])


@pytest.mark.filterwarnings("ignore:.*bos_token_id")
@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_outputs_and_gradients_within_the_rule(make: Callable[[], Any]):
    for dtype in (torch.float32, torch.bfloat16):
        kinds = ((torch.float64, False), (dtype, False), (dtype, True))
        models = [build(make, kind, fuse) for kind, fuse in kinds]
        found = [outcome(model, kind) for model, (kind, _) in zip(models, kinds, strict=True)]
        for exact, plain, fused in zip(*found, strict=True):
            assert_near(fused, exact, plain)
    assert all(f"fused: {name} x {n}" in repr(models[2]) for name, n in PARTS[make].items())


def train(model: zf.Functional, steps: int, stage: int | None = None) -> tuple[Tensor, Tensor]:
    """Losses, and what the parameters have moved by."""
    step, first = zf.train_step(loss_of(model), TX), model.params
    step = step if stage is None else zf.remat(zf.shard(step, stage=stage))
    state, losses = step.place(zf.TrainState.create(first, TX)), []
    for i in range(steps):
        batch = tokens(i) if stage is None else zf.local_batch(tokens(i))
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].detach())
    return torch.stack(losses), flat(step.unplace(state).params) - flat(first)


def test_a_fused_llama_trains_as_an_unfused_one():
    """Twenty steps: as near to those in float64 as the unfused model is."""
    kinds = ((torch.float64, False), (torch.float32, False), (torch.float32, True))
    runs = [train(build(llama, dtype, fuse), 20) for dtype, fuse in kinds]
    for exact, plain, fused in zip(*runs, strict=True):
        assert_near(fused, exact, plain)


def test_sharded_and_recomputed():
    model = build(llama, torch.float64, True)
    held = model.params  # they are placed twice
    losses, moved = train(model, 2)
    assert zf.tree.paths(held) == zf.tree.paths(model.params)
    for theirs, same in zf.simulate(2)(train)(model, 2, 3):
        torch.testing.assert_close(theirs, losses)  # float32, as Hugging Face has it
        torch.testing.assert_close(same, moved, rtol=0, atol=1e-9)


class Own(nn.LayerNorm):
    """Means something else by its type."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_unknown_types_are_left_alone():
    with pytest.warns(UserWarning, match=r"found nothing in Sequential that a kernel takes over"):
        model = functionalize(nn.Sequential(nn.Linear(3, 3), Own(3)), fuse=True)
    x = torch.randn(2, 3)
    plain = functionalize(model.to_module(model.params))
    assert torch.equal(model.apply(model.params, x), plain.apply(plain.params, x))


def test_the_module_the_class_and_copies_of_it_stay_as_they_are():
    module = nn.Sequential(nn.LayerNorm(3), nn.GELU("tanh"))
    model = functionalize(module, fuse=True)
    x = torch.randn(2, 3)
    with kernels.use("triton"), pytest.raises(kernels.KernelError, match="tensors are on cpu"):
        model.apply(model.params, x)
    again = pickle.loads(pickle.dumps(model))
    with kernels.use("triton"):
        with pytest.raises(kernels.KernelError, match="tensors are on cpu"):
            again.apply(model.params, x)
        expected = module(x)
        torch.testing.assert_close(model.to_module(model.params)(x), expected)
    torch.testing.assert_close(model.apply(model.params, x), expected)


@pytest.mark.parametrize("wrap", [
    lambda step: step, lambda step: zf.shard(step, stage=3), lambda step: zf.remat(step),
    lambda step: zf.remat(zf.shard(step, stage=3)), lambda step: zf.accumulate(step, 2),
    lambda step: zf.offload(zf.shard(step, stage=3)), lambda step: zf.precision(step),
])  # fmt: skip
def test_tables_are_known_under_transforms(wrap: Any, monkeypatch: pytest.MonkeyPatch):
    """What is said of a table goes with it into layers that are gathered, recomputed, rounded."""
    calls: list[int] = []
    plain = kernels.rotary
    monkeypatch.setattr(kernels, "rotary", lambda *args: calls.append(1) or plain(*args))
    model = build(llama, torch.float32, True)
    with wrap(zf.train_step(loss_of(model), TX)) as step:
        state = step.place(zf.TrainState.create(model.params, TX))
        step(state, tokens(0))
    assert len(calls) >= 2 and len(calls) % 2 == 0


def test_prompts_are_fused_too(monkeypatch: pytest.MonkeyPatch):
    """Where layers that take single tokens have been put in before."""
    calls: list[int] = []
    plain = kernels.rotary
    monkeypatch.setattr(kernels, "rotary", lambda *args: calls.append(1) or plain(*args))
    model = functionalize(llama().eval(), fuse=True)
    zf.generate(model, model.params, tokens(0), max_new_tokens=3)
    assert len(calls) == 2  # a layer each, for the prompt alone


def test_a_network_with_dropout_and_a_last_product_of_another_dtype():
    """T5's: what is hidden takes the dtype of the last product, which stays float32."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.T5ForConditionalGeneration(config).train()
    module.double()
    for part in module.modules():
        if hasattr(part, "wo"):
            part.wo.float()
    model, fused = functionalize(module), functionalize(module, fuse=True)
    assert "T5DenseGatedActDense x 4" in repr(fused) and "T5LayerNorm x 12" in repr(fused)

    def loss(which: zf.Functional) -> Tensor:
        torch.manual_seed(3)  # the same units are dropped
        return which.apply(which.params, input_ids=tokens(0), labels=tokens(1)).loss

    torch.testing.assert_close(loss(fused), loss(model))


@pytest.mark.parametrize("name", ALL)
def test_models_of_many_architectures_are_the_same_fused(name: str):
    torch.manual_seed(0)
    module, loss = model_of(name), architectures.loss_of(name)
    if not fusible(module):
        pytest.fail(f"{name} has nothing that a kernel takes over")
    plain, fused = functionalize(module), functionalize(module, fuse=True)
    found = []
    for model in (plain, fused):

        def f(params: Any, model: zf.Functional = model) -> Tensor:
            return loss(model.apply(params, **batch_of(name, 0)))

        value, grads = zf.value_and_grad(f)(model.params)
        found.append((value, flat(grads)))
    (value, grads), (same, near) = found
    torch.testing.assert_close(same, value, rtol=1e-5, atol=1e-6)
    assert (near - grads).norm() <= 2e-5 * grads.norm()
