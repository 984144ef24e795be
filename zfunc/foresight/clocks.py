"""A step's rows on clocks: the host, the stream that computes, and each link.

The host asks for one row after the other. The device does them in order. A collective starts when
its link is free and what it sends is there; it runs beside what is computed, and a wait lets the
device stand until it is over. The device's clock therefore only moves by what it computes and by
what it waits for, and these are the parts of the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from zfunc.errors import DeviceError
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.links import LinkTimes
from zfunc.foresight.operation_times import OperationTimes
from zfunc.foresight.rows import StepRow
from zfunc.foresight.timing import LaneSpan, Timing

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
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._spans: list[LaneSpan] = []

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
        self._spans.append(LaneSpan("compute", row.name, row.layer, self._device, seconds))
        self._parts["compute"] += seconds
        self._device += seconds

    def _start(self, row: StepRow) -> None:
        lane, seconds = self._links.lane(row), self._links.of(row)
        start = max(self._free[lane], self._device, self._host)
        self._spans.append(LaneSpan(lane, row.name, row.label, start, seconds))
        self._free[lane] = self._ends[row.number] = start + seconds

    def _wait(self, row: StepRow) -> None:
        if row.name != "send":  # whoever sends goes on at once
            self._stand_until(self._ends.get(row.number, 0.0), "communication")

    def _stand_until(self, when: float, part: str) -> None:
        if when > self._device:
            self._parts[part] += when - self._device
            self._device = when

    def end(self) -> None:
        """Everything has ended."""
        self._stand_until(max(self._free.values(), default=0.0), "communication")
        self._stand_until(self._host, "host")

    def copy_beside(self, nbytes: int, rate: float) -> None:
        """So many bytes have gone up from the host and down to it, beside all that there was."""
        seconds = nbytes / rate
        self._spans += [LaneSpan(lane, "offload", "", 0.0, seconds) for lane in ("up", "down")]
        self._stand_until(seconds, "copies")

    def wait_for_stages(self, bubble: float) -> None:
        """Of the whole time this share is waiting for other stages."""
        self._stand_until(self._device / (1 - bubble), "stages")

    def timing(self, notes: Iterable[str] = ()) -> Timing:
        """What it took."""
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self._spans:
            busy[span.lane] += span.seconds
        return Timing(self._device, dict(self._parts), dict(busy), tuple(self._spans), tuple(notes))


def replay(
    rows: Iterable[StepRow],
    cluster: Cluster,
    groups: Mapping[str, tuple[int, ...]],
    offloaded: int = 0,
    bubble: float = 0.0,
) -> Timing:
    """How long rows take on a cluster.

    Args:
        rows: of a step, in its order.
        cluster: where.
        groups: the ranks along each axis that rows name.
        offloaded: bytes that come from the host and go back to it within a step.
        bubble: the share of a pipeline's time that its stages wait for each other.

    Raises:
        DeviceError: the cluster lacks a link that they need.

    >>> cluster = Cluster.preset("h100", gpus=8, gap=0, dispatch=0)
    >>> copied = StepRow("compute", "copy_", read=3_350_000_000)
    >>> round(replay([copied], cluster, {}).seconds, 5)  # at 90 % of 3.35 TB/s
    0.00111
    """
    clocks = Clocks(cluster, groups)
    for row in rows:
        clocks.run(row)
    clocks.end()
    if offloaded:
        if not cluster.pcie:
            raise DeviceError(
                "the step is offloaded, and the cluster has no link to the host: give pcie= in "
                "bytes per second."
            )
        clocks.copy_beside(offloaded, cluster.pcie * cluster.link_share)
    clocks.wait_for_stages(bubble)
    return clocks.timing(_notes(cluster, offloaded, bubble))


def _notes(cluster: Cluster, offloaded: int, bubble: float) -> list[str]:
    if cluster.calibrated:
        found = [f"{cluster.device}, measured {cluster.calibrated}"]
    else:
        found = [
            f"{cluster.device}, from published peaks, which is optimistic: `zfunc calibrate` "
            f"measures one; guessed: {', '.join(cluster.guessed)}"
        ]
    if offloaded:
        found.append("what is offloaded goes up and down once, beside everything else")
    if bubble:
        found.append(f"stages wait {bubble:.0%} of the time, as their schedule says for equal ones")
    return found
