"""``zf.evaluate`` on the stages of a pipeline: chunk by chunk, each on the rank that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zfunc.engine.context import Context
from zfunc.engine.differentiation import new_pass
from zfunc.layout.readable import Readable
from zfunc.ranks.comm import Group
from zfunc.transforms.pipelining.results import broadcast
from zfunc.transforms.pipelining.stage import PipelineStage
from zfunc.trees.nodes import PLACED, Placed, leaves_in

__all__ = ["can_be_staged", "evaluated"]


def can_be_staged(params: Any, arguments: Any) -> bool:
    """Whether stages can evaluate a function of these; otherwise each gathers what it uses."""
    if not isinstance(params, Readable) or not params.layout.layers:
        return False
    return not any(isinstance(x, Placed) for x in leaves_in(arguments, PLACED))


def evaluated(
    running: Context,
    fn: Callable[..., Any],
    params: Readable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank_of: Sequence[int],
    ranks: Group,
) -> Any:
    """``fn(params, *args, **kwargs)`` without gradients, the same on all stages."""
    rows = [
        [("F", 0, k) for k, its in enumerate(rank_of) if its == rank] for rank in range(ranks.size)
    ]
    name = "evaluate", running.evaluated
    running.evaluated += 1
    stage = PipelineStage(running, fn, params, [(args, kwargs)], rank_of, rows, ranks, name)
    try:
        out = _run(stage)
    finally:
        stage.base.close()
    return broadcast(ranks, rank_of[-1], out, stage.plans[0].result, "evaluated")


def _run(stage: PipelineStage) -> Any:
    out = None
    stage.lend()
    for _, i, k in stage.actions[stage.me]:
        with stage.telling(("F", i, k)):
            out = _of_chunk(stage, i, k)
    stage.wire.finish()
    return out


def _of_chunk(stage: PipelineStage, i: int, k: int) -> Any:
    """What the last chunk returns; the others return nothing, and send."""
    stage.wire.post_ahead()
    owner = new_pass(stage.running)
    owner.evaluating = True
    try:
        source = stage.take_part(owner)
        stage.hold(source)
        owner.plan.order = [(source.index, u) for u in stage.layers(k)]
        run = stage.run_of(i, k, source)
        with stage.within(owner), torch.no_grad():
            out = run.run(stage.fn, source.tree, *stage.batches[i])
            owner.computed()
        stage.send_on(i, k, run.outs)
        owner.finish()
    finally:
        owner.close()
    return out
