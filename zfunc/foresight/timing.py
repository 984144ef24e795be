"""What a step takes on a cluster, what binds it, and what is busy when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zfunc.foresight.drawing import draw_lanes, in_notebook
from zfunc.foresight.texts import seconds_text

__all__ = ["LaneSpan", "Timing"]


class LaneSpan(NamedTuple):
    """Something that keeps a lane busy.

    Attributes:
        lane: ``"compute"``, ``"node"`` or ``"network"`` (links), ``"up"`` or ``"down"`` (copies
            from the host and to it), ``"read"`` or ``"write"`` (drives), ``"host"`` (what it
            computes).
        name: the operation's or the collective's.
        layer: that it belongs to; the label of a collective.
        start, seconds: when and how long.
    """

    lane: str
    name: str
    layer: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Timing:
    """How long a step takes; ``float(timing)`` are its seconds.

    Attributes:
        seconds: from the first operation to the end of the last.
        parts: what the device does in them, which sum up to them: ``"compute"``; else it waits
            for ``"communication"``, the ``"host"``, ``"copies"``, ``"drives"`` or other
            ``"stages"``.
        busy: seconds that each lane is busy, whether anybody waits for it or not.
        lanes: what is done when, in the order in which it was asked for.
        notes: what the answer rests on, and what is not in it.
    """

    seconds: float
    parts: Mapping[str, float] = field(hash=False)
    busy: Mapping[str, float] = field(hash=False)
    lanes: tuple[LaneSpan, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.seconds

    @property
    def binds(self) -> str:
        """The largest of the parts; ``"nothing"`` of a step that does nothing."""
        return max(self.parts, key=lambda name: self.parts[name], default="nothing")

    def __str__(self) -> str:
        longest = sorted(self.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {seconds_text(x)}" for name, x in longest if x)
        head = f"a step takes {seconds_text(self.seconds)}, bound by {self.binds}: {shares}"
        return "\n".join([head, *(f"assumed: {note}" for note in self.notes)])

    def plot(self, path: str | Path) -> Path:
        """Draw the lanes, what overlaps with what; returns the path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw_lanes(self.lanes, self.seconds, Path(path))

    def _repr_html_(self) -> str:
        return in_notebook(str(self), self.plot)

    def chrome(self, path: str | Path) -> Path:
        """Write the lanes as a trace for chrome://tracing or Perfetto; returns the path."""
        names = {lane: i for i, lane in enumerate(dict.fromkeys(span.lane for span in self.lanes))}
        heads = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
            for lane, i in names.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": names[span.lane],
                "ts": 1e6 * span.start,
                "dur": 1e6 * span.seconds,
                "args": {"layer": span.layer},
            }
            for span in self.lanes
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*heads, *events]}))
        return Path(path)
