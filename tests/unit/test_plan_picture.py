"""The picture of a plan is that of the plan."""

from __future__ import annotations

import pytest

from tests.plan_picture import PICTURE, drawn


def test_the_picture_shows_what_the_plan_says() -> None:
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    assert PICTURE.read_text() == drawn(), "run `python -m tests.plan_picture`"
