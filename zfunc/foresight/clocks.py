"""A step's rows on clocks: the host, the stream that computes, and each link.

The host asks for one row after the other. The device does them in order. A collective starts when
its link is free and what it sends is there; it runs beside what is computed, and a wait lets the
device stand until it is over. The device's clock therefore only moves by what it computes and by
what it waits for, and these are the parts of the answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from zfunc.foresight.clusters import Cluster
from zfunc.foresight.links import LinkTimes
from zfunc.foresight.operation_times import OperationTimes
from zfunc.foresight.rows import StepRow
from zfunc.foresight.timing import Span, Timing

__all__ = ["Clocks", "replay"]


class Clocks:
    """Where time stands while rows are replayed.

    Args:
        cluster: what rows run on.
        groups: the ranks along each axis.
    """

    def __init__(self, cluster: Cluster, groups: Mapping[str, tuple[int, ...]]) -> None:
        self._operations, self._links = OperationTimes(cluster), LinkTimes(cluster, groups)
        self._on_host = cluster.kind == "cpu"
        self._dispatch = cluster.dispatch
        self._host = self._device = 0.0
        self._free: defaultdict[str, float] = defaultdict(float)  # of links: when they are
        self._ends: dict[int, float] = {}  # of what was started, by its number
        self._parts: Counter[str] = Counter()
        self._spans: list[Span] = []

    def run(self, row: StepRow) -> None:
        """The next row."""
        if row.kind == "wait":
            self._wait(row)
            return
        self._host += self._dispatch
        if row.kind == "start":
            self._start(row)
        else:
            self._compute(row)
        if self._on_host:
            self._host = self._device = max(self._host, self._device)

    def _compute(self, row: StepRow) -> None:
        self._stand_until(self._host, "host")
        seconds = self._operations.of(row)
        self._spans.append(Span("compute", row.name, row.layer, self._device, seconds))
        self._parts["compute"] += seconds
        self._device += seconds

    def _start(self, row: StepRow) -> None:
        lane, seconds = self._links.lane(row), self._links.of(row)
        start = max(self._free[lane], self._device, self._host)
        self._spans.append(Span(lane, row.name, row.label, start, seconds))
        self._free[lane] = self._ends[row.number] = start + seconds

    def _wait(self, row: StepRow) -> None:
        if row.name != "send":  # whoever sends goes on at once
            self._stand_until(self._ends.get(row.number, 0.0), "communication")

    def _stand_until(self, when: float, part: str) -> None:
        if when > self._device:
            self._parts[part] += when - self._device
            self._device = when

    def timing(self, notes: Iterable[str] = ()) -> Timing:
        """What it took so far, until everything has ended."""
        self._stand_until(max(self._free.values(), default=0.0), "communication")
        self._stand_until(self._host, "host")
        busy: Counter[str] = Counter()
        for span in self._spans:
            busy[span.lane] += span.seconds
        return Timing(self._device, dict(self._parts), dict(busy), tuple(self._spans), tuple(notes))


def replay(
    rows: Iterable[StepRow], cluster: Cluster, groups: Mapping[str, tuple[int, ...]]
) -> Timing:
    """How long rows take on a cluster.

    Args:
        rows: of a step, in its order.
        cluster: where.
        groups: the ranks along each axis that rows name.

    Raises:
        DeviceError: the cluster lacks a link that they need.

    >>> cluster = Cluster.preset("h100", gpus=8, gap=0, dispatch=0)
    >>> copied = StepRow("compute", "copy_", read=3_350_000_000)
    >>> round(replay([copied], cluster, {}).seconds, 5)  # at 90 % of 3.35 TB/s
    0.00111
    """
    clocks = Clocks(cluster, groups)
    messages = False
    for row in rows:
        clocks.run(row)
        messages = messages or row.name == "receive"
    return clocks.timing(_notes(cluster, messages))


def _notes(cluster: Cluster, messages: bool) -> list[str]:
    if cluster.calibrated:
        found = [f"{cluster.device}, measured {cluster.calibrated}"]
    else:
        found = [
            f"{cluster.device}, from published peaks, which is optimistic: `zfunc calibrate` "
            f"measures one; guessed: {', '.join(cluster.guessed)}"
        ]
    if messages:
        found.append("waiting for other stages is not in it: their messages are there at once")
    return found
