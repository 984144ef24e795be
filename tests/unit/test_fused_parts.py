"""Parts that kernels take over give what the module gives, and raise where it raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.unit.fused_models import (
    CALM,
    SIZES,
    Copied,
)
from zfunc.huggingface import rotations
from zfunc.huggingface.fusion import fusible
from zfunc.modules.functional import functionalize

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_the_norm_of_torch(dtype: torch.dtype, eps: float | None):
    module = nn.Sequential(nn.RMSNorm(7, eps), nn.RMSNorm(7, eps, elementwise_affine=False))
    model = functionalize(module.to(dtype), fuse=True)
    assert "fused: RMSNorm x 2" in repr(model)
    for x in (torch.randn(4, 7), torch.randn(2, 7, 3).mT, torch.full((2, 7), 1e-4)):
        found, expected = model.apply(model.params, x.to(dtype)), module(x.to(dtype))
        torch.testing.assert_close(found, expected, check_stride=True)


class Network(nn.Module):
    """Written like Llama's."""

    def __init__(self, gate: int, up: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(5, gate), nn.Linear(5, up)
        self.down_proj, self.act_fn = nn.Linear(max(gate, up), 5), nn.SiLU()

    def forward(self, x: Tensor) -> Any:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


def test_a_network_whose_halves_broadcast():
    for widths in ((4, 1), (1, 4), (4, 4)):
        module = Network(*widths)
        assert fusible(module)["Network"] == 1
        same_or_raises(module, torch.randn(3, 5))
        same_or_raises(module, another=torch.randn(3, 5))


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


def test_a_rotation_of_shapes_that_the_kernel_does_not_take():
    """Heads of several widths; a sine for all texts, and cosines for each."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    turned = rotations._turn(rotations.Rotation(whole=False), apply_rotary_pos_emb)
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 6), torch.randn(2, 3, 2)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    for given in ((q, k, cos, sin), (q, q, cos, sin[:1])):
        torch.testing.assert_close(turned(*given), apply_rotary_pos_emb(*given))
