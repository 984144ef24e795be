"""Unmodified Hugging Face models, built from small configs: their own numbers, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zfunc import random, tree
from zfunc.engine.primitives import Ref
from zfunc.modules.functional import functionalize
from zfunc.trees.tree import Layers

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")

VOCAB, WIDTH = 64, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
CALM = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = TOKENS | {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT2_CALM = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART = TOKENS | {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
}
IMAGES = CALM | {"image_size": 16, "patch_size": 8}
WHISPER = BART | {
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [1, 2],
    "window_size": 2,
    "drop_path_rate": 0.0,
}
WAV2VEC = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
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
    return {"input_features": torch.randn(2, 8, 32), "labels": ids()}


# model: its config, the config's arguments, its inputs, its stacks of layers
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]], dict[str, int]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED, language, {"model.layers": 2}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2_CALM, language, {"transformer.h": 2}),
    "BertModel": ("BertConfig", CALM, tokens, {"encoder.layer": 2}),
    "BertForMaskedLM": ("BertConfig", CALM, language, {"bert.encoder.layer": 2}),
    "T5ForConditionalGeneration": (
        "T5Config",
        T5 | {"dropout_rate": 0.0},
        language,
        {"encoder.block": 2, "decoder.block": 2},
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        SIZES | {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": WIDTH},
        language,
        {"model.decoder.layers": 2},
    ),
    "MistralForCausalLM": (
        "MistralConfig",
        GROUPED | {"sliding_window": 4},
        language,
        {"model.layers": 2},
    ),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, language, {"model.layers": 2}),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED | {"head_dim": 8}, language, {"model.layers": 2}),
    "PhiForCausalLM": ("PhiConfig", SIZES, language, {"model.layers": 2}),
    "FalconForCausalLM": ("FalconConfig", SIZES, language, {"transformer.h": 2}),
    "BloomForCausalLM": (
        "BloomConfig",
        TOKENS | {"hidden_size": WIDTH, "n_layer": 2, "n_head": 2},
        language,
        {"transformer.h": 2},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES, language, {"gpt_neox.layers": 2}),
    "GPTJForCausalLM": (
        "GPTJConfig",
        GPT2_CALM | {"rotary_dim": 4},
        language,
        {"transformer.h": 2},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        language,
        {"model.layers": 2},
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        TOKENS | {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4},
        language,
        {"backbone.layers": 2},
    ),
    "ViTForImageClassification": ("ViTConfig", IMAGES, images, {"vit.layers": 2}),
    "SwinForImageClassification": ("SwinConfig", SWIN, images, {"swin.encoder.layers": 2}),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        lambda: images(32),
        {"resnet.encoder.stages": 2, "classifier": 2},
    ),
    "CLIPTextModel": ("CLIPTextConfig", SIZES, tokens, {"encoder.layers": 2}),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        TOKENS
        | {"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0}
        | {"attention_dropout": 0.0, "max_position_embeddings": 32},
        language,
        {"distilbert.transformer.layer": 2},
    ),
    "RobertaForMaskedLM": ("RobertaConfig", CALM, language, {"roberta.encoder.layer": 2}),
    "ElectraForSequenceClassification": (
        "ElectraConfig",
        CALM | {"embedding_size": 8},
        classes,
        {"electra.encoder.layer": 2},
    ),
    "AlbertForMaskedLM": (
        "AlbertConfig",
        CALM | {"embedding_size": 8},
        language,
        {"albert.encoder.albert_layer_groups": 1},
    ),
    "DebertaV2ForMaskedLM": (
        "DebertaV2Config",
        CALM | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        language,
        {"deberta.encoder.layer": 2},
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        BART | {"max_position_embeddings": 32},
        language,
        {"model.encoder.layers": 2, "model.decoder.layers": 2},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        WHISPER,
        speech,
        {"model.encoder.layers": 2, "model.decoder.layers": 2},
    ),
    "Wav2Vec2Model": (
        "Wav2Vec2Config",
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


def build(name: str, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    config, arguments, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**arguments, **more))
    return model.train(), inputs()


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
    for stack, length in MODELS[name][3].items():
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
    config, arguments, inputs, _ = MODELS[name]
    arguments = {k: (0.2 if "drop" in k else v) for k, v in arguments.items()} | rate
    model = getattr(transformers, name)(getattr(transformers, config)(**arguments)).train()
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
