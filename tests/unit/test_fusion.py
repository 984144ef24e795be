"""``functionalize(fuse=True)``: unmodified Hugging Face models with kernels in them.

On a machine without a GPU the kernels' torch twins run; that the kernels are their twins is
shown in ``tests/kernels``.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.kernels.closeness import assert_near
from tests.laws import architectures
from tests.laws.architectures import ALL, batch_of, model_of
from zfunc import kernels, optim
from zfunc.modules import rotations
from zfunc.modules.functional import functionalize
from zfunc.modules.fusion import fusible

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


PARTS = {
    llama: {"LlamaForCausalLM": 1, "LlamaAttention": 2, "LlamaMLP": 2, "LlamaRMSNorm": 5},
    qwen2: {"Qwen2ForCausalLM": 1, "Qwen2Attention": 2, "Qwen2MLP": 2, "Qwen2RMSNorm": 5},
    gpt2: {"GPT2LMHeadModel": 1, "LayerNorm": 5, "NewGELUActivation": 2},
    bert: {"LayerNorm": 6, "BertSelfOutput": 2, "BertOutput": 2, "GELUActivation": 3},
    modernbert: {"ModernBertForMaskedLM": 1, "LayerNorm": 6, "GELUActivation": 3},
    # Weights that begin at zero; norms of queries and keys.
    of_family("Gemma2", head_dim=8, num_key_value_heads=1): {
        "Gemma2Attention": 2,
        "Gemma2RMSNorm": 9,
        "Gemma2MLP": 2,
    },
    of_family("Olmo2"): {"Olmo2Attention": 2, "Olmo2RMSNorm": 9, "Olmo2MLP": 2},
    # A part of each head turns, by halves or by neighbours; one product for gate and up.
    of_family(
        "Phi3",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ): {"Phi3Attention": 2, "Phi3MLP": 2},
    of_family("Glm", head_dim=8): {"GlmAttention": 2, "GlmMLP": 2, "GlmRMSNorm": 5},
    of_family("GPTNeoX"): {"GPTNeoXAttention": 2, "LayerNorm": 5, "GELUActivation": 2},
    of_family("Cohere"): {"CohereAttention": 2, "CohereMLP": 2},
    of_family("Helium", head_dim=8, num_key_value_heads=1): {
        "HeliumAttention": 2,
        "HeliumMLP": 2,
        "HeliumRMSNorm": 5,
    },
    of_family("Granite"): {"GraniteAttention": 2, "GraniteMLP": 2, "GraniteRMSNorm": 5},
    # Norms without weights.
    of_family("NanoChat"): {"NanoChatForCausalLM": 1, "NanoChatRMSNorm": 9},
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


def outcome(model: zf.Functional, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, logits and gradients of a few batches: the errors of a single one are a lottery."""

    def outputs(params: Any, ids: Tensor) -> Any:
        out = model.apply(params, input_ids=ids, labels=ids)
        return out.loss, out.logits.detach()

    batches = [zf.value_and_grad(outputs, has_aux=True)(model.params, tokens(i)) for i in range(6)]
    losses = torch.stack([loss for (loss, _), _ in batches]).to(kind)  # float32 of 16-bit logits
    logits = torch.stack([logits for (_, logits), _ in batches])
    return losses, logits, torch.stack([flat(grads) for _, grads in batches])


@pytest.mark.filterwarnings("ignore:.*bos_token_id")
@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_outputs_and_gradients_within_the_rule(make: Callable[[], Any]):
    for dtype in (torch.float32, torch.bfloat16):
        kinds = ((torch.float64, False), (dtype, False), (dtype, True))
        models = [build(make, kind, fuse) for kind, fuse in kinds]
        found = [outcome(model, kind) for model, (kind, _) in zip(models, kinds, strict=True)]
        for exact, plain, fused in zip(*found, strict=True):
            assert_near(fused, exact, plain)
    assert all(f"fused: {name} x {n}" in repr(models[2]) for name, n in PARTS[make].items())


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


