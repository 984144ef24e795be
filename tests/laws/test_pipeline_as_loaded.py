"""Models as users load them, on the stages of a pipeline: float32 or bfloat16, parts fused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.architectures import GROUPED, VOCAB, built
from tests.laws.cases import assert_same
from tests.laws.covering import each
from tests.laws.plans_by_hand import spread
from zfunc import optim
from zfunc.huggingface import decoder_layers

pytest.importorskip("transformers")

LAYERS, MICROBATCHES = 4, 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": EXPERTS,
    "LlamaForCausalLM": {},
}
DECODERS = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
FLOATS, BITS = [torch.float32, torch.bfloat16], [None, 8, 4]
TX = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.05))


@cache
def model_of(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {**GROUPED, "num_hidden_layers": LAYERS, **KINDS.get(kind, {})}
    model = zf.functionalize(spread(built(kind, **sizes)).to(dtype))
    return model, model.params


def padded(n: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (n, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[n - 1, 3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(("kind", "dtype", "schedule"), each(KINDS, FLOATS, ["1f1b", "zb", "zbv"]))
def test_they_are_trained_as_on_one_process(kind: str, dtype: torch.dtype, schedule: str) -> None:
    model, params = model_of(kind, dtype)
    step = zf.train_step(lambda p, batch: model.apply(p, **batch).loss, TX)

    def trained(step: Any) -> Any:
        state, metrics = step(step.place(zf.TrainState.create(params, TX)), padded())
        return metrics, step.unplace(state).params

    wanted = trained(zf.accumulate(step, MICROBATCHES))
    staged = zf.pipeline(step, MICROBATCHES, schedule=schedule, pipe=2)
    for found in zf.simulate(2)(trained)(staged):
        assert_same(found, wanted)


@pytest.mark.parametrize(
    ("kind", "dtype", "bits", "schedule"),
    each({**dict.fromkeys(DECODERS), **KINDS}, FLOATS, BITS, ["1f1b", "zbv"]),
)
def test_they_continue_texts_as_on_one_process(
    kind: str, dtype: torch.dtype, bits: int | None, schedule: str
) -> None:
    model, params = model_of(kind, dtype)
    assert_continues(model, params, bits, schedule)


@pytest.mark.parametrize("kind", DECODERS)
def test_their_layers_take_a_token_in_few_operations(kind: str) -> None:
    """Or what these do on stages is not seen above."""
    sizes = {**GROUPED, "num_hidden_layers": LAYERS}
    assert decoder_layers.known(built(kind, **sizes).float()) == LAYERS


def assert_continues(
    model: Any, params: Any, bits: int | None = None, schedule: str = "1f1b"
) -> None:
    low: Any = model.apply if bits is None else zf.quantize(model.apply, bits=bits, group_size=4)
    held = params if bits is None else low.place(params)
    ids = padded(4)["input_ids"]
    # Products of another number of rows may round otherwise, and stages take texts by the pair.
    wanted = torch.cat([zf.generate(model, held, row, max_new_tokens=6) for row in ids.split(2)])

    def rank() -> Tensor:
        placed = zf.pipeline(low, 2, schedule=schedule, pipe=2).place(params)
        return zf.generate(model, placed, ids, max_new_tokens=6)

    for found in zf.simulate(2)(rank)():
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_texts_of_a_model_that_was_trained_with_a_loss_of_its_routers(kind: str) -> None:
    """Its config asks for what the routers chose, which layers keep, and texts do not need."""
    torch.manual_seed(0)
    sizes = {**GROUPED, "num_hidden_layers": LAYERS, "num_local_experts": 4}
    module = built(kind, **sizes, output_router_logits=True, num_experts_per_tok=2)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)  # some are made without numbers
    model = zf.functionalize(module, train=False)
    assert_continues(model, model.params)
