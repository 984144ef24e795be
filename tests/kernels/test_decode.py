"""The fused blocks of a decoder layer: the twins against float64, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.blocks import EPS, HEADS, assert_parts_are_one, gate_up, layer, qkv
from tests.kernels.closeness import assert_near, distance
from zfunc import kernels


@pytest.mark.parametrize(("kind", "group"), [("skinny_mm", None), ("w8_mm", None), ("w4_mm", 32)])
def test_the_twins_are_their_formulas(kind: str, group: int | None):
    case = layer(kind, group, 3, 300)
    q, _ = case.eager()
    exact = case.qkv()
    for x, y in zip(qkv(case), exact, strict=True):
        assert distance(x, y) <= 1.05 * distance(q, exact[0])
    for activation in ("silu", "gelu", "gelu_tanh"):
        halves = case.eager(activation)[1]
        assert_near(gate_up(case, activation), case.gate_up(activation), halves)


def test_a_cache_is_written_where_it_lies_and_nowhere_else():
    case = layer("skinny_mm", None, 3, 64)
    held = torch.full((2, 3, 2, 20, 32), 7.0).bfloat16()  # rows of 20 tokens, of which 9 are used
    keys, values = held[:, :, :, :9].unbind()
    rest = (case.angles.cos(), case.angles.sin(), case.positions, keys, values)
    kernels.norm_qkv_rope(case.x, case.norm, case.heads.packed, *rest, bias=case.bias, eps=EPS)
    _, new, _ = qkv(case)
    assert torch.equal(keys[:2, :, 4], new[:2, :, 4])
    held[:, :2, :, 4] = 7
    assert (held == 7).all()  # that of the third row, whose position is too far, as well


def test_under_transforms_of_torch():
    case = layer("w8_mm", None, 2, 40)
    w = case.halves.packed
    args = (case.x, case.norm, [w.data], [w.scale], [], "w8_mm", 0, EPS, "silu")
    torch.library.opcheck(torch.ops.zfunc.norm_gate_up.default, args)
    v = case.heads.packed
    cache = torch.zeros(2, 2, 2, 9, 32).bfloat16().unbind()
    turn = (case.angles.cos(), case.angles.sin(), case.positions, case.positions)
    parts = ([v.data], [v.scale], [])
    args = (case.x, case.norm, *parts, "w8_mm", 0, EPS, case.bias, *turn, *cache)
    torch.library.opcheck(torch.ops.zfunc.norm_qkv_rope.default, args)
    batch = torch.stack([case.x, 2 * case.x])
    found = torch.vmap(lambda x: kernels.norm_gate_up(x, case.norm, w))(batch)
    assert torch.equal(found[1], kernels.norm_gate_up(batch[1], case.norm, w))
    compiled = torch.compile(
        lambda: (*qkv(case), gate_up(case)), fullgraph=True, backend="aot_eager"
    )
    for x, y in zip(compiled(), (*qkv(case), gate_up(case)), strict=True):
        assert torch.equal(x, y)


def test_what_does_not_fit_is_named():
    case = layer("skinny_mm", None, 2, 40)
    with pytest.raises(kernels.KernelError, match="positions do not fit"):
        qkv(replace(case, positions=case.positions.int()))
    with pytest.raises(kernels.KernelError, match="norm, weight, bias do not fit"):
        qkv(replace(case, norm=case.norm[1:], heads=case.halves))
    with pytest.raises(kernels.KernelError, match="one of silu, gelu, gelu_tanh"):
        gate_up(case, "relu")
    with pytest.raises(kernels.KernelError, match="has no gradient, but argument 0 requires one"):
        gate_up(replace(case, x=case.x.clone().requires_grad_()))
    for more, reason in (
        ({"dtype": torch.float16}, "takes bfloat16, not torch.float16"),
        ({"half": 40}, "no heads of 80"),
        ({"kind": "w8a8_mm"}, "inputs of 16 bits"),
    ):
        how = {"kind": "w4_mm", "group": 0, "rows": 1, "dtype": torch.bfloat16} | more
        assert reason in kernels.choose("norm_qkv_rope", case.x, **how).why
    assert qkv(case)[0].shape == (2, HEADS, 32)


@pytest.mark.parametrize(("kind", "group"), [("skinny_mm", None), ("w8_mm", 128), ("w4_mm", 32)])
def test_several_matrices_are_one_and_slots_are_not_positions(kind: str, group: int | None):
    assert_parts_are_one(kind, group)