class Normed(nn.Module):
    """What Mistral's norm is written like, in a network of one's own, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = Copied(), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Any:
        return self.norm(hidden=x) * self.gain


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


def test_what_is_written_alike_is_taken_over_whatever_it_is_called():
    module, x = Normed(), torch.randn(3, 5)
    model = functionalize(module, fuse=True)
    assert "fused: Copied x 1" in repr(model)
    torch.testing.assert_close(model.apply(model.params, x), module(x))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model.to_module(model.params).norm()


def same_or_raises(module: nn.Module, *args: Any, **named: Any) -> None:
    """Of a module with parts that a kernel takes over: what the unfused function gives, gradients
    of parameters included."""
    outcomes = []
    for fuse in (False, True):
        model = functionalize(module, fuse=fuse)

        def sum_of(params: Any, model: zf.Functional = model) -> Any:
            y = model.apply(params, *args, **named)
            return y.abs().sum().double(), y.detach()

        try:
            (_, y), grads = zf.value_and_grad(sum_of, has_aux=True)(model.params)
        except Exception:
            outcomes.append(None)
        else:
            outcomes.append((y, grads))
    plain, fused = outcomes
    assert (plain is None) == (fused is None)
    if plain is not None:
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [None, 2.0, *(torch.full(shape, 1.5) for shape in ((), (1,), (3, 5)))],
    ids=["none", "number", "scalar", "one", "rows"],
)
def test_a_norm_whose_weight_is_none_of_a_row(weight: Any):
    for offset in (False, True):
        module = nn.Sequential(Copied(), nn.Linear(5, 5))
        if offset:
            gemma = transformers.models.gemma.modeling_gemma
            module[0] = gemma.GemmaRMSNorm(5)
        del module[0].weight
        module[0].weight = nn.Parameter(weight) if isinstance(weight, Tensor) else weight
        same_or_raises(module, torch.randn(3, 5))


def test_a_norm_of_what_is_no_row():
    module = nn.Sequential(Copied())
    for x in (torch.randn(3, 1), torch.tensor(2.0), torch.randn(0, 5), torch.arange(5)):
        same_or_raises(module, x)
    same_or_raises(Copied(), another=torch.randn(3, 5))
    same_or_raises(Copied(), hidden=torch.randn(3, 5))


def test_an_eps_that_learns_gets_a_gradient():
    module = Copied()
    module.variance_epsilon = nn.Parameter(torch.tensor(0.3))
    same_or_raises(module, torch.randn(3, 5))


def test_a_method_of_an_instance_is_no_method_of_its_type():
    module = transformers.models.gemma.modeling_gemma.GemmaRMSNorm(5)
    module._norm = torch.sin
    same_or_raises(nn.Sequential(module, nn.GELU()), torch.randn(3, 5))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_torch_refuse_rows_of_another_width(kind: type[nn.Module]):
    for affine in (True, False):
        module = kind(5, elementwise_affine=affine)
        for x in (torch.randn(3, 6), torch.tensor(1.0), torch.randn(3, 5, dtype=torch.cfloat)):
            same_or_raises(module, x)
        functional = functionalize(module.to("meta"), fuse=True)
        on_meta = torch.empty(3, 5, device="meta")
        assert functional.apply(functional.params, on_meta).shape == (3, 5)


class Network(nn.Module):
    """Written like Llama's."""

    def __init__(self, gate: int, up: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(5, gate), nn.Linear(5, up)
        self.down_proj, self.act_fn = nn.Linear(max(gate, up), 5), nn.SiLU()

    def forward(self, x: Tensor) -> Any:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_network_whose_halves_broadcast():
    for widths in ((4, 1), (1, 4), (4, 4)):
        module = Network(*widths)
        assert fusible(module)["Network"] == 1
        same_or_raises(module, torch.randn(3, 5))
        same_or_raises(module, another=torch.randn(3, 5))
    same_or_raises(Network(4, 4).to(torch.cfloat), torch.randn(3, 5, dtype=torch.cfloat))


def test_a_last_product_whose_weight_is_whole_numbers():
    """T5's casts what is hidden to the dtype of the weight, but for such."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (5, 6), dtype=torch.int8))

        def forward(self, x: Tensor) -> Any:
            return x @ self.weight.to(x.dtype).mT

    config = transformers.T5Config(d_model=5, d_ff=6, feed_forward_proj="gated-gelu")
    module = transformers.models.t5.modeling_t5.T5DenseGatedActDense(config).eval()
    module.wo = Whole()
    assert fusible(module)["T5DenseGatedActDense"] == 1
    same_or_raises(module, torch.randn(3, 5))


def test_a_residual_stream_that_broadcasts():
    module = transformers.models.bert.modeling_bert.BertSelfOutput(
        transformers.BertConfig(**SIZES, **CALM)
    )
    assert fusible(module)["BertSelfOutput"] == 1
    x = torch.randn(2, 3, 16)
    for stream in (x, x[:1], x.double(), x[..., :1]):
        same_or_raises(module, x, stream)
    same_or_raises(module, hidden_states=x, input_tensor=x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_the_norm_of_torch(dtype: torch.dtype, eps: float | None):
    module = nn.Sequential(nn.RMSNorm(7, eps), nn.RMSNorm(7, eps, elementwise_affine=False))
    model = functionalize(module.to(dtype), fuse=True)
    assert "fused: RMSNorm x 2" in repr(model)
    for x in (torch.randn(4, 7), torch.randn(2, 7, 3).mT, torch.full((2, 7), 1e-4)):
        found, expected = model.apply(model.params, x.to(dtype)), module(x.to(dtype))
        torch.testing.assert_close(found, expected, check_stride=True)


def test_a_rotation_the_other_way_is_left_alone():
    """NanoChat's is called like Llama's and written like it, but for a sign."""
    assert "NanoChatAttention" not in repr(functionalize(of_family("NanoChat")(), fuse=True))


def test_a_rotation_of_shapes_that_the_kernel_does_not_take():
    """Heads of several widths; a sine for all texts, and cosines for each."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    turned = rotations._turn(rotations.Rotation(whole=False), apply_rotary_pos_emb)
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 6), torch.randn(2, 3, 2)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    for given in ((q, k, cos, sin), (q, q, cos, sin[:1])):
        torch.testing.assert_close(turned(*given), apply_rotary_pos_emb(*given))


