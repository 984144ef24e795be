"""What a step does, in its own order: operations, and what is sent between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StepRow"]


@dataclass(frozen=True)
class StepRow:
    """One operation, the start of a collective, a message or a copy, or the wait for one.

    Attributes:
        kind: ``"compute"``, ``"start"`` or ``"wait"``.
        name: the operator's; ``"all_gather"``, ``"send"``, ...; ``"up"`` or ``"down"`` (copies from
            the host and to it), ``"read"`` or ``"write"`` (of drives).
        layer: the layer that it belongs to; ``""`` outside of all.
        phase: ``"forward"``, ``"backward"``, ``"recomputed"`` or ``""``.
        flops: see :mod:`zfunc.foresight.flops`.
        read, written: bytes of tensors.
        elements: how many it writes.
        shapes: of the tensors that it is given.
        dtype: of the first of them.
        label, axis: of what is sent.
        number: the same for a start and its wait; else 0.
        peer: of a message, the rank of the axis that it goes to or comes from; else -1.
        after: of a copy, a read or a write, the number of what it waits for; 0 if there is none.
        on_host: computed by the host, on what is in its memory.
        causal: attention of each query to the keys before it.
    """

    kind: str
    name: str
    layer: str = ""
    phase: str = ""
    flops: int = 0
    read: int = 0
    written: int = 0
    elements: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype | None = None
    label: str = ""
    axis: str = ""
    number: int = 0
    causal: bool = False
    peer: int = -1
    after: int = 0
    on_host: bool = False
