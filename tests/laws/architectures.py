"""Small models of many architectures, from configurations alone; and a batch for each.

Mixtures of experts, tied and factorised embeddings, layers used many times, state spaces,
encoders beside decoders, convolutions with running statistics, two towers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCAB, BATCH, LENGTH, LABELS = 61, 6, 8, 5
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
ENCODER = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
BOTH = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "dropout": 0.0,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
IMAGES = {"num_labels": LABELS}

# The model's class, and its configuration.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "qwen2, tied": ("Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "qwen3 of experts": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED),
    "phi": ("PhiForCausalLM", {**TEXT, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gptneox": ("GPTNeoXForCausalLM", TEXT),
    "gptj": ("GPTJForCausalLM", {**GPT, **STILL, "rotary_dim": 4}),
    "opt": (
        "OPTForCausalLM",
        {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0},
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    "falcon": ("FalconForCausalLM", TEXT),
    "mamba": ("MambaForCausalLM", {**TEXT, "state_size": 4}),
    "xlnet": (
        "XLNetLMHeadModel",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 24,
            "dropout": 0.0,
        },
    ),
    "bart": ("BartForConditionalGeneration", BOTH),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 8}),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "deberta": (
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 8}),
    "longformer": ("LongformerForMaskedLM", {**ENCODER, "attention_window": 4}),
}
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {**VISION, **IMAGES}),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [4, 8], "depths": [1, 2], "num_stages": 2, **IMAGES},
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "drop_path_rate": 0.0,
            **IMAGES,
        },
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": (
        "CLIPModel",
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 8},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BOTH,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
}
ALL = {**TEXTS, **PICTURES, **OTHERS}


def built(model: str, **settings: Any) -> Any:
    """A model of this class, in training mode."""
    import transformers

    kind = getattr(transformers, model)
    return kind(kind.config_class(**settings)).train()


def model_of(name: str) -> Any:
    """The model in training mode, without dropout."""
    model, settings = ALL[name]
    return built(model, **settings)


def loss_of(name: str) -> Callable[[Any], Tensor]:
    """From the model's output to a mean over the batch."""
    if name == "clip":  # its own loss compares all pairs of a batch
        return lambda out: 2 - (out.text_embeds * out.image_embeds).sum(dim=-1).mean()
    return lambda out: out.loss


def batch_of(name: str, i: int) -> dict[str, Tensor]:
    """Step ``i``'s global batch, as the model's keyword arguments."""
    generator = torch.Generator().manual_seed(i)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    if name in TEXTS:
        return {"input_ids": ids, "labels": ids}
    if name == "whisper":
        return {"input_features": torch.randn(BATCH, 4, 16, generator=generator), "labels": ids}
    pictures = torch.randn(BATCH, 3, 16, 16, generator=generator)
    if name == "clip":
        return {"input_ids": ids, "pixel_values": pictures}
    return {"pixel_values": pictures, "labels": torch.arange(BATCH) % LABELS}
