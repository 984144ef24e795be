"""A functional GPT on split leaves, and runs of steps of it: for tests of ``split``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import zfunc as zf
from tests.laws.cases import assert_same, numbers
from zfunc import optim

F64 = torch.float64
WIDTH, HEADS, KV, SIZE, WORDS, INNER = 6, 4, 2, 3, 11, 12
TX = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.02, weight_decay=0.1))
RULES = {
    "blocks.*.q*": zf.Cut(0, by=HEADS),
    "blocks.*.kv": zf.Cut(0, parts=2, by=KV),
    "blocks.*.out": zf.Cut(1, by=HEADS),
    "blocks.*.up*": zf.Cut(0),
    "blocks.*.down": zf.Cut(1),
    "table": zf.Cut(0),
}
Batch = dict[str, Tensor]


def params(dtype: torch.dtype = F64) -> Any:
    """A GPT with grouped heads, a tied table, norms, biases and a frozen leaf."""
    shapes = {
        "norm": (WIDTH,),
        "q": (HEADS * SIZE, WIDTH),
        "q_bias": (HEADS * SIZE,),
        "kv": (2 * KV * SIZE, WIDTH),
        "out": (WIDTH, HEADS * SIZE),
        "up": (INNER, WIDTH),
        "up_bias": (INNER,),
        "down": (WIDTH, INNER),
        "bias": (WIDTH,),
    }
    blocks = zf.Layers(
        {name: numbers(shape, 10 * k + i, dtype) for i, (name, shape) in enumerate(shapes.items())}
        for k in range(2)
    )
    return {"table": numbers((WORDS, WIDTH), 99, dtype), "blocks": blocks}


def attention(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    q, kv = zf.column(x, p["q"], p["q_bias"]), zf.column(x, p["kv"])
    k, v = kv.chunk(2, -1)
    heads = [y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (q, k, v)]
    y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return zf.row(y.transpose(1, 2).flatten(2), p["out"])


def block(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    x = x + attention(p, F.layer_norm(x, (WIDTH,), p["norm"]))
    return x + zf.row(F.gelu(zf.column(x, p["up"], p["up_bias"])), p["down"], p["bias"])


def loss_of(params: Any, batch: Batch) -> Tensor:
    x = zf.scan(block, params["blocks"], zf.embed(batch["ids"], params["table"]))
    return zf.cross_entropy(zf.column(x[:, :-1], params["table"]), batch["ids"][:, 1:])


def batch(i: int, words: int = WORDS, rows: int = 6) -> Batch:
    return {"ids": torch.randint(words, (rows, 5), generator=torch.Generator().manual_seed(i))}


def run(
    step: Any,
    wrap: Callable[[Any], Any] = lambda step: step,
    start: Callable[[], Any] = params,
    tx: Any = TX,
    steps: int = 3,
    words: int = WORDS,
    rows: int = 6,
) -> tuple[list[Any], Any]:
    """Metrics of each step and the last state, in full, on the calling rank."""
    step = wrap(step)
    state = step.place(zf.TrainState.create(start(), tx, key=7))
    metrics = []
    for i in range(steps):
        state, out = step(state, step.local_batch(batch(i, words, rows)))
        metrics.append(out)
    return metrics, step.unplace(state)


def on_mesh(ways: int, data: int, stage: int | None, **more: Any) -> Callable[[Any], zf.Step]:
    def wrap(step: Any) -> zf.Step:
        step = zf.split(step, mesh=zf.mesh(data=data, tensor=ways), **more)
        return step if stage is None else zf.shard(step, stage=stage, unit_bytes=600)

    return wrap


def ranks_of(ways: int, data: int, body: Callable[[], Any]) -> list[Any]:
    """What each rank gives; ranks along ``tensor`` give the same bits."""
    found = zf.simulate(ways * data)(body)()
    for rank, mine in enumerate(found):
        assert_same(mine, found[rank - rank % ways], f"rank {rank}")
    return found


_ALONE: dict[tuple[Any, ...], Any] = {}


def alone(tx: Any = TX, rows: int = 6, steps: int = 3) -> Any:
    """The bare step in one process, run once: what comes out is only read."""
    key = (tx, rows, steps)
    if key not in _ALONE:
        step = zf.train_step(loss_of, tx)
        _ALONE[key] = run(step, lambda f: zf.shard(f, stage=0), tx=tx, rows=rows, steps=steps)
    return _ALONE[key]
