"""What states, trees, models and descriptions look like in a notebook and at a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zfunc as zf
from zfunc import optim
from zfunc.engine.hooks import Description
from zfunc.trees.forms import as_html, as_text, form, short


def state(layers: int = 3, extra: int = 0) -> Any:
    params: dict[str, Any] = {"head": torch.zeros(64, 32)}
    params["layers"] = zf.Layers([{"w": torch.zeros(5, 4)} for _ in range(layers)])
    params |= {f"p{i}": torch.zeros(i + 1) for i in range(extra)}
    return zf.TrainState.create(params, optim.adamw(0.1), key=7)


def test_a_state_is_a_screenful_of_shapes() -> None:
    lines = repr(state()).splitlines()
    assert lines[:5] == [
        "TrainState",
        "  params:",
        "    head: f32[64,32]",
        "    layers: Layers",
        "      0..2:",
    ]
    assert "    mu: as params" in lines and "    nu: as params" in lines
    assert "  step: i64[] 0" in lines


def test_a_wide_or_deep_tree_is_cut() -> None:
    text = repr(state(extra=200))
    assert len(text.splitlines()) <= 40
    assert "more" in text and "  step: i64[] 0" in text
    deep: Any = torch.zeros(1)
    for _ in range(100):
        deep = {"x": deep}
    text = as_text(form(deep))
    assert len(text.splitlines()) == 40 and text.endswith("... 61 more")


@pytest.mark.parametrize("stage", range(4))
def test_a_placed_state_shows_full_leaves_and_waits_for_nothing(stage: int) -> None:
    def body() -> tuple[str, str]:
        placed = zf.shard(lambda state: state, stage=stage).place(state())
        return repr(placed), placed.params._repr_html_()

    for text, page in zf.simulate(2)(body)():
        assert "    head: f32[64,32]" in text.splitlines()
        assert ("Sharded(" in text) == (stage > 0)
        assert "<details open>" in page and "f32[5,4]" in page


def test_what_was_donated_says_so() -> None:
    step = zf.donate(lambda state: state.replace(step=state.step + 1))
    before = step.place(state())
    step(before)
    assert "donated" in repr(before)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "f64"),
        (torch.float16, "f16"),
        (torch.uint8, "u8"),
        (torch.complex64, "c64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_dtypes_have_short_names(dtype: torch.dtype, name: str) -> None:
    assert short(dtype, (2, 3)) == f"{name}[2,3]"


def test_names_of_leaves_are_no_markup() -> None:
    assert "<b>" not in as_html(form({"<b>": torch.zeros(1)}))


def test_a_description_is_lines_in_a_notebook() -> None:
    text = Description("one <step>\n  two")
    assert repr(text) == "one <step>\n  two"
    assert text._repr_html_() == "<pre>one &lt;step&gt;\n  two</pre>"


def test_a_step_and_a_plan_of_a_split_are_lines_in_a_notebook() -> None:
    model = zf.functionalize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    step = zf.shard(zf.train_step(lambda p, x: model.apply(p, x).mean(), optim.sgd(0.1)), stage=3)
    assert step._repr_html_() == f"<pre>{step!r}</pre>"
    plan = zf.split.plan(model, 2)
    assert repr(plan) == str(plan) and plan._repr_html_().startswith("<pre>split over 2 ranks")


def test_a_functional_says_how_it_is_called() -> None:
    model = zf.functionalize(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"model.apply\(params, \*inputs\)"):
        model(torch.zeros(2))
