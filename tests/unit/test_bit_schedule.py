"""The bit schedule, step by step, and groups of weights in training."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import zfunc as zf
from zfunc import quant
from zfunc.quant.fake import Grouping, fake_quantize
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor
from zfunc.quant.schedules import Rules, advance, factors, start


def run(rules: Rules, steps: int, curvature: Any = None) -> list[list[int]]:
    """Bits of each weight after every step."""
    curvature = torch.tensor([0.0]) if curvature is None else torch.tensor(curvature)
    state, rows = start(rules, len(curvature)), []
    for _ in range(steps):
        state = advance(state, rules, curvature)
        rows.append(state["bits"].tolist())
    return rows


def drops(rows: list[list[int]], weight: int = 0) -> list[int]:
    """After how many steps the weight lost a bit."""
    bits = [row[weight] for row in rows]
    return [t + 1 for t in range(1, len(bits)) if bits[t] < bits[t - 1]]


@given(
    period=st.integers(2, 6),
    offset=st.integers(0, 7),
    first=st.integers(3, 16),
    lost=st.integers(0, 5),
)
def test_bits_fall_after_p_2p_4p(period: int, offset: int, first: int, lost: int) -> None:
    target = max(2, first - lost)
    rules = Rules(first, target, period, offset)
    rows = run(rules, offset + 200)
    expected = [offset + period * 2**i for i in range(first - target)]
    assert drops(rows) == [t for t in expected if t <= offset + 200]
    assert rows[0] == [first] and min(row[0] for row in rows) >= target


def test_one_bit_a_step_at_most() -> None:
    assert [row[0] for row in run(Rules(8, 4, period=1), 10)] == [7, 6, 6, 5, 5, 5, 5, 4, 4, 4]


def test_curvature_delays() -> None:
    """The first bit falls at P for all; the next ones after twice the factor times as long."""
    rows = run(Rules(16, 13, period=2), 120, [0.0, 0.24, 0.25, 0.99, 1.0])
    assert [drops(rows, i) for i in range(5)] == [
        [2, 4, 8], [2, 4, 8], [2, 8, 32], [2, 16], [2, 20]
    ]  # fmt: skip
    assert factors(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == [1, 2, 3, 4, 5]


def test_the_mixing_ratio_falls_and_comes_back() -> None:
    rules = Rules(16, 14, period=3, mix_rate=0.25)
    state, seen = start(rules, 1), []
    for _ in range(8):
        state = advance(state, rules)
        seen.append(float(state["ratio"]))
    assert seen == [0.75, 0.5, 1.0, 0.75, 0.5, 1.0, 0.75, 0.5]


def test_bad_schedules() -> None:
    step = zf.train_step(lambda p, b: p["w"].sum(), zf.optim.sgd(0.1))
    for how, what in (
        ({"start_bits": 8, "target_bits": 12}, "lies below"),
        ({"start_bits": 17}, "start_bits"),
        ({"target_bits": 1}, "target_bits"),
        ({"target_bits": 8.0}, "target_bits"),
        ({"period": 0}, "period"),
        ({"offset": -1}, "offset"),
        ({"mix_rate": 0.0}, "mix_rate"),
        ({"groups": 0}, "groups"),
        ({"group_size": 0}, "group_size"),
        ({"rounding": "up"}, "rounding"),
        ({"curvature": "exact"}, "curvature"),
    ):
        with pytest.raises(ValueError, match=what):
            zf.quantize(step, **how)  # type: ignore[arg-type]


@given(
    shape=st.sampled_from([(6, 4), (5, 7), (1, 9), (3, 4, 5)]),
    groups=st.integers(1, 40),
    bits=st.integers(2, 15),
    symmetric=st.booleans(),
)
def test_groups_cover_every_leaf(
    shape: tuple[int, ...], groups: int, bits: int, symmetric: bool
) -> None:
    torch.manual_seed(groups)
    form = Grouping(groups, None, symmetric).format(shape, bits)
    x = torch.randn(shape)
    y = fake_quantize(x, form)
    span = float(x.max().clamp_min(0) - x.min().clamp_max(0))
    step = max(2 * float(x.abs().max()), span) / (2**bits - 2)
    assert y.shape == x.shape and float((y - x).abs().max()) <= step * 1.02
    if bits <= 8:
        assert torch.equal(QTensor.quantize(x, form).dequantize(), y)


def test_groups_are_blocks_of_rows() -> None:
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0], [400.0, 1.0]])
    form = Grouping(groups=2).format(x.shape, 8)
    rounded = QTensor.quantize(x, form)
    torch.testing.assert_close(rounded.scale[:, 0] * 127, torch.tensor([2.0, 2.0, 400.0, 400.0]))
    assert rounded.format == Format(8, None)  # from here on a scale for each row


def test_weights_that_are_no_numbers_are_named() -> None:
    tx = zf.optim.sgd(0.1)
    step = zf.quantize(zf.train_step(lambda p, b: p["w"].sum(), tx), start_bits=8)
    state = step.place(zf.TrainState.create({"w": torch.tensor([[1.0, math.nan]])}, tx))
    with pytest.raises(zf.NonFiniteError, match="w has 1 value"):
        step(state, None)


def test_a_curvature_of_known_eigenvalues() -> None:
    scales = torch.tensor([[3.0, -7.0], [0.5, 1.0]])

    def loss(p: Any) -> torch.Tensor:
        return 0.5 * (scales * p["w"] ** 2).sum() + (p["b"] * 3).sum()

    found = quant.top_eigenvalues(loss, {"w": torch.ones(2, 2), "b": torch.ones(2)})
    assert float(found[""]) == pytest.approx(-7.0, rel=0.01)
    linear = quant.top_eigenvalues(lambda p: (p["b"] * 3).sum(), {"b": torch.ones(2)})
    assert float(linear[""]) == 0.0
