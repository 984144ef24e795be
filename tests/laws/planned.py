"""Small Hugging Face models of many families, and what each rank of a plan makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import zfunc as zf
from tests.laws import architectures
from tests.laws.architectures import BATCH, LENGTH, VOCAB, batch_of, built
from tests.laws.plans_by_hand import local_params
from zfunc.layout.splits import Part, mark
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import SplitPlan
from zfunc.probing.exactness import Doubled
from zfunc.trees import tree

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
KV: dict[str, Any] = {**BASE, "num_key_value_heads": 2}
OWN: dict[str, Any] = {**KV, "head_dim": 12}
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
FALCON = {**BASE, "num_kv_heads": 2, "new_decoder_architecture": True}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# The model's class, its configuration, and how much of its layers is split over 2 ranks at least.
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("LlamaForCausalLM", KV, 0.98),
    "llama, 1 kv head": ("LlamaForCausalLM", {**KV, "num_key_value_heads": 1}, 0.98),
    "llama, tied": ("LlamaForCausalLM", {**KV, "tie_word_embeddings": True}, 0.98),
    "mistral": ("MistralForCausalLM", KV, 0.98),
    "qwen2": ("Qwen2ForCausalLM", KV, 0.98),
    "qwen3": ("Qwen3ForCausalLM", OWN, 0.98),
    "phi3": ("Phi3ForCausalLM", KV, 0.98),
    "phi3, 1 kv head": ("Phi3ForCausalLM", {**KV, "num_key_value_heads": 1}, 0.98),
    "phi": ("PhiForCausalLM", BASE, 0.98),
    "gemma2": ("Gemma2ForCausalLM", OWN, 0.98),
    "gemma3": ("Gemma3ForCausalLM", OWN, 0.98),
    "glm": ("GlmForCausalLM", OWN, 0.98),
    "cohere": ("CohereForCausalLM", KV, 0.98),
    "bitnet": ("BitNetForCausalLM", KV, 0.98),
    "olmo2": ("Olmo2ForCausalLM", KV, 0.98),
    "gptneox": ("GPTNeoXForCausalLM", BASE, 0.97),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, 0.98),
    "gpt2": ("GPT2LMHeadModel", GPT, 0.98),
    "opt": ("OPTForCausalLM", {**BASE, "ffn_dim": 80, "word_embed_proj_dim": 48}, 0.97),
    "bloom": ("BloomForCausalLM", BLOOM, 0.98),
    "falcon": ("FalconForCausalLM", FALCON, 0.98),
    "falcon, 1 kv head": (
        "FalconForCausalLM",
        {**BASE, "multi_query": True, "new_decoder_architecture": False},
        0.98,
    ),
    "gptbigcode": ("GPTBigCodeForCausalLM", GPT, 0.98),
    "codegen": ("CodeGenForCausalLM", {**GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4}, 0.98),
    "codegen, 4 heads": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, 0.6),
    "stablelm": (
        "StableLmForCausalLM",
        {**KV, "num_key_value_heads": 4, "hidden_size": 64},
        0.98,
    ),
    "starcoder2": ("Starcoder2ForCausalLM", KV, 0.97),
    "granite": ("GraniteForCausalLM", KV, 0.98),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        0.98,
    ),
    "mixtral": ("MixtralForCausalLM", {**KV, "num_local_experts": 4}, 0.98),
    "qwen2 of experts": (
        "Qwen2MoeForCausalLM",
        {**KV, **EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
        0.97,
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**OWN, "num_local_experts": 4, "num_experts_per_tok": 2},
        0.98,
    ),
    "deepseek": ("DeepseekV3ForCausalLM", LATENT, 0.9),
    "nemotron": ("NemotronForCausalLM", KV, 0.98),
    "smollm3": ("SmolLM3ForCausalLM", KV, 0.98),
    "bert": ("BertForMaskedLM", {**BASE, "max_position_embeddings": 32}, 0.97),
    "t5": ("T5ForConditionalGeneration", T5, 0.97),
}
WELL = ("bart", "albert", "roberta", "deberta", "electra", "vit", "clip", "whisper")
OTHERS = {
    **dict.fromkeys(WELL, 0.9),
    "swin": 0.85,
    "mamba": 0.0,
    "xlnet": 0.3,
    "longformer": 0.2,
    "convnext": 0.4,
}
HEADS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)


def grown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Two heads become four."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out[key] = grown(value) if isinstance(value, Mapping) else value
        if key in HEADS and value == 2:
            out[key] = 4
    return out


def model_of(name: str) -> tuple[Functional, dict[str, Tensor]]:
    """A model in float64, and its arguments."""
    torch.manual_seed(0)
    if name in FAMILIES:
        kind, settings, _ = FAMILIES[name]
        batch = {"input_ids": batch_of("mistral", 0)["input_ids"]}
    else:
        kind, settings = architectures.ALL[name]
        settings = grown(settings)
        batch = {key: x for key, x in batch_of(name, 0).items() if key != "labels"}
    module = built(kind, **settings).double().eval()
    if getattr(module.config, "_experts_implementation", None) is not None:
        module.config._experts_implementation = "eager"  # the others have no float64
    with torch.no_grad():
        for p in module.parameters():  # biases and norms, too, matter
            p.add_(0.05 * torch.randn_like(p))
    model = zf.functionalize(module, train=False)
    if "decoder_input_ids" in model.signature.parameters:
        batch["decoder_input_ids"] = torch.randint(3, VOCAB, (BATCH, LENGTH))
    return model, {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}


def graded(
    model: Functional, params: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The model's logits, and gradients of a sum of them with random weights."""
    leaves = tree.flatten_names(params)
    with Doubled():
        out = model.apply(params, **batch)
    logits = out.logits if "logits" in out else out.logits_per_text
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad((logits * weights).sum(), [*leaves.values()], allow_unused=True)
    return logits.detach(), dict(zip(leaves, grads, strict=True))


