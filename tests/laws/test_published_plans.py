"""Plans that are found agree with those that Hugging Face wrote, or say where they do not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.laws.planned import model_of
from zfunc.layout.splits import Cut
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.probing.plans import plan_of
from zfunc.probing.published import STYLES, said_otherwise

pytest.importorskip("transformers")


def styles_of(model: Any) -> dict[str, str]:
    found: dict[str, str] = model._pool.skeleton._tp_plan
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "glm", "olmo2", "mixtral", "deepseek"])
def test_found_plans_say_what_published_ones_do(name: str) -> None:
    model, batch = model_of(name)
    styles = styles_of(model)
    assert len(styles) > 3 and set(styles.values()) <= {*STYLES}  # else nothing was compared
    plan = plan_of(model, 2, example=batch)
    assert not plan.otherwise
    assert "own plan says otherwise" not in str(plan)


def test_a_part_that_a_rule_keeps_whole_is_told() -> None:
    model, _ = model_of("llama")
    plan = plan_of(model, 2, whole=lambda name: "down_proj" in name)
    assert plan.otherwise["model.layers.1.mlp.down_proj"] == "rowwise there, whole here"
    assert plan.otherwise["model.layers.0.mlp.up_proj"] == "colwise there, whole here"
    assert str(plan).endswith(
        "the model's own plan says otherwise:\n"
        "  model.layers.{0-1}.mlp.gate_proj: colwise there, whole here\n"
        "  model.layers.{0-1}.mlp.up_proj: colwise there, whole here\n"
        "  model.layers.{0-1}.mlp.down_proj: rowwise there, whole here"
    )


def test_a_published_plan_that_is_wrong_is_told() -> None:
    model, _ = model_of("qwen3")
    styles = styles_of(model)
    changed = {
        "model.layers.*.mlp.up_proj": "rowwise",
        "model.layers.*.self_attn.q_norm": "colwise",
        "model.layers.*.self_attn.o_proj": "colwise_gather_output",
        "model.layers.*.mlp.gate_proj": "a style of tomorrow",
    }
    assert changed.keys() <= styles.keys()
    model._pool.skeleton._tp_plan = {**styles, **changed}
    assert plan_of(model, 2).otherwise == {
        f"model.layers.{i}.{name}": said
        for i in range(2)
        for name, said in {
            "mlp.up_proj": "rowwise there, a column here",
            "self_attn.q_norm": "colwise there, between here",
            "self_attn.o_proj": "colwise_gather_output there, a row here",
        }.items()
    }


def test_leaves_of_experts_and_tables() -> None:
    model: Any = nn.ModuleDict({"table": nn.Embedding(3, 2), "experts": nn.Linear(2, 2)})
    model._tp_plan = {
        "table": "embedding_rowwise",
        "experts": "moe_tp_experts",
        "experts.weight": "packed_colwise",
        "none.*": "colwise",
    }
    assert said_otherwise(model, SplitPlan(2, {}, {"table": Role.EMBED})) == {
        "experts": "moe_tp_experts there, whole here",
        "experts.weight": "packed_colwise there, whole here",
    }
    assert said_otherwise(nn.Linear(2, 2), SplitPlan(2, {})) == {}


def test_a_product_whose_weight_other_code_reads() -> None:
    """As that of keys and values in DeepSeek-V2: it is split, and has no role."""
    model: Any = nn.ModuleDict({"read": nn.Linear(2, 2, bias=False)})
    plan = SplitPlan(2, {"read.weight": Cut(0).split((2, 2), 2)})
    model._tp_plan = {"read": "colwise"}
    assert said_otherwise(model, plan) == {}
    model._tp_plan = {"read": "rowwise"}
    assert said_otherwise(model, plan) == {"read": "rowwise there, whole here"}
