"""``zf.evaluate`` on the stages of a pipeline: chunk by chunk, each on the rank that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.engine.batches import is_plain, mislaid
from zfunc.engine.context import Context
from zfunc.engine.differentiation import new_pass
from zfunc.layout.readable import Readable
from zfunc.ranks.comm import Group, even_cuts
from zfunc.ranks.keys import is_key
from zfunc.rehearsal.plans import Spec
from zfunc.rehearsal.results import flattened, is_array
from zfunc.rehearsal.values import is_number
from zfunc.transforms.pipelining.results import broadcast
from zfunc.transforms.pipelining.stage import PipelineStage
from zfunc.trees.nodes import NAMESPACE, PLACED, Placed, leaves_in

__all__ = ["can_be_staged", "evaluated", "forward", "forward_rows", "predicted"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def can_be_staged(params: Any, arguments: Any) -> bool:
    """Whether stages can evaluate a function of these; otherwise each gathers what it uses."""
    if not isinstance(params, Readable) or not params.layout.layers:
        return False
    return not any(isinstance(x, Placed) for x in leaves_in(arguments, PLACED))


def evaluated(
    running: Context,
    fn: Callable[..., Any],
    params: Readable,
    given: Arguments,
    rank_of: Sequence[int],
    ranks: Group,
) -> Any:
    """``fn(params, *args, **kwargs)`` without gradients, the same on all stages."""
    name = "evaluate", running.evaluated
    running.evaluated += 1
    rows = forward_rows(rank_of, ranks.size, 1)
    stage = PipelineStage(running, fn, params, [given], rank_of, rows, ranks, name)
    outs = _run(stage)
    like = stage.plans[0].result
    return broadcast(ranks, rank_of[-1], outs and outs[0], like, "evaluated", stage.device)()


def predicted(
    running: Context,
    fn: Callable[..., Any],
    params: Readable,
    given: Arguments,
    rank_of: Sequence[int],
    ranks: Group,
    microbatches: int,
) -> Any:
    """The same, where ``fn`` computes each row of a batch by itself: in microbatches.

    What the results hold beside tensors and plain values, a cache, is ``None``.
    """
    name = "evaluate", running.evaluated
    running.evaluated += 1

    def stage_of(batches: Sequence[Arguments]) -> PipelineStage:
        rows = forward_rows(rank_of, ranks.size, len(batches))
        return PipelineStage(running, fn, params, batches, rank_of, rows, ranks, name)

    stage = stage_of([given])
    full = stage.plans[0].result

    def cut(number: int) -> PipelineStage | None:
        parts = _parts(given, number)
        if len(parts) == 1:
            return None
        found = stage_of(parts)
        every = [(plan.result, _rows(part)) for plan, part in zip(found.plans, parts, strict=True)]
        if all(_has_rows(*each, full, _rows(given)) for each in every):
            return found
        found.base.close()
        return None

    in_parts = cut(microbatches)
    if stage.gathering.size > 1:  # others may have fewer rows
        own = len(in_parts.batches) if in_parts else 1
        fewest = min(stage.gathering.exchange(own, label="microbatches"))
        if in_parts and fewest < own:
            in_parts.base.close()
            in_parts = cut(fewest)
    if in_parts:
        stage.base.close()
        stage = in_parts
    outs = _run(stage)
    mine, like = outs and _joined(outs), _told(full)
    return broadcast(ranks, rank_of[-1], mine, like, "evaluated", stage.device)()


def forward_rows(
    rank_of: Sequence[int], ranks: int, microbatches: int
) -> list[list[tuple[str, int, int]]]:
    """For each stage what it computes, in one order on all: no stage waits for ever.

    Where a stage has several chunks, as many microbatches as there are stages go through one of
    them before the next one begins.
    """
    every = [("F", i, k) for i in range(microbatches) for k in range(len(rank_of))]
    every.sort(key=lambda row: (row[1] // ranks, row[2], row[1]))
    return [[row for row in every if rank_of[row[2]] == rank] for rank in range(ranks)]


def _run(stage: PipelineStage) -> list[Any]:
    """What the last stage has computed of each microbatch; nothing on others."""
    outs: list[Any] = []
    try:
        stage.lend()
        for _, i, k in stage.actions[stage.me]:
            stage.wire.post_ahead()
            with stage.telling(("F", i, k)):
                out = forward(stage, i, k, *stage.given(i))
            if k == stage.last:
                outs.append(out)
        stage.wire.finish()
    finally:
        stage.base.close()
    return outs


def forward(
    stage: PipelineStage, i: int, k: int, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Any:
    """A microbatch in a chunk, without gradients; what the function returns, in the last one."""
    owner = new_pass(stage.running)
    owner.evaluating = True
    try:
        source = stage.take_part(owner, stage.hold)
        owner.plan.order = [(source.index, u) for u in stage.layers(k)]
        run = stage.run_of(i, k, source)
        with stage.within(owner), torch.no_grad():
            out = run.run(stage.fn, stage.tree_of(source), tuple(args), kwargs)
            owner.computed()
        owner.finish()
        return out
    finally:
        owner.close()


# --- microbatches --------------------------------------------------------------------------------


def _parts(given: Arguments, n: int) -> list[Arguments]:
    """The arguments in up to ``n`` parts along dim 0, or all in one that cannot be cut."""
    tree: Any = given
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    rows = {len(x) for x in tensors if x.ndim}
    rest = [x for x in leaves if not isinstance(x, Tensor)]
    if len(rows) != 1 or 0 in rows or any(map(is_key, tensors)) or not all(map(is_plain, rest)):
        return [given]
    size = rows.pop()
    if any(True for value in (*given[0], *given[1].values()) for _ in mislaid(value, size)):
        return [given]
    cuts = even_cuts(size, min(n, size))

    def part(a: int, b: int) -> Any:
        rows = (x[a:b] if isinstance(x, Tensor) and x.ndim else x for x in leaves)
        return optree.tree_unflatten(spec, list(rows))

    return [part(a, b) for a, b in pairwise(cuts)]


def _rows(given: Arguments) -> int:
    tree: Any = given
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    return next(len(x) for x in leaves if isinstance(x, Tensor) and x.ndim)


def _has_rows(result: Any, rows: int, full: Any, all_rows: int) -> bool:
    """Whether a microbatch's results are rows of those of the whole batch, as its arguments are."""
    mine, theirs = flattened(result, Spec)[0], flattened(full, Spec)[0]
    if len(mine) != len(theirs):
        return False
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, Spec) != isinstance(b, Spec) or is_number(a) or is_array(a):
            return False  # a number may count the rows
        if not isinstance(a, Spec):
            continue
        if a.shape[:1] != (rows,) or b.shape[:1] != (all_rows,) or a.shape[1:] != b.shape[1:]:
            return False
    return True


def _joined(outs: Sequence[Any]) -> Any:
    """The results of all microbatches as one."""
    every = [flattened(out) for out in outs]
    columns = zip(*(leaves for leaves, _ in every), strict=True)
    return every[0][1](
        [
            torch.cat(column)
            if isinstance(column[0], Tensor) and len(column) > 1
            else _kept(column[0])
            for column in columns
        ]
    )


def _told(result: Any) -> Any:
    leaves, rebuild = flattened(result, Spec)
    return rebuild([_kept(x) for x in leaves])


def _kept(x: Any) -> Any:
    """What is the same on all stages; a cache is not."""
    return x if isinstance(x, Tensor | Spec) or is_plain(x) else None
