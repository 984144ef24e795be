"""Decoder layers of Hugging Face in fused blocks: the Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.kernels.closeness import assert_near
from zfunc import kernels, quant
from zfunc.language.decoding import decoder_of

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("bits", [16, 4])
def test_a_token_with_padding(bits: int):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.2).copy_(p.bfloat16())
    ids, mask = torch.randint(40, (2, 4)), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    functional = zf.functionalize(model)
    params = functional.params
    if bits == 4:
        params = quant.quantize_tree(params, 4, 32, model=functional)

    def logits(dtype: torch.dtype) -> Tensor:
        functional = zf.functionalize(model.to(dtype))
        cast = zf.tree.map(lambda x: x.to(dtype), params)
        decoder = decoder_of(functional)
        with torch.no_grad():
            with kernels.use(None):  # the prompt is nobody's business here
                _, cache = decoder.step(cast, decoder.start(2, 5, mask), ids)
            return decoder.step(cast, cache, ids[:, :1])[0]

    exact, plain = logits(torch.float64), logits(torch.bfloat16)
    with kernels.use("triton"):
        assert_near(logits(torch.bfloat16), exact, plain)
