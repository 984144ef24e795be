"""``covering.pairs``: every two values of any two axes, in few rows."""

from __future__ import annotations

import doctest
from itertools import combinations, product

import pytest

from tests.laws import covering
from tests.laws.covering import STAGES, WORLDS, Covering, each, half, pairs


@pytest.mark.parametrize("sizes", [(21, 4, 2, 2), (2, 4, 2), (3, 3, 3, 3), (2, 2, 2, 2, 2), (5,)])
def test_no_pair_is_left_out(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Covering, "whole", False)
    axes = [[f"{k}:{i}" for i in range(size)] for k, size in enumerate(sizes)]
    rows = pairs(*axes)
    for a, b in combinations(range(len(axes)), 2):
        assert {(row[a], row[b]) for row in rows} == {*product(axes[a], axes[b])}
    most, second, *_ = sorted([*sizes, 1], reverse=True)
    assert len(rows) <= 1.5 * most * second
    monkeypatch.setattr(Covering, "whole", True)
    assert pairs(*axes) == [*product(*axes)]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(21, 4, 2, 2), (2, 4, 2), (3, 3, 3), (9, 5, 4), (4, 4), (5,)])
def test_no_value_is_left_out(
    sizes: tuple[int, ...], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Covering, "whole", False)
    axes = [[f"{k}:{i}" for i in range(size)] for k, size in enumerate(sizes)]
    rows = each(*axes, times=times)
    assert len(rows) == times * max(sizes)
    assert [{*column} for column in zip(*rows, strict=True)] == [{*axis} for axis in axes]
    monkeypatch.setattr(Covering, "whole", True)
    assert each(*axes, times=times) == [*product(*axes)]


def test_eight_turns_have_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Covering, "whole", False)
    assert {place for turn in range(8) for place in half(turn)} == {*product(STAGES, WORLDS)}


def test_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Covering, "whole", False)
    assert doctest.testmod(covering).failed == 0
