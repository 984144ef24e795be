"""``zf.foresee``: FLOPs by operator, layer and phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.unit.foreseen import WIDE, alone, trained
from zfunc.foresight.flops import flops_of
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.quant import int8_products

pytestmark = pytest.mark.usefixtures("thawed")


class LeNet(nn.Module):
    """LeNet-5 with its last convolution as one; 28x28 padded by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 120, 5), nn.Tanh()),
        )
        self.classes = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.classes(self.features(x).flatten(1)), 1)


def forward_of(module: nn.Module, x: Tensor) -> Any:
    model = zf.functionalize(module)
    state = {"params": model.params}
    return alone(lambda s, x: (s, model.apply(s["params"], x)), state, x)


def test_the_flops_of_lenet() -> None:
    module = LeNet()
    assert sum(p.numel() for p in module.parameters()) == 61_706
    seen = forward_of(module, torch.zeros(1024, 1, 28, 28))
    assert seen.flops.total == 853_032_960 == 2 * 426_516_480
    # What a profiler reports that adds up whatever operators write: biases of convolutions, inputs
    # of pools and a softmax besides.
    biases = sum(x.elements for x in seen.rows if x.name == "convolution")
    pools = sum(x.elements for x in seen.rows if x.name == "avg_pool2d") * 4
    softmax = seen.flops.not_counted["_softmax"]
    assert (biases, pools, softmax) == (6_578_176, 6_455_296, 10_240)
    assert seen.flops.total + biases + pools + softmax == 866_076_672


def test_the_flops_of_a_linear_layer() -> None:
    module = nn.Linear(10, 10)
    assert sum(p.numel() for p in module.parameters()) == 110
    assert forward_of(module, torch.zeros(1, 10)).flops.total == 200


