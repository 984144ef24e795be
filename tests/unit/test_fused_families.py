"""Every causal language model of Hugging Face that a small configuration makes: the same, fused.

Some of them here, all with ``--whole``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import Covering
from zfunc.huggingface.fusion import fusible

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")

VOCAB, MOST = 61, 20_000_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    **dict.fromkeys(
        ("attention_dropout", "residual_dropout", "hidden_dropout", "dropout", "resid_pdrop",
         "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0
    ),
}  # fmt: skip


def small(kind: str, name: str) -> Any | None:
    """A model in training mode; None if these settings make none, or a great one."""
    try:
        config = transformers.CONFIG_MAPPING[kind](**SIZES)
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if size > MOST:
            return None
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).train()
        with torch.no_grad():
            model(input_ids=torch.arange(3, 11)[None])
            for x in model.parameters():
                if x.dim() < 2:
                    x.add_(torch.randn_like(x) / 8)  # norms and biases that show
    except Exception:  # configurations that want more than sizes raise anything
        return None
    return model


def outcome(model: zf.Functional, ids: Tensor) -> tuple[Tensor, Tensor]:
    def loss(params: Any) -> Tensor:
        found: Tensor = model.apply(params, input_ids=ids, labels=ids).loss
        return found

    value, grads = zf.value_and_grad(loss)(model.params)
    return value, torch.cat([x.flatten() for x in zf.tree.leaves(grads)])


@pytest.mark.filterwarnings("ignore")  # of the models' own
def test_causal_language_models_are_the_same_fused():
    from transformers.models.auto import modeling_auto

    names = list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    names = names if Covering.whole else names[::12]
    ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    compared, wrong = [], []
    for kind, name in names:
        model = small(kind, name)
        if model is None or not fusible(model):
            continue
        functions = (zf.functionalize(model), zf.functionalize(model, fuse=True))
        (value, grads), (same, near) = (outcome(f, ids) for f in functions)
        compared.append(kind)
        if (near - grads).norm() > 3e-5 * grads.norm() or (same - value).abs() > 1e-5:
            wrong.append((kind, repr(functions[1])))
    assert not wrong
    print(f"{len(compared)} of {len(names)}:", *compared)
    assert len(compared) > len(names) / 2  # else it says little
