"""Parts count as what they do: what is called like a known one, and is none, is left alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.unit.fused_models import (
    Copied,
    bert,
    llama,
    loss_of,
    of_family,
    tokens,
)
from zfunc.modules.functional import functionalize

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")


class SiLU(nn.Module):
    """Named like torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class LlamaRMSNorm(nn.Module):
    """Named like Llama's, with the weights of Gemma's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


class Tripled(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


def ForCausalLMLoss(logits: Tensor, **_: Any) -> Tensor:
    return logits.square().mean()


def _changed(change: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama that differs in one thing from what its types are called."""
    from transformers.loss import loss_utils
    from transformers.models.llama import modeling_llama

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return q, k * 2

    torch.manual_seed(0)
    model = llama().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / 4)  # what differs shows
    layer = model.model.layers[0]
    if change == "an activation named alike":
        layer.mlp.act_fn = SiLU()
    elif change == "a subclassed activation":
        layer.mlp.act_fn = Tripled()
    elif change == "an activation's own forward":
        layer.mlp.act_fn.forward = torch.sin
    elif change == "a norm named alike":
        layer.input_layernorm = LlamaRMSNorm(16)
    elif change == "a norm that claims its module":
        monkeypatch.setattr(LlamaRMSNorm, "__module__", modeling_llama.__name__)
        layer.input_layernorm = LlamaRMSNorm(16)
    elif change == "a loss named alike":
        model.loss_function = ForCausalLMLoss
    elif change == "a patched norm":
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: self.weight * x)
    elif change == "a patched network":
        monkeypatch.setattr(
            modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x))
        )
    elif change == "a patched rotation":
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    elif change == "what a rotation calls":
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x * 2)
    elif change == "what a loss calls":
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda x, *_: x.square().mean())
    elif change == "what is around a norm":
        plain = modeling_llama.LlamaRMSNorm.forward
        around = functools.wraps(plain)(lambda self, x: plain(self, x) * 2)
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", around)
    elif change == "a hook on what makes the tables":
        model.model.rotary_emb.register_forward_hook(lambda _, x, out: (out[0].cumsum(-1), out[1]))
    elif change == "what is around what makes the tables":
        model.model.rotary_emb = Around(model.model.rotary_emb)
    elif change == "tables that are written to":
        layer.register_forward_pre_hook(_written_to, with_kwargs=True)
    elif change == "tables of an attention's own":
        layer.self_attn.register_forward_pre_hook(_of_its_own, with_kwargs=True)
    return model


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(*args, **named)
        return cos.cumsum(-1), sin


def _written_to(_: nn.Module, args: Any, named: dict[str, Any]) -> None:
    named["position_embeddings"][0].cumsum_(-1)


def _of_its_own(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cos, sin = named["position_embeddings"]
    return args, named | {"position_embeddings": (cos.cumsum(-1), sin)}


@pytest.mark.parametrize(
    "change",
    [
        *("an activation named alike", "a subclassed activation", "an activation's own forward"),
        *("a norm named alike", "a norm that claims its module", "a loss named alike"),
        *("a patched norm", "a patched network", "a patched rotation", "what a rotation calls"),
        *("what a loss calls", "what is around a norm", "a hook on what makes the tables"),
        *("what is around what makes the tables", "tables that are written to"),
        "tables of an attention's own",
    ],
)
def test_what_is_not_what_it_is_called_is_left_alone(change: str, monkeypatch: pytest.MonkeyPatch):
    model, ids = _changed(change, monkeypatch), tokens(0)
    expected = model(input_ids=ids, labels=ids)
    fused = functionalize(model, fuse=True)
    found = fused.apply(fused.params, input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss)


def test_what_hooks_watch_is_not_passed_by():
    seen: list[int] = []
    module = bert()
    norm = module.bert.encoder.layer[0].output.LayerNorm
    norm.register_forward_hook(lambda *_: seen.append(1))
    model = functionalize(module, fuse=True)
    assert "BertOutput x 1" in repr(model)
    model.apply(model.params, input_ids=tokens(0))
    assert seen == [1]


def test_backward_hooks_are_not_passed_by():
    seen: list[int] = []
    module = llama()
    module.model.layers[0].mlp.act_fn.register_full_backward_hook(lambda *_: seen.append(1))
    model = functionalize(module, fuse=True)
    assert "LlamaMLP x 1" in repr(model)
    zf.value_and_grad(loss_of(model))(model.params, tokens(0))
    assert seen == [1]


def test_a_rotation_the_other_way_is_left_alone():
    """NanoChat's is called like Llama's and written like it, but for a sign."""
    assert "NanoChatAttention" not in repr(functionalize(of_family("NanoChat")(), fuse=True))


def test_tables_of_an_unknown_form_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    """A rotation by halves reads half of a row: both halves must be the same."""
    from transformers.models.llama import modeling_llama

    class OwnRotaryEmbedding(modeling_llama.LlamaRotaryEmbedding):
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            cos, sin = super().forward(x, position_ids)
            return cos.flip(-1).cumsum(-1), sin

    model = llama()
    model.model.rotary_emb.__class__ = OwnRotaryEmbedding
    fused, ids = functionalize(model, fuse=True), tokens(0)
    assert "LlamaAttention" not in repr(fused) and "LlamaMLP x 2" in repr(fused)
    torch.testing.assert_close(fused.apply(fused.params, ids).logits, model(ids).logits)


class Normed(nn.Module):
    """What Mistral's norm is written like, in a network of one's own, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = Copied(), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Any:
        return self.norm(hidden=x) * self.gain


def test_what_is_written_alike_is_taken_over_whatever_it_is_called():
    module, x = Normed(), torch.randn(3, 5)
    model = functionalize(module, fuse=True)
    assert "fused: Copied x 1" in repr(model)
    torch.testing.assert_close(model.apply(model.params, x), module(x))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model.to_module(model.params).norm()
