"""Plans of unmodified Hugging Face models: what each rank makes of its parts is right.

``--whole``: every family over 2, 3 and 4 ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zfunc as zf
from tests.laws.covering import Covering
from tests.laws.planned import FAMILIES, OTHERS, check, model_of, share_split
from tests.laws.zoo import Row, Table
from zfunc.probing.plans import plan_of
from zfunc.probing.texts import text_of

transformers = pytest.importorskip("transformers")

FEW = [
    ("llama", 2),
    ("llama", 4),
    ("llama, 1 kv head", 4),
    ("falcon, 1 kv head", 4),
    ("llama, tied", 3),
    ("gpt2", 3),
    ("phi3, 1 kv head", 4),
    ("gptbigcode", 4),
    ("bloom", 3),
    ("deepseek", 2),
    ("mixtral", 3),
    ("gemma3", 2),
    ("olmo2", 3),
    ("bitnet", 2),
    ("gpt-oss", 2),
    ("bert", 4),
    ("t5", 2),
    ("whisper", 2),
    ("vit", 4),
]
ALL = [(name, ways) for name in (*FAMILIES, *OTHERS) for ways in (2, 3, 4)]
# Their heads of keys and values are fewer than 4 ranks, and are split there nevertheless.
SHARED = ["llama", "llama, 1 kv head", "phi3, 1 kv head", "gptbigcode", "falcon, 1 kv head"]
LEAST = {name: least for name, (_, _, least) in FAMILIES.items()} | OTHERS


@pytest.mark.parametrize(("name", "ways"), ALL if Covering.whole else FEW)
def test_what_ranks_make_of_their_parts_is_right(name: str, ways: int) -> None:
    model, batch = model_of(name)
    plan = plan_of(model, ways, example=batch)
    if ways == 2 or name in SHARED:
        assert share_split(model, plan) >= LEAST[name], text_of(plan)
    check(model, plan, batch)


@pytest.mark.parametrize("name", ["olmo2", "gpt-oss", "bitnet"])
def test_split_models_generate_what_whole_ones_do(name: str) -> None:
    """Norms over all heads, and biases of experts, also of single tokens with a cache."""
    model, batch = model_of(name)
    ids = batch["input_ids"][:, :4]
    want = zf.generate(model, model.params, ids, max_new_tokens=6)

    def rank() -> torch.Tensor:
        placed = zf.split(model.apply, model, tensor=2).place(model.params)
        return zf.generate(model, placed, ids, max_new_tokens=6)

    assert all(torch.equal(got, want) for got in zf.simulate(2)(rank)())


class Tail(nn.Module):
    """Layers with products behind them that are no head: their names are in no order of letters."""

    NAMES = ("out", "gate", "mix", "last", "first", "score")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        mlps = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.layers = nn.ModuleList(mlps)
        self.tail = nn.ModuleDict({name: nn.Linear(16, 16) for name in self.NAMES})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        for part in self.tail.values():
            x = part(x)
        return x


def test_what_stays_whole_is_told_in_the_order_of_the_module() -> None:
    whole = plan_of(zf.functionalize(Tail()), 2).whole
    assert [x for x in whole if x.startswith("tail.")] == [f"tail.{x}" for x in Tail.NAMES]


def test_the_table_of_families_says_what_fell() -> None:
    table = Table(ways=4, kv=1)
    table.fill(["gpt_bigcode"], seconds=100)
    (made,) = table.rows
    assert made.share is not None and made.share > 0.97 and not table.wrong
    assert str(made) == "| gpt_bigcode | 99% |  |"
    table.rows.append(Row("blt", said="too large"))
    assert "1 families compared: 1 have 90 %" in str(table)
    assert "Not compared, 1: blt (too large)." in str(table) and not table.wrong
    table.rows += [
        Row("llama", 0.5, "why", published="same"),
        Row("mamba", 0.0),
        Row("doge", 0.0, wrong="1e-3"),
    ]
    assert table.wrong == ["doge", "llama"]
    assert "1 have a plan of their own in transformers: 1 of these say the same" in str(table)
    again = Table(ways=4, kv=1)
    again.read(str(table))
    assert str(again) == str(table) and again.wrong == table.wrong
    assert str(table.rows[-1]) == "| doge | **wrong** | 1e-3 |"


def test_a_large_model_on_meta_is_planned() -> None:
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = zf.functionalize(transformers.LlamaForCausalLM(config).to(torch.bfloat16))
    plan = plan_of(model, 8)
    assert len(plan.splits) == 32 * 7 + 2
    assert plan.splits["model.layers.31.self_attn.k_proj.weight"].width(7) == 128
