"""The fused blocks of a decoder layer: the Triton kernels against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.blocks import Layer, assert_parts_are_one, gate_up, layer, qkv
from tests.kernels.closeness import assert_near, distance, poisoned
from zfunc import kernels
from zfunc.kernels import skinny_launch

CASES = [
    ("skinny_mm", None, 1, 257),
    ("skinny_mm", None, 3, 300),
    ("w8_mm", 128, 16, 256),
    ("w8_mm", None, 2, 131),
    ("w4_mm", 32, 3, 300),
    ("w4_mm", 32, 9, 301),  # the norm is applied first
    ("w4_mm", None, 2, 256),
]


@pytest.mark.parametrize(("kind", "group", "m", "k"), CASES)
@pytest.mark.parametrize("depth", [1, 100])
def test_they_are_their_formulas(
    kind: str, group: int | None, m: int, k: int, depth: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(skinny_launch, "DEPTH", depth)  # a share for each block, or one for all
    case: Layer = layer(kind, group, m, k)
    q, halves = case.eager()
    with kernels.use("triton"), poisoned():
        found = qkv(case), gate_up(case)
    for x, exact in zip(found[0], case.qkv(), strict=True):
        assert distance(x, exact) <= 1.05 * distance(q, case.qkv()[0])
    assert_near(found[1], case.gate_up(), halves)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation: str):
    case = layer("skinny_mm", None, 2, 100)
    with kernels.use("triton"):
        found = gate_up(case, activation)
    assert_near(found, case.gate_up(activation), case.eager(activation)[1])


def test_what_is_not_finite_stays_in_its_row():
    case = layer("w4_mm", None, 3, 131)
    case.x[1, 5] = torch.nan
    with kernels.use("triton"):
        q, keys, values = qkv(case)
        y = gate_up(case)
    for x in (q, keys, values, y):
        assert x[0].isfinite().all() and x[2].isfinite().all()
    assert q[1].isnan().all() and y[1].isnan().all() and values[1, :, 4].isnan().all()


def test_a_cache_of_more_than_2_to_the_31_elements(tmp_path: Path):
    """In a file with holes, of which one token is written: the third head lies beyond 32 bits."""
    apart, size = 2**30, 9 * 32
    room = np.memmap(tmp_path / "cache", np.uint16, "w+", shape=(2 * apart + 2 * size,))
    whole, shape = torch.from_numpy(room).view(torch.bfloat16), (1, 3, 9, 32)
    far = [whole.as_strided(shape, (apart, apart, 32, 1), i * size) for i in range(2)]
    near = [torch.zeros(shape).bfloat16() for _ in range(2)]
    x, norm = torch.randn(1, 64).bfloat16(), torch.ones(64).bfloat16()
    weight = kernels.Packed.of(torch.randn(7 * 32, 64).bfloat16())
    turn, at = (torch.ones(9, 16), torch.zeros(9, 16)), torch.tensor([4])
    for cache in (near, far):
        with kernels.use("triton"):
            kernels.norm_qkv_rope(x, norm, weight, *turn, at, *cache)
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a, b) and bool(b[0, 2, 4].any())


@pytest.mark.parametrize(("kind", "group"), [("skinny_mm", None), ("w8_mm", 128), ("w4_mm", 32)])
def test_several_matrices_are_one_and_slots_are_not_positions(kind: str, group: int | None):
    with kernels.use("triton"), poisoned():
        assert_parts_are_one(kind, group)
