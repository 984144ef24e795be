"""Unmodified Hugging Face models, built from small configs: their own numbers, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.laws.architectures import ALL, ENCODER, GPT, GROUPED, STILL, T5, TEXT, VOCAB, built
from zfunc import random, tree
from zfunc.engine.primitives import Ref
from zfunc.modules.functional import functionalize
from zfunc.trees.tree import Layers

pytest.importorskip("transformers", reason="the `hf` extra is not installed")

SETTINGS = dict(ALL.values())  # of a model's class
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WAV2VEC = {
    **TEXT,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}


def ids() -> Tensor:
    return torch.randint(3, VOCAB, (2, 7))


def language() -> dict[str, Tensor]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def classes() -> dict[str, Tensor]:
    return {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def images(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 4, 16), "labels": ids()}


# model: its config's arguments, its inputs, its stacks of layers
MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]], dict[str, int]]] = {
    "LlamaForCausalLM": (GROUPED, language, {"model.layers": 2}),
    "GPT2LMHeadModel": (TOKENS | GPT | STILL, language, {"transformer.h": 2}),
    "BertModel": (ENCODER, tokens, {"encoder.layer": 2}),
    "BertForMaskedLM": (ENCODER, language, {"bert.encoder.layer": 2}),
    "T5ForConditionalGeneration": (T5, language, {"encoder.block": 2, "decoder.block": 2}),
    "OPTForCausalLM": (
        SETTINGS["OPTForCausalLM"] | {"word_embed_proj_dim": 16},
        language,
        {"model.decoder.layers": 2},
    ),
    "MistralForCausalLM": (SETTINGS["MistralForCausalLM"], language, {"model.layers": 2}),
    "Qwen2ForCausalLM": (GROUPED, language, {"model.layers": 2}),
    "GemmaForCausalLM": (GROUPED, language, {"model.layers": 2}),
    "PhiForCausalLM": (SETTINGS["PhiForCausalLM"], language, {"model.layers": 2}),
    "FalconForCausalLM": (SETTINGS["FalconForCausalLM"], language, {"transformer.h": 2}),
    "BloomForCausalLM": (SETTINGS["BloomForCausalLM"], language, {"transformer.h": 2}),
    "GPTNeoXForCausalLM": (SETTINGS["GPTNeoXForCausalLM"], language, {"gpt_neox.layers": 2}),
    "GPTJForCausalLM": (TOKENS | SETTINGS["GPTJForCausalLM"], language, {"transformer.h": 2}),
    "MixtralForCausalLM": (SETTINGS["MixtralForCausalLM"], language, {"model.layers": 2}),
    "MambaForCausalLM": (SETTINGS["MambaForCausalLM"], language, {"backbone.layers": 2}),
    "ViTForImageClassification": (
        SETTINGS["ViTForImageClassification"],
        images,
        {"vit.layers": 2},
    ),
    "SwinForImageClassification": (
        SETTINGS["SwinForImageClassification"],
        images,
        {"swin.encoder.layers": 2},
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        lambda: images(32),
        {"resnet.encoder.stages": 2, "classifier": 2},
    ),
    "CLIPTextModel": (TOKENS | TEXT, tokens, {"encoder.layers": 2}),
    "DistilBertForMaskedLM": (
        TOKENS
        | {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "dropout": 0.0}
        | {"attention_dropout": 0.0, "max_position_embeddings": 32},
        language,
        {"distilbert.transformer.layer": 2},
    ),
    "RobertaForMaskedLM": (ENCODER, language, {"roberta.encoder.layer": 2}),
    "ElectraForSequenceClassification": (
        SETTINGS["ElectraForMaskedLM"],
        classes,
        {"electra.encoder.layer": 2},
    ),
    "AlbertForMaskedLM": (
        SETTINGS["AlbertForMaskedLM"],
        language,
        {"albert.encoder.albert_layer_groups": 1},
    ),
    "DebertaV2ForMaskedLM": (
        SETTINGS["DebertaV2ForMaskedLM"],
        language,
        {"deberta.encoder.layer": 2},
    ),
    "BartForConditionalGeneration": (
        SETTINGS["BartForConditionalGeneration"],
        language,
        {"model.encoder.layers": 2, "model.decoder.layers": 2},
    ),
    "WhisperForConditionalGeneration": (
        SETTINGS["WhisperForConditionalGeneration"],
        speech,
        {"model.encoder.layers": 2, "model.decoder.layers": 2},
    ),
    "Wav2Vec2Model": (
        WAV2VEC,
        lambda: {"input_values": torch.randn(2, 200)},
        {"feature_extractor.conv_layers": 2, "encoder.layers": 2},
    ),
}


class Recomputed(Ref):
    """A layer that enters for its own call only, and again in backward."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def force(self) -> Any:
        raise AssertionError("a parameter was read outside its layer")

    def call(self, fn: Callable[..., Any], xs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        def run(*xs: Any) -> Any:
            return fn(tree.map(lambda p: p * 1, self.params), *xs, **kw)

        return checkpoint(run, *xs, use_reentrant=False)


def recomputed(params: Any) -> Any:
    if isinstance(params, Layers):
        return Layers(map(Recomputed, params))
    return {k: recomputed(v) for k, v in params.items()} if isinstance(params, dict) else params


def build(name: str) -> tuple[Any, dict[str, Tensor]]:
    settings, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    return built(name, **settings), inputs()


def loss_of(out: Any) -> Tensor:
    if getattr(out, "loss", None) is not None:
        return out.loss  # type: ignore[no-any-return]
    hidden = out.last_hidden_state
    loss = (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum()
    pooled = getattr(out, "pooler_output", None)
    return loss if pooled is None else loss + pooled.square().sum()


def differentiate(f: Any, prepare: Callable[[Any], Any], inputs: Any) -> tuple[Any, Any]:
    params = tree.map(lambda p: p.clone().requires_grad_(), f.params)
    named = tree.flatten_names(params)
    with random.scope(0):
        out = f.apply(prepare(params), **inputs)
    loss = loss_of(out)
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return (type(out), loss), dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_all_gradients_are_the_models_own(name: str) -> None:
    model, inputs = build(name)
    f = functionalize(model)
    parameters = dict(model.named_parameters())
    assert set(tree.flatten_names(f.params)) == set(parameters)
    assert set(parameters) <= set(model.state_dict())
    for stack, length in MODELS[name][2].items():
        node = f.params
        for key in stack.split("."):
            node = node[key]
        assert isinstance(node, Layers) and len(node) == length

    if getattr(model.config, "use_cache", False):
        inputs["use_cache"] = False  # a cache is written by the layers: not with recomputation
    results = [differentiate(f, prepare, inputs) for prepare in (lambda p: p, recomputed)]
    with random.scope(0):
        out = model(**inputs)
    expected = loss_of(out)
    expected.backward()
    for (kind, loss), grads in results:
        assert kind is type(out) and torch.equal(loss, expected)
        for path, p in parameters.items():
            if p.requires_grad:
                assert (grads[path] is None) == (p.grad is None), path
                assert p.grad is None or torch.equal(grads[path], p.grad), path


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_dropout_is_a_function_of_the_key(name: str) -> None:
    rate = {"attention_dropout": 0.2} if "Llama" in name else {}
    settings, inputs, _ = MODELS[name]
    model = built(name, **{k: (0.2 if "drop" in k else v) for k, v in settings.items()}, **rate)
    x, f = inputs(), functionalize(model)
    with random.scope(3):
        first = f.apply(f.params, **x).loss
    torch.rand(10)
    with random.scope(3):
        again = f.apply(f.params, **x).loss
    with random.scope(3):
        own = model(**x).loss
    with random.scope(4):
        other = f.apply(f.params, **x).loss
    assert torch.equal(first, again) and torch.equal(first, own) and not torch.equal(first, other)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_to_module_gives_the_same_model(name: str) -> None:
    model, x = build(name)
    f = functionalize(model)
    back = f.to_module(f.params)
    assert list(back.state_dict()) == list(model.state_dict())
    assert torch.equal(back(**x).loss, model(**x).loss)
    assert f.config is model.config
    tied = [n for n, p in model.named_parameters(remove_duplicate=False)]
    assert tied == [n for n, p in back.named_parameters(remove_duplicate=False)]


def test_a_models_own_checkpointing_is_switched_off_aloud() -> None:
    model, x = build("LlamaForCausalLM")
    expected = model(**x).loss
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM checkpoints itself.*zf\.remat"):
        f = functionalize(model)
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    params = tree.map(lambda p: p.clone().requires_grad_(), f.params)
    loss = f.apply(params, **x).loss
    assert torch.equal(loss, expected)
    assert all(g is not None for g in torch.autograd.grad(loss, tree.leaves(params)))


def test_hidden_states_and_generation_caches_pass_through() -> None:
    model, x = build("LlamaForCausalLM")
    f = functionalize(model.eval())
    out = f.apply(f.params, x["input_ids"], output_hidden_states=True, use_cache=True)
    own = model(x["input_ids"], output_hidden_states=True, use_cache=True)
    assert len(out.hidden_states) == len(own.hidden_states) == 3
    assert all(map(torch.equal, out.hidden_states, own.hidden_states))
    step = x["input_ids"][:, -1:]
    got = f.apply(f.params, step, past_key_values=out.past_key_values).logits
    assert torch.equal(got, model(step, past_key_values=own.past_key_values).logits)