def counted_by_torch(run: Any) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_forward_and_backward_as_torch_counts_them(transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    module = kind(6, 8, (3, 5), stride=2, padding=1)
    x = torch.randn(4, 6, 12, 14)

    def step(state: Any, x: Tensor) -> Any:
        loss, grads = zf.value_and_grad(lambda p: torch.func.functional_call(module, p, x).sum())(
            state["params"]
        )
        return {"params": grads}, loss

    state = {"params": dict(module.named_parameters())}
    expected = counted_by_torch(lambda: module(x).sum().backward())
    assert alone(step, state, x).flops.total == expected


def test_attention_is_counted_whole_also_under_a_causal_mask() -> None:
    q = torch.zeros(2, 3, 64, 16)

    def step(state: Any, x: Tensor) -> Any:
        return state, F.scaled_dot_product_attention(x, x, x, is_causal=True)

    for device in ("cpu", "cuda"):
        seen = alone(step, WIDE, q, device=device)
        assert seen.flops.total == 4 * 2 * 3 * 64 * 64 * 16
        assert seen.flops.causal == "whole"


def test_a_mask_that_is_learned_goes_into_the_fused_kernel_of_a_gpu() -> None:
    """As T5's positions are: no scores are written down, and it has a gradient."""
    n = 256

    def step(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x + p["v"], attn_mask=p["m"]).sum()

        value, grads = zf.value_and_grad(loss)(state["params"])
        assert grads["m"].shape == (1, 1, n, n)
        return {"params": grads}, value

    state = {"params": {"m": torch.zeros(1, 1, n, n), "v": torch.zeros(8, 16, n, 32)}}
    seen = alone(step, state, torch.zeros(8, 16, n, 32), device="cuda")
    assert {x.name for x in seen.rows if x.flops} == {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }


@pytest.mark.parametrize("bits", [8, 4])
def test_low_bits_change_no_flops(bits: int) -> None:
    """Nor is a large weight in memory as it was; whatever products this CPU has."""
    int8_products.exact()  # which is asked once in a process
    shape = GPTConfig(vocab=130, width=128, depth=2, heads=4)
    params, ids = gpt.init(shape, zf.random.key(0)), torch.zeros(2, 16, dtype=torch.int64)

    def predict(params: Any, ids: Tensor) -> Any:
        return gpt.apply(params, ids, shape)

    low = alone(zf.quantize(predict, bits=bits), params, ids)
    whole = alone(
        lambda state, ids: (state, predict(state["params"], ids)), {"params": params}, ids
    )
    assert low.flops.total == whole.flops.total
    assert low.state_bytes < whole.state_bytes / 2


def test_flops_by_layer_and_phase() -> None:
    plain, recomputed = trained().flops, trained(zf.remat).flops
    assert set(plain.by_layer) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert plain.by_layer.total() == plain.by_operator.total() == plain.total
    assert plain.by_layer["blocks.0"] == plain.by_layer["blocks.2"]
    assert set(plain.by_phase) == {"forward", "backward"}
    assert recomputed.total - plain.total == recomputed.by_phase["recomputed"]
    layers = recomputed.by_layer.total() - recomputed.by_layer[""]
    assert layers > plain.by_layer.total() - plain.by_layer[""]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_products_of_a_recurrent_layer_are_counted(kind: Any) -> None:
    """Whichever kernel runs it, forward and backward."""
    module, x = kind(40, 60, bidirectional=True), torch.zeros(20, 8, 40)

    def step(state: Any, x: Tensor) -> Any:
        call = lambda p: torch.func.functional_call(module, p, (x,))[0].sum()  # noqa: E731
        loss, grads = zf.value_and_grad(call)(state["params"])
        return {"params": grads}, loss

    weights = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    state = {"params": dict(module.named_parameters())}
    forward = 2 * 20 * 8 * weights
    assert alone(step, state, x).flops.by_phase["forward"] == forward
    profile = zf.profile(step, {"params": {k: v.detach() for k, v in state["params"].items()}}, x)
    assert profile.flops.by_phase == alone(step, state, x).flops.by_phase
    told = "keeps for backward" in str(alone(step, state, x))
    assert told is (kind is nn.LSTM)  # which one kernel runs, and its workspace is of unknown size
    assert 1.5 * forward < profile.flops.by_phase["backward"] <= 2 * forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_of_rows(dtype: torch.dtype) -> None:
    """As experts have them, forward and backward."""
    offs = torch.tensor([16, 40, 48, 64], dtype=torch.int32)

    def step(state: Any, x: Tensor) -> Any:
        product = lambda p: torch._grouped_mm(x, p["w"], offs)  # noqa: E731
        loss, grads = zf.value_and_grad(lambda p: product(p).square().sum())(state["params"])
        return {"params": grads}, loss

    state, x = {"params": {"w": torch.randn(4, 72, 96, dtype=dtype)}}, torch.randn(64, 72).to(dtype)
    told = alone(step, state, x)
    assert told.flops.total == 2 * 2 * 64 * 72 * 96 == zf.profile(step, state, x).flops.total


def test_products_of_groups_of_columns() -> None:
    """Groups have rows of their own, and share the columns between them."""
    offs, groups = torch.tensor([16, 40, 48, 96], dtype=torch.int32), torch.randn(4, 24, 72)
    groups = groups.to(torch.bfloat16)

    def step(state: Any, x: Tensor) -> Any:
        return state, torch._grouped_mm(groups, x, offs)

    x = torch.randn(72, 96).to(torch.bfloat16)
    assert alone(step, WIDE, x).flops.total == 2 * 24 * 72 * 96
    assert zf.profile(step, WIDE, x).flops.total == 2 * 24 * 72 * 96


def test_products_of_newer_operators_are_counted() -> None:
    """Of numbers in 8 bits with scales, and of lists."""
    scale, how = torch.tensor(1.0), F.ScalingType.TensorWise

    def step(state: Any, x: Tensor) -> Any:
        low = x.to(torch.float8_e4m3fn)
        return state, F.scaled_mm(low, low.t(), scale, how, scale, how, output_dtype=torch.bfloat16)

    x = torch.zeros(80, 96)
    assert alone(step, WIDE, x).flops.total == 2 * 80 * 96 * 80
    assert flops_of("_foreach_mm", ([x, x], [x.t(), torch.zeros(96, 5)]), []) == 2 * 80 * 96 * 85


def test_products_in_place_are_counted() -> None:
    a, b = torch.zeros(80, 100), torch.zeros(4, 80, 100)

    def step(state: Any, x: Tensor) -> Any:
        w = state["params"]["w"]
        out = torch.zeros(80, 100).addmm_(a, w).addbmm_(b, w.expand(4, -1, -1))
        return state, torch.zeros(100).addmv_(w, out[0]).sum()

    assert alone(step).flops.total == 2 * 80 * 100 * 100 * 5 + 2 * 100 * 100


def test_one_rank_has_layers_too() -> None:
    one, two = trained(ranks=1).flops.by_layer, trained(ranks=2).flops.by_layer
    assert set(one) == set(two) and one["blocks.1"] == two["blocks.1"]
