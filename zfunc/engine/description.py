"""The text of ``step.describe()``: transforms, state per rank, bytes per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zfunc.engine.hooks import Description, Traffic
from zfunc.ranks import world
from zfunc.ranks.accounting import HEADER, HEADER_BYTES
from zfunc.ranks.adjacency import neighbours, ring

__all__ = ["describe"]

# By the first word of a collective's label.
PURPOSES = {
    "gather": "gather parameters",
    "join": "gather parameters",
    "reduce": "reduce gradients",
    "compress": "compressed gradients",
}


class Described(Protocol):
    """A transform, as far as it tells what it does."""

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        """Lines about it."""

    def traffic(self, memo: Mapping[Any, Any]) -> Traffic:
        """What it sends in a step."""


def describe(title: str, transforms: Sequence[Described], memo: Mapping[Any, Any]) -> Description:
    """See :meth:`zfunc.Step.describe`."""
    lines = [title]
    for transform in transforms:
        lines += [f"  {line}" for line in transform.describe(memo)]
    if "held" not in memo:
        lines.append("  place a state to learn its bytes per rank and the bytes sent per step")
        return Description("\n".join(lines))
    held = memo["held"]
    state_bytes = sum(held.values())
    lines.append(f"  state on this rank: {state_bytes} bytes ({_listed(held)})")
    payload, sent_bytes = _sent(transforms, memo)
    known = "" if "sent" in memo else ", before losses, norms and metrics"
    lines.append(f"  sent by this rank per step: {sent_bytes} bytes ({_listed(payload)}{known})")
    out = Description("\n".join(lines))
    out.state_bytes, out.sent_bytes = state_bytes, sent_bytes
    return out


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in parts.items() if n) or "nothing"


def _sent(transforms: Sequence[Described], memo: Mapping[Any, Any]) -> tuple[dict[str, int], int]:
    """Bytes by purpose, and their sum: of the recorded path once there is one.

    Whatever a hand-written step does (several models, several gradients) is in the
    record. Before that the layouts tell what parameters and gradients will cost.
    """
    parts: Counter[str] = Counter()
    if "sent" in memo:
        for label, nbytes in memo["sent"].by_label.items():
            parts[PURPOSES.get(label.split(" ", 1)[0], "losses, norms and metrics")] += nbytes
        parts["headers"] = memo["sent"].by_kind[HEADER]
        return parts, sum(parts.values())
    headers = 0
    for transform in transforms:
        traffic = transform.traffic(memo)
        parts += traffic.payload
        headers += traffic.headers
    here = world.current()
    told = ring if here.device.type == "cuda" else neighbours  # beside NCCL
    parts["headers"] = HEADER_BYTES * headers * len(told(here.rank, here.size))
    return parts, sum(parts.values())
