"""``functionalize(fuse=True)``: unmodified Hugging Face models with kernels in them.

On a machine without a GPU the kernels' torch twins run; that the kernels are their twins is
shown in ``tests/kernels``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.kernels.closeness import assert_near
from zfunc import kernels, optim
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


PARTS = {
    llama: {"LlamaForCausalLM": 1, "LlamaAttention": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5},
    qwen2: {"Qwen2ForCausalLM": 1, "Qwen2Attention": 2, "Qwen2MLP": 2, "Qwen2RMSNorm": 5},
    gpt2: {"GPT2LMHeadModel": 1, "LayerNorm": 5, "NewGELUActivation": 2},
    bert: {"LayerNorm": 6, "BertSelfOutput": 2, "BertOutput": 2, "GELUActivation": 3},
}


def build(make: Callable[[], Any], dtype: torch.dtype, fuse: bool) -> zf.Functional:
    torch.manual_seed(0)
    return functionalize(make().to(dtype).train(), fuse=fuse)


def tokens(i: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(i))


def flat(tree: Any) -> Tensor:
    return torch.cat([x.flatten() for x in zf.tree.leaves(tree)])


def loss_of(model: zf.Functional) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, ids: model.apply(params, input_ids=ids, labels=ids).loss


@pytest.mark.filterwarnings("ignore:.*bos_token_id")
@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_losses_and_gradients_within_the_rule(make: Callable[[], Any]):
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for kind, fuse in ((torch.float64, False), (dtype, False), (dtype, True)):
            model = build(make, kind, fuse)
            loss, grads = zf.value_and_grad(loss_of(model))(model.params, tokens(0))
            found.append((loss, flat(grads)))
        for exact, plain, fused in zip(*found, strict=True):
            assert_near(fused, exact, plain)
    assert all(f"fused: {name} x {n}" in repr(model) for name, n in PARTS[make].items())


def train(model: zf.Functional, steps: int, stage: int | None = None) -> tuple[Tensor, Tensor]:
    """Losses, and what the parameters have moved by."""
    step = zf.train_step(loss_of(model), TX)
    step = step if stage is None else zf.remat(zf.shard(step, stage=stage))
    state, losses = step.place(zf.TrainState.create(model.params, TX)), []
    for i in range(steps):
        batch = tokens(i) if stage is None else zf.local_batch(tokens(i))
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].detach())
    return torch.stack(losses), flat(step.unplace(state).params) - flat(model.params)


def test_a_fused_llama_trains_as_an_unfused_one():
    """Twenty steps: as near to those in float64 as the unfused model is."""
    kinds = ((torch.float64, False), (torch.float32, False), (torch.float32, True))
    runs = [train(build(llama, dtype, fuse), 20) for dtype, fuse in kinds]
    for exact, plain, fused in zip(*runs, strict=True):
        assert_near(fused, exact, plain)


def test_sharded_and_recomputed():
    model = build(llama, torch.float64, True)
    losses, moved = train(model, 2)
    for theirs, same in zf.simulate(2)(train)(model, 2, 3):
        torch.testing.assert_close(theirs, losses)  # float32, as Hugging Face has it
        torch.testing.assert_close(same, moved, rtol=0, atol=1e-9)


class Own(nn.LayerNorm):
    """Means something else by its type."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_unknown_types_are_left_alone():
    with pytest.warns(UserWarning, match=r"found nothing in Sequential that a kernel takes over"):
        model = functionalize(nn.Sequential(nn.Linear(3, 3), Own(3)), fuse=True)
    x = torch.randn(2, 3)
    plain = functionalize(model.to_module(model.params))
    assert torch.equal(model.apply(model.params, x), plain.apply(plain.params, x))


def test_the_module_the_class_and_copies_of_it_stay_as_they_are():
    module = nn.Sequential(nn.LayerNorm(3), nn.GELU("tanh"))
    model = functionalize(module, fuse=True)
    x = torch.randn(2, 3)
    with kernels.use("triton"), pytest.raises(kernels.KernelError, match="tensors are on cpu"):
        model.apply(model.params, x)
    again = pickle.loads(pickle.dumps(model))
    with kernels.use("triton"):
        with pytest.raises(kernels.KernelError, match="tensors are on cpu"):
            again.apply(model.params, x)
        expected = module(x)
        torch.testing.assert_close(model.to_module(model.params)(x), expected)
    torch.testing.assert_close(model.apply(model.params, x), expected)


def test_what_hooks_watch_is_not_passed_by():
    seen: list[int] = []
    module = bert()
    norm = module.bert.encoder.layer[0].output.LayerNorm
    norm.register_forward_hook(lambda *_: seen.append(1))
    model = functionalize(module, fuse=True)
    assert "BertOutput x 1" in repr(model)
    model.apply(model.params, input_ids=tokens(0))
    assert seen == [1]


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
    return model


@pytest.mark.parametrize(
    "change",
    [
        *("an activation named alike", "a subclassed activation", "an activation's own forward"),
        *("a norm named alike", "a norm that claims its module", "a loss named alike"),
        *("a patched norm", "a patched network", "a patched rotation"),
    ],
)
def test_what_is_not_what_it_is_called_is_left_alone(change: str, monkeypatch: pytest.MonkeyPatch):
    model, ids = _changed(change, monkeypatch), tokens(0)
    expected = model(input_ids=ids, labels=ids)
    fused = functionalize(model, fuse=True)
    found = fused.apply(fused.params, input_ids=ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss)


def test_backward_hooks_are_not_passed_by():
    seen: list[int] = []
    module = llama()
    module.model.layers[0].mlp.act_fn.register_full_backward_hook(lambda *_: seen.append(1))
    model = functionalize(module, fuse=True)
    assert "LlamaMLP x 1" in repr(model)
    zf.value_and_grad(loss_of(model))(model.params, tokens(0))
    assert seen == [1]


def test_dtypes_and_layouts_stay_those_of_the_module():
    """What a kernel would give in another dtype or layout takes the module's own way."""
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ragged = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)], layout=torch.jagged)
    gelu, norm = nn.GELU(), nn.LayerNorm(5)
    pairs = [(gelu, images), (gelu, images.sum()), (gelu, ragged), (norm, images), (norm, ragged)]
    for module, x in pairs:
        model = functionalize(module, fuse=True)
        found, expected = model.apply(model.params, x), module(x)
        assert found.dtype == expected.dtype
        if x.is_nested:
            found, expected = found.values(), expected.values()
        torch.testing.assert_close(found, expected, check_stride=True)
