"""The text of ``step.describe()``: transforms, state per rank, what a step sends and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zfunc.engine.hooks import Description
from zfunc.engine.step import Step
from zfunc.foresight.prediction import Foreseen, foresee
from zfunc.ranks.accounting import HEADER, Ledger
from zfunc.ranks.world import current
from zfunc.trees.kinds import kind

__all__ = ["describe"]

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


def describe(step: Step, memo: Mapping[Any, Any], batch: Any) -> Description:
    """See :meth:`zfunc.Step.describe`."""
    lines = [repr(step)]
    for transform in step.transforms:
        lines += [f"  {line}" for line in transform.describe(memo)]
    if "held" not in memo:
        lines.append("  place a state to learn its bytes per rank and the bytes sent per step")
        return Description("\n".join(lines))
    held = memo["held"]
    lines.append(f"  state on this rank: {sum(held.values())} bytes ({_listed(held)})")
    seen = None if batch is None or "given" not in memo else _foreseen(step, memo["given"], batch)
    sent: Ledger | None = memo.get("sent") if seen is None else seen.sent
    if sent is None:
        lines.append("  sent by this rank per step: give `describe` a batch, or run the step")
    else:
        lines += _sent(sent)
    if seen is not None:
        lines.append(
            f"  foreseen of this batch: {seen.flops.total} FLOPs; at most {seen.peak_bytes} bytes "
            f"of tensors, while a state is placed {seen.place_peak_bytes}"
        )
        lines += [f"  assumed: {assumption}" for assumption in seen.assumptions]
    out = Description("\n".join(lines))
    out.state_bytes = sum(held.values())
    out.sent_bytes = None if sent is None else sent.total_bytes
    if seen is not None:
        out.peak_bytes, out.flops = seen.peak_bytes, seen.flops.total
    return out


def _foreseen(step: Step, state: Any, batch: Any) -> Foreseen:
    """The step on this rank of the world that there is."""
    here = current()
    on = kind(here.device)
    return foresee(step, state, batch, ranks=here.size, rank=here.rank, device=on)


def _sent(sent: Ledger) -> list[str]:
    """Lines about the bytes of a step, by purpose and by axis."""
    parts = Counter[str]()
    for label, nbytes in sent.by_label.items():
        parts[PURPOSES.get(label.split(" ", 1)[0], "losses, norms and metrics")] += nbytes
    parts["headers"] = sent.by_kind[HEADER]
    lines = [f"  sent by this rank per step: {parts.total()} bytes ({_listed(parts)})"]
    if sum(n > 0 for n in sent.by_axis.values()) > 1:
        lines.append(f"  of it, without headers, by axis: {_listed(sent.by_axis)}")
    return lines


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in parts.items() if n) or "nothing"
