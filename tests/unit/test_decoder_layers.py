"""Layers of known types that take a token in few operations, or in fused blocks: the same texts."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.unit.test_generation import causal, ids_of, own
from zfunc import kernels, quant
from zfunc.huggingface import decoder_layers
from zfunc.language.decoding import decoder_of
from zfunc.language.gpt import GPTConfig, init
from zfunc.language.gpt_decoding import GPTDecoder

# Those that layers are compared with, and one that is written like them.
FAMILIES = ["llama", "mistral sliding", "qwen2", "qwen3", "ministral"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each block was called."""
    seen: Counter[str] = Counter()
    for name in ("norm_qkv_rope", "norm_gate_up", "packed_mm"):
        plain = getattr(kernels, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **how: Any) -> Any:
            seen[name] += 1
            return plain(*args, **how)

        monkeypatch.setattr(kernels, name, counted)
    return seen


def padded() -> tuple[Tensor, Tensor]:
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [7]])).long()
    return ids_of(3, 9) * mask, mask


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_known_types_are_taken_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal(name)
    assert decoder_layers.known(model) == 2
    seen = []
    plain = decoder_layers._token
    monkeypatch.setattr(decoder_layers, "_token", lambda *a: seen.append(1) or plain(*a))
    functional, (ids, mask) = zf.functionalize(model), padded()
    out = zf.generate(functional, functional.params, ids, max_new_tokens=9, attention_mask=mask)
    assert len(seen) == 2 * 8  # the first token comes with the prompt
    assert torch.equal(out, own(model, ids, mask, 9))
    fused = zf.functionalize(model, fuse=True)  # kernels for the prompt, too
    again = zf.generate(fused, fused.params, ids, max_new_tokens=9, attention_mask=mask)
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_blocks_continue_texts_alike(name: str, calls: Counter[str]) -> None:
    """By their twins; a window that slides, and norms of heads, leave blocks out."""
    functional, (ids, mask) = zf.functionalize(causal(name)), padded()

    def out() -> Tensor:
        return zf.generate(
            functional, functional.params, ids, max_new_tokens=9, attention_mask=mask
        )

    expected = out()
    assert not calls  # on a CPU none is asked for
    with kernels.use("torch"):
        assert torch.equal(out(), expected)
    heads = 16 if name in ("llama", "qwen2", "ministral") else 0
    assert calls == Counter(norm_qkv_rope=heads, norm_gate_up=16, packed_mm=32)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_fused_blocks_read_low_bit_weights(bits: int, group: Any, calls: Counter[str]) -> None:
    functional, ids = zf.functionalize(causal("qwen2").double()), ids_of(2, 5)
    params = quant.quantize_tree(functional.params, bits, group, model=functional)
    decoder, token = decoder_of(functional), ids_of(2, 1)

    def logits() -> Tensor:
        with torch.no_grad():
            _, cache = decoder.step(params, decoder.start(2, 8, None), ids)
            return decoder.step(params, cache, token)[0]

    expected = logits()
    with kernels.use("torch"):
        torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
    assert calls == Counter(norm_qkv_rope=2, norm_gate_up=2, packed_mm=4)


def test_the_gpt_adds_products_to_its_residual_stream_at_once(calls: Counter[str]) -> None:
    config = GPTConfig(vocab=11, width=24, depth=3, heads=3)
    params = zf.tree.map(
        lambda x: x + 0.3 * zf.random.normal(7, x.shape), init(config, zf.random.key(0))
    )
    decoder, ids = GPTDecoder(config), ids_of(2, 5, vocab=11)
    expected = zf.generate(decoder, params, ids, max_new_tokens=6)
    with kernels.use("torch"):
        assert torch.equal(zf.generate(decoder, params, ids, max_new_tokens=6), expected)
    assert calls == Counter(packed_mm=6 * 3 * 2)