def norm_of(grads: Mapping[str, Tensor | None], plan: SplitPlan) -> float:
    """The norm of all gradients, from a rank's parts of them."""
    mesh = zf.mesh(data=1, tensor=plan.ways)
    told = {
        name: mark(g.clone(), Part(plan.splits.get(name), mesh, "tensor", plan))
        for name, g in grads.items()
        if g is not None
    }
    return float(tree.global_norm(told))


def check(model: Functional, plan: SplitPlan, batch: Mapping[str, Tensor]) -> None:
    """Logits, gradients and their norm on all ranks are those of one process, to 1e-9."""
    full = tree.flatten_names(model.params)
    whole = tree.map(lambda x: x.detach().clone().requires_grad_(), model.params)
    logits, grads = graded(model, whole, batch)
    norm = float(tree.global_norm({name: g for name, g in grads.items() if g is not None}))

    def own() -> tuple[Tensor, dict[str, Tensor | None], float]:
        logits, grads = graded(model, local_params(model, full, plan, zf.rank()), batch)
        return logits, grads, norm_of(grads, plan)

    parts = zf.simulate(plan.ways)(own)()
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    for rank, (got, mine, total) in enumerate(parts):
        assert abs(total - norm) <= 1e-9 * norm
        assert float((got - logits).abs().max() / logits.abs().max()) < 1e-9
        for name, g in mine.items():
            want, split = grads[name], plan.splits.get(name)
            assert (g is None) == (want is None), name
            if g is None or want is None:
                continue
            # A bias of keys has no gradient but rounding.
            scale = max(float(want.abs().max()), 1e-6 * largest)
            want = want if split is None else split.local(want, rank)
            assert g.shape == want.shape, name
            if g.numel():
                assert float((g - want).abs().max()) / scale < 1e-9, (name, rank)


def share_split(model: Functional, plan: SplitPlan) -> float:
    """Which part of the parameters of layers is split."""
    anatomy = model._pool.anatomy
    layers = {leaf.name: leaf.shape.numel() for unit in anatomy.units for leaf in unit.leaves}
    return sum(layers[name] for name in plan.splits if name in layers) / sum(layers.values())