@pytest.mark.parametrize("wrap", [
    lambda step: step, lambda step: zf.shard(step, stage=3), lambda step: zf.remat(step),
    lambda step: zf.remat(zf.shard(step, stage=3)), lambda step: zf.accumulate(step, 2),
    lambda step: zf.offload(zf.shard(step, stage=3)), lambda step: zf.precision(step),
])  # fmt: skip
def test_tables_are_known_under_transforms(wrap: Any, monkeypatch: pytest.MonkeyPatch):
    """What is said of a table goes with it into layers that are gathered, recomputed, rounded."""
    calls: list[int] = []
    plain = kernels.rotary
    monkeypatch.setattr(kernels, "rotary", lambda *args: calls.append(1) or plain(*args))
    model = build(llama, torch.float32, True)
    with wrap(zf.train_step(loss_of(model), TX)) as step:
        state = step.place(zf.TrainState.create(model.params, TX))
        step(state, tokens(0))
    assert len(calls) >= 2 and len(calls) % 2 == 0


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


def test_a_network_with_dropout_and_a_last_product_of_another_dtype():
    """T5's: what is hidden takes the dtype of the last product, which stays float32."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0, dropout_rate=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.T5ForConditionalGeneration(config).train()
    for part in module.modules():
        if hasattr(part, "wo"):
            part.wo.double()
    module.double()
    model, fused = functionalize(module), functionalize(module, fuse=True)
    assert "T5DenseGatedActDense x 4" in repr(fused) and "T5LayerNorm x 12" in repr(fused)

    def loss(which: zf.Functional) -> Tensor:
        torch.manual_seed(3)  # the same units are dropped
        return which.apply(which.params, input_ids=tokens(0), labels=tokens(1)).loss

    torch.testing.assert_close(loss(fused), loss(model))


@pytest.mark.parametrize("name", ALL)
def test_models_of_many_architectures_are_the_same_fused(name: str):
    torch.manual_seed(0)
    module, loss = model_of(name), architectures.loss_of(name)
    if not fusible(module):
        pytest.fail(f"{name} has nothing that a kernel takes over")
    plain, fused = functionalize(module), functionalize(module, fuse=True)
    found = []
    for model in (plain, fused):

        def f(params: Any, model: zf.Functional = model) -> Tensor:
            return loss(model.apply(params, **batch_of(name, 0)))

        value, grads = zf.value_and_grad(f)(model.params)
        found.append((value, flat(grads)))
    (value, grads), (same, near) = found
    torch.testing.assert_close(same, value, rtol=1e-5, atol=1e-6)
    assert (near - grads).norm() <= 2e-5 * grads.norm()
