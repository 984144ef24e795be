"""What ``step.describe()`` says of a pipeline: who has what, what goes between stages, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zfunc.layout.layout import Layout
from zfunc.rehearsal.plans import Rehearsed
from zfunc.schedules.pipeline_schedule import Schedule
from zfunc.transforms.pipelining.stage import returned_by, sent_by

__all__ = ["described", "predicts"]


def predicts(
    microbatches: int, partition: Any, rank_of: Sequence[int], layout: Layout | None
) -> list[str]:
    """Lines about a pipeline in inference."""
    line = (
        f"pipeline: up to {microbatches} microbatches through {max(rank_of) + 1} stages, "
        f"partition by {partition}"
    )
    return [line, *([] if layout is None else _stages(rank_of, layout, None))]


def described(
    schedule: Schedule, name: str, partition: Any, layout: Layout | None, plan: Rehearsed | None
) -> list[str]:
    """Lines about a pipeline; those on FLOPs and messages once a batch has been seen."""
    held = ", ".join(f"{x:g}" for x in schedule.in_flight())
    lines = [
        f"pipeline: {schedule.microbatches} microbatches on {schedule.ranks} stages, {name}, "
        f"partition by {partition}; bubble {100 * schedule.bubble():.0f} %, at most {held} "
        "microbatches in flight"
    ]
    if layout is not None:
        lines += _stages(schedule.rank_of, layout, plan)
    if plan is not None:
        lines += _messages(schedule, plan)
    return [*lines, *schedule.picture().splitlines()]


def _stages(rank_of: Sequence[int], layout: Layout, plan: Rehearsed | None) -> Iterator[str]:
    for rank in range(max(rank_of) + 1):
        chunks = [k for k, its in enumerate(rank_of) if its == rank]
        numel = sum(
            slot.numel
            for unit in layout.units
            if unit.chunk in chunks
            for i in unit.slots
            if (slot := layout.slots[i]) is not None
        )
        layers = "; ".join(_layers(layout, k) for k in chunks)
        told = f", {_flops(plan, chunks) / 1e9:.3g} GFLOPs forward" if plan is not None else ""
        yield f"stage {rank}: {layers or 'no layers'}; {numel:,} parameters{told}"


def _layers(layout: Layout, chunk: int) -> str:
    units = layout.units_of_layers
    names = [
        layer.name
        for layer, own in zip(layout.layers, units, strict=True)
        if own and layout.units[own[0]].chunk == chunk
    ]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "no layers"


def _flops(plan: Rehearsed, chunks: Sequence[int]) -> int:
    inside = sum(n for call, n in zip(plan.calls, plan.flops, strict=True) if call.chunk in chunks)
    return inside + sum(plan.flops_outside[k] for k in chunks)


def _messages(schedule: Schedule, plan: Rehearsed) -> Iterator[str]:
    """What one microbatch sends from stage to stage, forward and backward."""
    sizes: dict[tuple[int, int], int] = {}
    for k, rank in enumerate(schedule.rank_of):
        for to, labels in sent_by(plan, k).items():
            nbytes = sum(plan.receives(to)[label][1].nbytes for label in labels)
            _count(sizes, rank, schedule.rank_of[to], nbytes)
        for to, labels in returned_by(plan, k).items():
            nbytes = sum(plan.receives(k)[label][1].nbytes for label in labels)
            _count(sizes, rank, schedule.rank_of[to], nbytes)
    rows = [f"{a} to {b} {n:,}" for (a, b), n in sorted(sizes.items())]
    yield f"bytes between stages, of a microbatch: {', '.join(rows) or 'none'}"


def _count(sizes: dict[tuple[int, int], int], source: int, to: int, nbytes: int) -> None:
    if source != to:
        sizes[source, to] = sizes.get((source, to), 0) + nbytes
