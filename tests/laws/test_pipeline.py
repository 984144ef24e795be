"""``pipeline(f, n)`` is ``accumulate(f, n)``: whatever the schedule, the stages, and what is cut."""

from __future__ import annotations

import pytest

from tests.laws.cases import assert_near, assert_same
from tests.laws.pipelines import alone, model_of, staged

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["stack", "skips", "gpt", "tied gpt"])
def test_stages_end_where_one_process_does(name: str, schedule: str) -> None:
    for run in staged(name, 4, 2, schedule=schedule):
        if model_of(name).tied:
            assert_near(run, alone(name, 4), 1e-9)
        else:
            assert_same(run, alone(name, 4))
