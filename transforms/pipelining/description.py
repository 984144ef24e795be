"""What ``step.describe()`` says of a pipeline: who has what, what goes between stages, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zfunc.layout.layout import Layout
from zfunc.rehearsal.plans import Rehearsed
from zfunc.schedules.pipeline_schedule import Schedule

__all__ = ["balanced_by", "described", "predicts"]


def balanced_by(partition: Any, by_example: bool) -> str:
    """What the parts of a model are balanced by."""
    if not isinstance(partition, str):
        return f"partition as given, {list(partition)}"
    if partition == "parameters":
        return "partition by all elements of parameters"
    if by_example:
        return "partition by the FLOPs of an example"
    return "partition by the elements of matrices (for FLOPs give example=)"


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
    schedule: Schedule,
    name: str,
    layout: Layout | None,
    plan: Rehearsed | None,
    weights: Sequence[int] | None,
    sums: torch.dtype | None,
) -> list[str]:
    """Lines about a pipeline; those on FLOPs and messages once a batch has been seen.

    Args:
        name: of the schedule, and of what parts are balanced by.
        plan: what a loss does on a batch.
        weights: of the chunks, by which they are balanced.
        sums: the dtype in which gradients are summed, if it is not that of parameters.
    """
    held = ", ".join(f"{x:g}" for x in schedule.in_flight())
    lines = [
        f"pipeline: {schedule.microbatches} microbatches on {schedule.ranks} stages, {name}; "
        f"bubble {100 * schedule.bubble():.0f} %, at most {held} microbatches in flight"
    ]
    if layout is not None:
        lines += _stages(schedule.rank_of, layout, plan)
        lines += _shares(schedule.rank_of, plan, weights)
        lines.append(_gradients(schedule.rank_of, layout, sums))
    if plan is not None:
        lines += _messages(schedule, plan)
    return [*lines, *schedule.picture().splitlines()]


def _shares(
    rank_of: Sequence[int], plan: Rehearsed | None, weights: Sequence[int] | None
) -> Iterator[str]:
    """Which part of the work each stage was to have, and which it has of a batch."""
    if not weights or not sum(weights):
        return
    wanted = _parts(rank_of, weights)
    line = f"expected work of stages: {_percent(wanted)}"
    if plan is not None and sum(plan.flops) + sum(plan.flops_between):
        found = _parts(rank_of, [_flops(plan, [k]) for k in range(len(rank_of))])
        most = max(abs(a - b) for a, b in zip(wanted, found, strict=True))
        line += f"; FLOPs of the first batch: {_percent(found)}, which differs by up to "
        line += f"{100 * most:.1f} points"
    yield line


def _parts(rank_of: Sequence[int], weights: Sequence[int]) -> list[float]:
    rows = [0] * (max(rank_of) + 1)
    for rank, weight in zip(rank_of, weights, strict=True):
        rows[rank] += weight
    return [x / sum(rows) for x in rows]


def _percent(parts: Sequence[float]) -> str:
    return ", ".join(f"{100 * x:.1f}" for x in parts) + " %"


def _gradients(rank_of: Sequence[int], layout: Layout, sums: torch.dtype | None) -> str:
    """Whole gradients are summed where they are until a chunk's last microbatch is behind it."""
    rows = [0] * (max(rank_of) + 1)
    for unit in layout.units:
        flats = [layout.flats[i] for i in unit.flats if layout.flats[i].trainable]
        nbytes = sum(flat.length * (sums or flat.dtype).itemsize for flat in flats)
        rows[rank_of[unit.chunk]] += nbytes
    listed = ", ".join(f"{n:,}" for n in rows)
    return f"gradients that a rank of each stage sums before it reduces them: {listed} bytes"


def _stages(rank_of: Sequence[int], layout: Layout, plan: Rehearsed | None) -> Iterator[str]:
    for rank in range(max(rank_of) + 1):
        chunks = [k for k, its in enumerate(rank_of) if its == rank]
        units = [unit for unit in layout.units if unit.chunk in chunks]
        rows = [slot for unit in units for i in unit.slots if (slot := layout.slots[i]) is not None]
        numel = sum(slot.numel for slot in rows)
        nbytes = sum(slot.numel * layout.flats[slot.flat].dtype.itemsize for slot in rows)
        layers = "; ".join(_layers(layout, k) for k in chunks)
        told = f", {_flops(plan, chunks) / 1e9:.3g} GFLOPs forward" if plan is not None else ""
        held = f"{numel:,} parameters of {nbytes:,} bytes"
        yield f"stage {rank}: {layers or 'no layers'}; {held}{told}"


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
    sizes: dict[tuple[int, int], list[int]] = {}
    for k, rank in enumerate(schedule.rank_of):
        for to, labels in plan.sent_by(k).items():
            nbytes = sum(plan.receives(to)[label][1].nbytes for label in labels)
            _count(sizes, rank, schedule.rank_of[to], nbytes)
        for to, labels in plan.returned_by(k).items():
            nbytes = sum(plan.receives(k)[label][1].nbytes for label in labels)
            _count(sizes, rank, schedule.rank_of[to], nbytes)
    rows = [
        f"{a} to {b} {sum(n):,} in {len(n)} message{'s' * (len(n) > 1)}"
        for (a, b), n in sorted(sizes.items())
    ]
    yield f"bytes between stages, of a microbatch: {', '.join(rows) or 'none'}"


def _count(sizes: dict[tuple[int, int], list[int]], source: int, to: int, nbytes: int) -> None:
    if source != to:
        sizes.setdefault((source, to), []).append(nbytes)