def test_what_differs_is_left_alone() -> None:
    from transformers.models.llama import modeling_llama

    class Other(modeling_llama.LlamaDecoderLayer):
        pass

    model = causal("llama")
    layers = model.model.layers
    layers[0].__class__ = Other
    layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert decoder_layers.known(model) == 0
    model = causal("llama")
    layers = model.model.layers
    layers[0].input_layernorm = type("LlamaRMSNorm", (torch.nn.LayerNorm,), {})(64)
    layers[0].input_layernorm.variance_epsilon = 1e-6
    layers[1].mlp.act_fn = type("SiLU", (torch.nn.Tanh,), {})()
    assert decoder_layers.known(model) == 0
    model = causal("llama")
    model.config._attn_implementation = "eager"
    assert decoder_layers.known(model) == 0 and decoder_layers.known(causal("gpt2")) == 0


def test_patched_types_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def unturned(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q, k

    model = causal("llama")
    for home, name, other in (
        (modeling_llama, "apply_rotary_pos_emb", unturned),
        (modeling_llama.LlamaRMSNorm, "forward", lambda _, x: x),
        (modeling_llama.LlamaDecoderLayer, "forward", lambda _, x, **kw: x),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(home, name, other)
            assert decoder_layers.known(model) == 0
    assert decoder_layers.known(model) == 2


def _differing(change: str) -> Any:
    """A Llama with another part in its first layer, which is written like those that are known."""
    model = causal("llama")
    layer = model.model.layers[0]
    if change.endswith("called in another way"):
        part = layer.get_submodule(change.partition(" ")[0])

        def call(self: Any, *args: Any, **named: Any) -> Any:
            y = torch.nn.Module.__call__(self, *args, **named)
            return y * 2 if isinstance(y, Tensor) else (y[0] * 2, *y[1:])

        part.__class__ = type("Other", (type(part),), {"__call__": call})
    elif change == "a weight that broadcasts":
        layer.input_layernorm.weight = torch.nn.Parameter(torch.full((1,), 1.5))
    elif change == "an eps that is a tensor":
        layer.input_layernorm.variance_epsilon = torch.full((32,), 0.1)
    elif change.startswith("a buffer"):
        part = layer.get_submodule(change.rpartition(" ")[2])
        weight = part.weight.detach()
        del part.weight
        part.register_buffer("weight", weight)
    return model


@pytest.mark.parametrize(
    "change",
    [
        *(f"{name} called in another way" for name in ("input_layernorm", "mlp", "self_attn")),
        *("a weight that broadcasts", "an eps that is a tensor"),
        *("a buffer of input_layernorm", "a buffer of mlp.up_proj"),
    ],
)
def test_what_is_written_alike_and_differs_is_left_alone(change: str) -> None:
    model, (ids, mask) = _differing(change), padded()
    assert decoder_layers.known(model) == 1
    functional = zf.functionalize(model)
    out = zf.generate(functional, functional.params, ids, max_new_tokens=5, attention_mask=mask)
    assert torch.equal(out, own(model, ids, mask, 5))


def test_arguments_of_other_names_are_left_alone() -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaDecoderLayer.forward.__wrapped__
    names = tuple(
        "cache" if name == "past_key_values" else name for name in plain.__code__.co_varnames
    )
    renamed = types.FunctionType(plain.__code__.replace(co_varnames=names), plain.__globals__)
    renamed.__defaults__ = plain.__defaults__
    model = causal("llama")
    for layer in model.model.layers:
        layer.__class__ = type("Other", (type(layer),), {"forward": renamed})
    assert decoder_layers.known(model) == 0


def test_attention_that_is_registered_in_the_place_of_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = causal("llama")
    own_functions = {"sdpa": lambda *_, **__: None}
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", own_functions)
    assert decoder_layers.known(model) == 0


def test_gradients_go_through_the_layer_itself() -> None:
    functional = zf.functionalize(causal("llama"))
    decoder = decoder_of(functional)
    with torch.no_grad():
        _, cache = decoder.step(functional.params, decoder.start(1, 8, None), ids_of(1, 4))
    cache = zf.tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, cache)
    params = zf.tree.map(lambda x: x.clone().requires_grad_(), functional.params)
    logits, _ = decoder.step(params, cache, ids_of(1, 1))
    grads = torch.autograd.grad(logits.sum(), zf.tree.leaves(params), allow_unused=True)
    assert sum(g is not None and bool(g.any()) for g in grads) > 15
