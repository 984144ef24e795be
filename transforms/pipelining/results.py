"""What the last stage of a pipeline computes, told to all of them: one loss, one aux."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CompositionError
from zfunc.ranks.comm import Group
from zfunc.rehearsal.plans import Spec
from zfunc.rehearsal.results import flattened
from zfunc.rehearsal.values import is_value
from zfunc.transforms.pipelining.values import WIDTH, read, written

__all__ = ["broadcast"]

ALIGNMENT = 16  # bytes: a view of any dtype begins there


def broadcast(
    ranks: Group,
    source: int,
    value: Any,
    like: Any,
    label: str,
    device: torch.device | str = "cpu",
) -> Callable[[], Any]:
    """Start to tell all stages a tree of one of them; its tensors and numbers travel as one.

    Args:
        source: which stage has it.
        value: the tree, there; ignored elsewhere.
        like: the tree with a :class:`Spec` in the place of each tensor, the same on all stages.
        device: where it travels, if there is no tensor.

    Returns:
        A function that waits for the tree and returns it.

    Raises:
        CompositionError: (when waited for, on all ranks) a value is another one than in the tree
            that is the same on all, and no number that can be sent.
    """
    specs, rebuild = flattened(like, Spec)
    values = [p for p, then in enumerate(specs) if is_value(then)]
    tensors = [spec for spec in specs if isinstance(spec, Spec)]
    if ranks.size == 1 or not (tensors or values):
        return lambda: value if ranks.rank == source else like
    places, total = _places(tensors)
    where = tensors[0].device if tensors else device
    buffer = torch.zeros(total + WIDTH * len(values), dtype=torch.uint8, device=where)
    views = [
        buffer[at : at + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec, at in zip(tensors, places, strict=True)
    ]
    if ranks.rank == source:
        _fill(views, specs, mine := _leaves(value, specs))
        if values:
            rows = b"".join(written(mine[p], specs[p]) for p in values)
            buffer[total:] = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
    coming = ranks.broadcast(buffer, source, label=label)

    def wait() -> Any:
        coming.wait()
        rows = bytes(buffer[total:].tolist()) if values else b""
        told = {p: read(rows[n * WIDTH :], specs[p], p) for n, p in enumerate(values)}
        if ranks.rank == source:
            return value
        found = iter(views)
        return rebuild(
            [next(found) if isinstance(x, Spec) else told.get(p, x) for p, x in enumerate(specs)]
        )

    return wait


def _leaves(value: Any, specs: Sequence[Any]) -> list[Any]:
    """Those of the last stage, which has as many as the rehearsal found."""
    found, _ = flattened(value)
    there, then = (sum(x is not None for x in row) for row in (found, specs))
    if len(found) != len(specs) or there != then:
        raise CompositionError(
            f"the last stage of a pipeline returns {there} values, and {then} in the rehearsal of "
            "this batch's shapes, which tell the other stages what comes. Let it depend on shapes "
            "alone how many there are."
        )
    return found


def _fill(views: Sequence[Tensor], specs: Sequence[Any], mine: Sequence[Any]) -> None:
    """Put the last stage's tensors where they travel."""
    rows = [(spec, x) for spec, x in zip(specs, mine, strict=True) if isinstance(spec, Spec)]
    with torch.no_grad():
        for view, (spec, x) in zip(views, rows, strict=True):
            if not isinstance(x, Tensor) or tuple(x.shape) != spec.shape:
                what = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise CompositionError(
                    f"the last stage of a pipeline returns a result of {what}, and one of shape "
                    f"{list(spec.shape)} in the rehearsal of this batch's shapes, which tell the "
                    "other stages what comes. Let its shape depend on shapes alone."
                )
            view.copy_(x)


def _places(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Where each tensor begins, and how many bytes there are."""
    places, at = [], 0
    for spec in specs:
        places.append(at)
        at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return places, at
