"""The fused blocks of a decoder layer: the Triton kernels against float64."""

from __future__ import annotations

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


@pytest.mark.parametrize(("kind", "group"), [("skinny_mm", None), ("w8_mm", 128), ("w4_mm", 32)])
def test_several_matrices_are_one_and_slots_are_not_positions(kind: str, group: int | None):
    with kernels.use("triton"), poisoned():
        assert_parts_are_one(kind, group)
