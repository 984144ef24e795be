"""The picture in docs/tensor.md: a Llama split over two ranks, as ``zf.split.plan`` finds it.

    python -m tests.plan_picture

What stands on each rank is drawn in its lane, by the runs of indices that the plan gives it; what
is whole on both goes across.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import zfunc as zf

__all__ = ["PICTURE", "drawn"]

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "tensor.svg"
WIDTH, LANE, LEFT, GAP, HIGH, ROW = 760, 350, 20, 20, 34, 46
STYLE = """
  .column { fill: #ddf4ff; stroke: #0969da; }
  .row { fill: #fff1e5; stroke: #bc4c00; }
  .table { fill: #dafbe1; stroke: #1a7f37; }
  .work { fill: #ffffff; stroke: #57606a; stroke-dasharray: 4 3; }
  .whole { fill: #f6f8fa; stroke: #57606a; }
  .sum { fill: #24292f; stroke: #24292f; }
  .name { font: 600 12px sans-serif; fill: #1f2328; text-anchor: middle; }
  .what { font: 11px sans-serif; fill: #424a53; text-anchor: middle; }
  .light { font: 600 12px sans-serif; fill: #ffffff; text-anchor: middle; }
"""
LAYER = "model.layers.0."
# What follows what: leaves side by side in each lane, or a text across both lanes.
FLOW: list[tuple[str, ...]] = [
    ("table", "model.embed_tokens"),
    ("sum", "sum: the residual stream, whole on both ranks"),
    ("whole", "input_layernorm"),
    ("column", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("work", "attention of this rank's heads"),
    ("row", "self_attn.o_proj"),
    ("sum", "sum, added to the stream"),
    ("whole", "post_attention_layernorm"),
    ("column", "mlp.gate_proj", "mlp.up_proj"),
    ("work", "SiLU, product"),
    ("row", "mlp.down_proj"),
    ("sum", "sum, added to the stream"),
    ("whole", "... further layers, model.norm"),
    ("table", "lm_head"),
    ("sum", "parts put together: the logits"),
]


def plan() -> Any:
    """Of a small Llama with 4 heads, 2 of them of keys and values, and 32 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return zf.split.plan(zf.functionalize(LlamaForCausalLM(config)), 2)


def drawn() -> str:
    """The picture as SVG."""
    found, lines = plan(), []
    for k, (kind, *names) in enumerate(FLOW):
        y = 30 + ROW * k
        if kind in ("sum", "whole"):
            style = "light" if kind == "sum" else "name"
            lines.append(_box(LEFT, y, 2 * LANE + GAP, kind, names[0], "", style))
            continue
        for rank in range(2):
            x, width = LEFT + rank * (LANE + GAP), (LANE - 8 * (len(names) - 1)) // len(names)
            for i, name in enumerate(names):
                told = "" if kind == "work" else _part(found, name, rank)
                lines.append(_box(x + i * (width + 8), y, width, kind, name, told, "name"))
    heads = [
        f'<text class="name" x="{LEFT + LANE // 2 + rank * (LANE + GAP)}" y="20">rank {rank}</text>'
        for rank in range(2)
    ]
    height = 30 + ROW * len(FLOW)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([frame, f"<style>{STYLE}</style>", ground, *heads, *lines, "</svg>"]) + "\n"


def _part(found: Any, name: str, rank: int) -> str:
    """Which indices of a leaf a rank has."""
    leaf = f"{name}.weight"
    split = found.splits[leaf if leaf in found.splits else LAYER + leaf]
    runs = ", ".join(f"{start}-{stop - 1}" for start, stop in split.runs[rank])
    what = ("outputs", "inputs")[split.dim] if name.startswith(("self", "mlp")) else "tokens"
    return f"{what} {runs} of {split.size}"


def _box(x: int, y: int, width: int, kind: str, name: str, told: str, style: str) -> str:
    middle = x + width // 2
    at = f'x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="5"'
    lines = [f'<rect class="{kind}" {at}/>']
    high = y + (14 if told else 21)
    short = escape(name.rpartition(".")[2] if kind in ("column", "row", "table") else name)
    lines.append(f'<text class="{style}" x="{middle}" y="{high}">{short}</text>')
    if told:
        lines.append(f'<text class="what" x="{middle}" y="{y + 28}">{escape(told)}</text>')
    return "\n".join(lines)


if __name__ == "__main__":
    PICTURE.write_text(drawn())
