"""The text of ``step.describe()``: transforms, state per rank, bytes per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zfunc.engine.hooks import Description, Traffic
from zfunc.ranks.accounting import HEADER, HEADER_BYTES

__all__ = ["describe"]

Parts = Counter[str]
# By the first word of a collective's label.
PURPOSES = {
    "gather": "gather parameters",
    "join": "gather parameters",
    "reduce": "reduce gradients",
    "compress": "compressed gradients",
    "forward": "values between stages",
    "backward": "gradients between stages",
    "lend": "leaves of several stages",
    "return": "leaves of several stages",
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
    held, (payload, by_axis) = memo["held"], _sent(transforms, memo)
    state_bytes, sent_bytes = sum(held.values()), payload.total()
    lines.append(f"  state on this rank: {state_bytes} bytes ({_listed(held)})")
    if "sent" not in memo and not all(t.traffic(memo).known for t in transforms):
        lines.append("  sent by this rank per step: known behind the first step")
        out = Description("\n".join(lines))
        out.state_bytes = state_bytes
        return out
    known = "" if "sent" in memo else ", before losses, norms and metrics"
    lines.append(f"  sent by this rank per step: {sent_bytes} bytes ({_listed(payload)}{known})")
    if sum(n > 0 for n in by_axis.values()) > 1:
        lines.append(f"  of it, without headers, by axis: {_listed(by_axis)}")
    out = Description("\n".join(lines))
    out.state_bytes, out.sent_bytes = state_bytes, sent_bytes
    return out


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in parts.items() if n) or "nothing"


def _sent(transforms: Sequence[Described], memo: Mapping[Any, Any]) -> tuple[Parts, Parts]:
    """Bytes by purpose, and payload by axis: of the recorded path once there is one.

    Whatever a hand-written step does (several models, several gradients) is in the
    record. Before that the layouts tell what parameters and gradients will cost.
    """
    parts, by_axis, headers = Parts(), Parts(), 0
    if "sent" in memo:
        for label, nbytes in memo["sent"].by_label.items():
            parts[PURPOSES.get(label.split(" ", 1)[0], "losses, norms and metrics")] += nbytes
        parts["headers"] = memo["sent"].by_kind[HEADER]
        return parts, memo["sent"].by_axis
    for transform in transforms:
        traffic = transform.traffic(memo)
        parts += traffic.payload
        by_axis += traffic.by_axis
        headers += traffic.headers
    parts["headers"] = HEADER_BYTES * headers
    return parts, by_axis
