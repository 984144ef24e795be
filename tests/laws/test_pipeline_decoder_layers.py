"""Decoder layers that take a token in few operations, on the stages of a pipeline."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.architectures import GROUPED, built
from tests.laws.covering import each
from tests.laws.plans_by_hand import spread
from zfunc.huggingface import decoder_layers

pytest.importorskip("transformers")

LAYERS, NEW = 4, 6
KINDS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
BITS = [None, 8, 4]
FLOATS = [torch.float32, torch.bfloat16]


@cache
def model_of(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = spread(built(kind, **{**GROUPED, "num_hidden_layers": LAYERS})).to(dtype)
    assert decoder_layers.known(module) == LAYERS
    model = zf.functionalize(module, train=False)
    return model, model.params


@pytest.mark.parametrize(("kind", "bits", "dtype"), each(KINDS, BITS, FLOATS))
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_their_texts_are_those_of_one_process(
    kind: str, bits: int | None, dtype: torch.dtype, schedule: str
) -> None:
    model, params = model_of(kind, dtype)
    low = model.apply if bits is None else zf.quantize(model.apply, bits=bits, group_size=4)
    ids = torch.randint(2, 13, (4, 6), generator=torch.Generator().manual_seed(1))
    held = params if bits is None else low.place(params)
    # Products of another number of rows may round otherwise, and stages take texts by the pair.
    wanted = torch.cat([zf.generate(model, held, row, max_new_tokens=NEW) for row in ids.split(2)])

    def rank() -> Tensor:
        placed = zf.pipeline(low, 2, schedule=schedule, pipe=2).place(params)
        return zf.generate(model, placed, ids, max_new_tokens=NEW)

    for found in zf.simulate(2)(rank)():
        assert torch.equal(found, wanted)
