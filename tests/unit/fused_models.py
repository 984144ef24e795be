"""Small models that are fused in tests, and what is done with them.

Where there is no Hugging Face, tests that import this are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc import optim
from zfunc.modules.functional import functionalize

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")

VOCAB, LENGTH = 61, 8
TX = optim.adamw(1e-3)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_key_value_heads=1))


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCAB}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still, **ends))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **CALM))


def modernbert() -> Any:
    sizes = {"global_attn_every_n_layers": 2, "local_attention": 4, "pad_token_id": 0}
    ends = {"cls_token_id": 1, "sep_token_id": 2}
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SIZES, **sizes, **ends)
    )


def of_family(name: str, **how: Any) -> Callable[[], Any]:
    """A language model of another family, whose norms are not all ones."""

    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**SIZES, **how, pad_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for x in model.parameters():
                if x.dim() == 1:
                    x.add_(torch.randn_like(x) / 4)
        return model

    make.__name__ = name
    return make


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(5)), 1e-3

    def forward(self, hidden: Tensor) -> Tensor:
        input_dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden.to(input_dtype)


def build(make: Callable[[], Any], dtype: torch.dtype, fuse: bool) -> zf.Functional:
    torch.manual_seed(0)
    return functionalize(make().to(dtype).train(), fuse=fuse)


def tokens(i: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(i))


def flat(tree: Any) -> Tensor:
    return torch.cat([x.flatten() for x in zf.tree.leaves(tree)])


def loss_of(model: zf.Functional) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, ids: model.apply(params, input_ids=ids, labels=ids).loss
