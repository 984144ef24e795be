"""The pictures in docs/pictures: a step with transforms, the stages of ZeRO, a mesh.

    python -m tests.pictures

Each is drawn from what zfunc says: the order of a step's transforms, the bytes that simulated ranks
store, the coordinates of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import zfunc as zf
from zfunc import optim
from zfunc.language import gpt

__all__ = ["FOLDER", "PICTURES"]

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STYLE = """
  .box { fill: #f6f8fa; stroke: #57606a; }
  .yours { fill: #dafbe1; stroke: #1a7f37; }
  .data { fill: #ddf4ff; stroke: #0969da; }
  .frame { fill: none; stroke: #57606a; stroke-dasharray: 5 4; }
  .params { fill: #54aeff; }
  .grads { fill: #4ac26b; }
  .moments { fill: #fb8f44; }
  .empty { fill: #ffffff; stroke: #d0d7de; }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.4; marker-end: url(#tip); }
  .name { font: 600 14px sans-serif; fill: #1f2328; text-anchor: middle; }
  .what { font: 12px sans-serif; fill: #424a53; text-anchor: middle; }
  .left { font: 600 13px sans-serif; fill: #1f2328; }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 8 4 0 8z" fill="#57606a"/></marker></defs>'
)
DOES = {  # what to write below the name of a transform
    "donate": ("reuses", "memory"),
    "offload": ("loads", "and stores"),
    "shard": ("gathers", "and reduces"),
    "remat": ("computes", "twice"),
    "precision": ("casts to", "16 bits"),
}


def a_step() -> str:
    """Transforms in the order in which data flows through them, around the step."""

    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return state, {}

    step = zf.precision(zf.remat(zf.shard(zf.offload(zf.donate(train_step)), stage=3)))
    names = [str(transform).partition("(")[0] for transform in step.transforms]
    wide, gap, top = 92, 22, 46
    parts, x = [], 8
    boxes = [("data", "state", ("on this", "rank")), *(("box", n, DOES[n]) for n in names)]
    for kind, name, (first, second) in [*boxes, ("yours", "your step", ("loss and", "update"))]:
        parts += [_box(kind, x, top, wide, 74), _text("name", x + wide / 2, top + 24, name)]
        parts.append(_text("what", x + wide / 2, top + 42, first))
        parts.append(_text("what", x + wide / 2, top + 60, second))
        x += wide + gap
    end = x - gap
    parts += [
        _arrow(8, top - 12, end, top - 12),
        _text("what", end / 2, top - 20, "parameters, on their way to the loss"),
        _arrow(end, top + 88, 8, top + 88),
        _text("what", end / 2, top + 108, "gradients, on their way to the new state"),
    ]
    return _svg(end + 8, top + 120, parts)


def the_stages() -> str:
    """What each of four ranks stores at stages 0 to 3, in proportion to the full trees."""
    config = gpt.GPTConfig(vocab=64, width=32, depth=4, heads=2)
    tx = optim.adamw(1e-2)
    start = zf.TrainState.create(gpt.init(config, zf.random.key(0)), tx)
    ids = zf.random.randint(zf.random.key(1), 0, 64, (8, 9))

    def train_step(state: Any, ids: Any) -> tuple[Any, int]:
        _, grads = zf.value_and_grad(lambda params: gpt.loss(params, ids, config))(state.params)
        return state, zf.tree.size_bytes(grads)

    def stored(stage: int) -> tuple[int, int, int]:
        step = zf.shard(train_step, stage=stage)
        state = step.place(start)
        _, grads = step(state, zf.local_batch(ids))
        return zf.tree.size_bytes(state.params), grads, zf.tree.size_bytes(state.opt_state)

    params = zf.tree.size_bytes(start.params)
    full = (params, params, zf.tree.size_bytes(start.opt_state))
    wide, high, parts = 140, 100, []
    for rank in range(4):
        parts.append(_text("name", 90 + 160 * rank + wide / 2, 20, f"rank {rank}"))
    for stage in range(4):
        top = 32 + stage * (high + 16)
        parts.append(_text("left", 8, top + high / 2 + 4, f"stage {stage}"))
        for rank, sizes in enumerate(zf.simulate(4)(stored)(stage)):
            x = 90 + 160 * rank
            for k, (kind, size, of) in enumerate(zip(KINDS, sizes, full, strict=True)):
                tall, bar = (24, 24, 48)[k], (0, 26, 52)[k]
                parts.append(_box("empty", x, top + bar, wide, tall, 0))
                width = round(wide * min(1.0, size / of))
                left = x + wide * rank // 4 * (width < wide)
                parts.append(_box(kind, left, top + bar, width, tall, 0))
    foot = 32 + 4 * (high + 16) + 6
    for k, (kind, name) in enumerate(KINDS.items()):
        parts += [_box(kind, 90 + 190 * k, foot, 16, 16, 0)]
        parts.append(f'<text class="left" x="{112 + 190 * k}" y="{foot + 13}">{name}</text>')
    return _svg(740, foot + 28, parts)


KINDS = {"params": "parameters", "grads": "gradients", "moments": "optimizer state"}


def a_mesh() -> str:
    """Eight ranks by their coordinates on a mesh of three axes."""
    mesh = zf.mesh(pipe=2, data=2, tensor=2).closed(8)
    parts = []
    for rank in range(8):
        at = mesh.coordinates(rank)
        x, y = 34 + 370 * at["pipe"] + 160 * at["tensor"], 62 + 84 * at["data"]
        parts += [_box("data", x, y, 140, 62), _text("name", x + 70, y + 26, f"rank {rank}")]
        place = ", ".join(f"{axis} {at[axis]}" for axis in ("data", "tensor"))
        parts.append(_text("what", x + 70, y + 46, place))
    for stage in range(2):
        x = 20 + 370 * stage
        parts += [_box("frame", x, 34, 330, 190), _text("name", x + 165, 22, f"pipe {stage}")]
    parts += [
        _arrow(350, 129, 388, 129),
        _text(
            "what",
            375,
            248,
            "pipe: other layers   ·   data: other rows   ·   tensor: parts of a layer",
        ),
    ]
    return _svg(740, 262, parts)


def _box(kind: str, x: float, y: float, wide: float, high: float, round_: int = 5) -> str:
    size = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{round_}"'
    return f'<rect class="{kind}" {size}/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _arrow(x: float, y: float, u: float, v: float) -> str:
    return f'<path class="arrow" d="M{x:g} {y:g} L{u:g} {v:g}"/>'


def _svg(wide: float, high: float, parts: list[str]) -> str:
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}">'
    ground = f'<rect width="{wide:g}" height="{high:g}" fill="#ffffff"/>'
    return "\n".join([frame, f"<style>{STYLE}</style>", TIP, ground, *parts, "</svg>"]) + "\n"


PICTURES: dict[str, Callable[[], str]] = {
    "mesh.svg": a_mesh,
    "stages.svg": the_stages,
    "step.svg": a_step,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
