"""Unmodified models in chunks give the bits that they give whole: text, pictures, experts.

In float64, with padding, at two lengths. A table that two chunks use gets its gradient as a sum in
another order; everything else is compared bitwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import zfunc as zf
from tests.laws.covering import pairs
from tests.unit import in_chunks
from tests.unit.in_chunks import whole, worst
from zfunc.language import gpt
from zfunc.layout.cutting import make_layout
from zfunc.modules.functional import Functional
from zfunc.ranks.keys import scope
from zfunc.rehearsal.rehearsal import rehearse

VOCAB, LAYERS = 64, 4
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
MASKED = {**TEXT, "hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.25}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4}
T5 |= {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0}
PICTURE = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
PICTURE |= {"intermediate_size": 64, "image_size": 16, "patch_size": 8, "num_labels": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DROPS = {"resid_pdrop": 0.25, "embd_pdrop": 0.25, "attn_pdrop": 0.25}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": False}),
    "llama, tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, dropout": ("GPT2LMHeadModel", {**GPT2, **DROPS}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "qwen3 of experts": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "bert, dropout": ("BertForMaskedLM", MASKED),
    "albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 8, "num_hidden_groups": LAYERS}),
    "t5, dropout": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.25}),
    "vit": ("ViTForImageClassification", PICTURE),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch.set_default_dtype(before)


def made(name: str, fuse: bool = False) -> Functional:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    module = cls(cls.config_class(**sizes)).double()
    for part in module.modules():
        if getattr(getattr(part, "config", None), "_experts_implementation", None) is not None:
            part.config._experts_implementation = "eager"  # the others have no float64
    return zf.functionalize(module, train="dropout" in name, fuse=fuse)


def batch(name: str, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    if name == "vit":
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 4])}
    ids = torch.randint(1, VOCAB, (4, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:], mask[2, -2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def loss_of(model: Functional, **more: Any) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """From logits in float64: a model's own loss is computed in float32."""

    def loss(p: Any, given: dict[str, Tensor]) -> Tensor:
        logits = model.apply(p, **given, **more).logits
        labels = given["labels"]
        if logits.dim() == 3:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return F.cross_entropy(logits, labels)

    return loss


def dealt(loss: Any, params: Any, given: Any, chunks: int) -> list[int]:
    """Layers to chunks in the order in which they run, which is not that of a dict's keys."""
    layout = make_layout(params, world=1)
    order = [call.layer for call in rehearse(loss, layout, (given,)).calls]
    return [order.index(k) * chunks // len(order) for k in range(len(layout.layers))]


@pytest.mark.parametrize(("name", "chunks", "length"), pairs(MODELS, (2, 3, 4), (12, 9)))
def test_a_model_in_chunks_is_the_model(name: str, chunks: int, length: int) -> None:
    model, given = made(name), batch(name, length)
    more = {} if name in ("vit", "albert") or "bert" in name else {"use_cache": False}
    loss, scope_of = loss_of(model, **more), scope.folded(zf.random.key(3))
    with scope(7):  # dropout outside layers
        want = whole(loss, model.params, (given,), scope_of=scope_of)
    cuts = dealt(loss, model.params, given, chunks)
    got = in_chunks.run(
        loss, model.params, (given,), chunk_of=cuts, scope_of=scope_of, around=lambda: scope(7)
    )
    assert torch.equal(got.result, want[0])
    shared = [sum(i in used for used in got.plan.uses) > 1 for i in range(len(got.grads))]
    assert worst(got, want) <= (1e-14 if any(shared) or "t5" in name else 0.0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_our_gpt_in_chunks(chunks: int, tied: bool) -> None:
    config = gpt.GPTConfig(vocab=VOCAB, width=32, depth=LAYERS, heads=2, tied=tied)
    keys = iter(zf.random.split(zf.random.key(1), 100))
    params = zf.tree.map(
        lambda x: x.double() + 0.05 * zf.random.normal(next(keys), x.shape),
        gpt.init(config, zf.random.key(0)),
    )
    ids = batch("", 13)["input_ids"]

    def loss(p: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(
            gpt.apply(p, ids[:, :-1], config).flatten(0, 1), ids[:, 1:].flatten()
        )

    want = whole(loss, params, (ids,))
    got = in_chunks.run(loss, params, (ids,), chunk_of=in_chunks.even(LAYERS, chunks))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= (1e-14 if tied else 0.0)
    assert [len(row) for row in got.sent] == [1] * (chunks - 1) + [0]


@pytest.mark.parametrize("name", ["llama, tied", "bert, dropout", "t5, dropout"])
def test_kernels_in_the_place_of_parts(name: str) -> None:
    model, given = made(name, fuse=True), batch(name, 10)
    loss, scope_of = loss_of(model), scope.folded(zf.random.key(3))
    with scope(7):
        want = whole(loss, model.params, (given,), scope_of=scope_of)
    cuts = dealt(loss, model.params, given, 3)
    got = in_chunks.run(
        loss, model.params, (given,), chunk_of=cuts, scope_of=scope_of, around=lambda: scope(7)
    )
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


@pytest.mark.parametrize("name", ["llama", "qwen3 of experts", "gpt2"])
def test_caches_that_are_left_on(name: str) -> None:
    model, given = made(name), batch(name, 8)
    loss = loss_of(model, use_cache=True)
    want = whole(loss, model.params, (given,))
    got = in_chunks.run(loss, model.params, (given,), chunk_of=in_chunks.even(LAYERS, 2))
    assert torch.equal(got.result, want[0]) and worst(got, want) <= 1e-14


def test_hidden_states_of_all_chunks_come_to_the_last() -> None:
    model, given = made("llama"), batch("llama", 8)

    def loss(p: Any, given: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = model.apply(p, **given, output_hidden_states=True, use_cache=False)
        return out.logits.square().mean(), out.hidden_states

    want = whole(loss, model.params, (given,), loss_of=lambda out: out[0])
    got = in_chunks.run(
        loss, model.params, (given,), chunk_of=[0, 0, 1, 2], loss_of=lambda out: out[0]
    )
    assert all(map(torch.equal, got.result[1], want[0][1])) and worst(got, want) == 0.0


def test_an_encoders_output_goes_to_every_chunk_of_the_decoder() -> None:
    model, given = made("t5, dropout"), batch("t5", 9)
    loss = loss_of(model)
    cuts = dealt(loss, model.params, given, 4)
    plan = rehearse(loss, make_layout(model.params, world=1), (given,), chunk_of=cuts)
    assert [source for source, _ in plan.receives(2).values()].count(1) == 2  # and its own input
    (encoded,) = [label for label in plan.receives(3) if plan.receives(3)[label][0] == 1]
    assert encoded in plan.receives(2)
    assert plan.receives(3)[encoded][1].shape == (4, 9, 32)


def test_weights_in_low_bits_come_where_they_are_used() -> None:
    model, ids = made("llama"), batch("llama", 8)["input_ids"]
    params = zf.quantize(model.apply, bits=8).place(model.params)
    layout = make_layout(params, world=1)
    stored = {slot.path for slot in layout.present if slot.code is not None}
    assert "lm_head.weight" in stored and len(stored) > LAYERS

    def logits(p: Any, ids: Tensor) -> Tensor:
        return model.apply(p, input_ids=ids, use_cache=False).logits

    want = logits(params, ids)
    assert torch.equal(in_chunks.forward(logits, params, (ids,), chunk_of=[0, 0, 1, 2]), want)
