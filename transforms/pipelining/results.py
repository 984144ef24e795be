"""What the last stage of a pipeline computes, told to all of them: one loss, one aux."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zfunc.ranks.comm import Group
from zfunc.rehearsal.plans import Spec
from zfunc.rehearsal.results import flattened

__all__ = ["broadcast"]

ALIGNMENT = 16  # bytes: a view of any dtype begins there


def broadcast(ranks: Group, source: int, value: Any, like: Any, label: str) -> Callable[[], Any]:
    """Start to tell all stages a tree of one of them; its tensors travel as one.

    Args:
        source: which stage has it.
        value: the tree, there; ignored elsewhere.
        like: the tree with a :class:`Spec` in the place of each tensor, the same on all stages.

    Returns:
        A function that waits for the tree and returns it.
    """
    specs, rebuild = flattened(like, Spec)
    if ranks.size == 1 or not any(isinstance(spec, Spec) for spec in specs):
        return lambda: value if ranks.rank == source else like
    tensors = [spec for spec in specs if isinstance(spec, Spec)]
    places, total = _places(tensors)
    buffer = torch.zeros(total, dtype=torch.uint8, device=tensors[0].device)
    views = [
        buffer[at : at + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, at in zip(tensors, places, strict=True)
    ]
    if ranks.rank == source:
        rows = zip(specs, flattened(value)[0], strict=True)
        mine = [x for spec, x in rows if isinstance(spec, Spec)]
        with torch.no_grad():
            for view, x in zip(views, mine, strict=True):
                view.copy_(x)
    coming = ranks.broadcast(buffer, source, label=label)

    def wait() -> Any:
        coming.wait()
        if ranks.rank == source:
            return value
        found = iter(views)
        return rebuild([next(found) if isinstance(spec, Spec) else spec for spec in specs])

    return wait


def _places(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Where each tensor begins, and how many bytes there are."""
    places, at = [], 0
    for spec in specs:
        places.append(at)
        at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return places, at
