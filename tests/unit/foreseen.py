"""What is foreseen of small functions and of a GPT's step."""

from __future__ import annotations

from typing import Any

import torch

import zfunc as zf
from zfunc import optim
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

WIDE = {"params": {"w": torch.zeros(100, 100)}}
SHAPE = GPTConfig(vocab=130, width=72, depth=3, heads=4)
TX = optim.adamw(1e-3)


def alone(fn: Any, state: Any = WIDE, x: Any = None, **how: Any) -> Any:
    """What is foreseen of a function of a state, on one rank."""
    x = torch.zeros(80, 100) if x is None else x
    return zf.foresee(fn, state, x, **{"ranks": 1, "device": "cpu", **how})


def trained(wrap: Any = lambda step: step, stage: int = 3, **how: Any) -> Any:
    """What is foreseen of a GPT's step on four ranks."""
    return trained_on(torch.zeros(4, 17, dtype=torch.int64), wrap, stage, **how)


def trained_on(rows: Any, wrap: Any = lambda step: step, stage: int = 3, **how: Any) -> Any:
    step = wrap(zf.train_step(lambda p, ids: gpt.loss(p, ids, SHAPE), TX))
    step = zf.shard(step, stage=stage, unit_bytes=1 << 17)
    state = zf.TrainState.create(gpt.init(SHAPE, zf.random.key(0)), TX)
    return zf.foresee(step, state, rows, **{"ranks": 4, **how})
