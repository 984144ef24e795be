"""A step's rows on clocks: the host, the stream that computes, each link, and the drives.

The host asks for one row after the other. The device does them in order. A collective or a copy
starts when its link is free and what it moves is there; it runs beside what is computed, and a wait
lets the device stand until it is over. The device's clock therefore only moves by what it computes
and by what it waits for, and these are the parts of the answer. What the host itself computes or
waits for (an optimizer on offloaded state, drives) lets the device stand once it has nothing left.

Stages of a pipeline are replayed together: a message is there when its sender has sent it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from zfunc.foresight.clusters import Cluster
from zfunc.foresight.links import LinkTimes
from zfunc.foresight.operation_times import OperationTimes
from zfunc.foresight.rows import StepRow
from zfunc.foresight.timing import LaneSpan, Timing

__all__ = ["Groups", "fit_together", "notes_on", "replay", "replay_stages"]

PARTS = {"up": "copies", "down": "copies", "read": "drives", "write": "drives"}
BY_HOST = ("read", "write", "down")  # for the end of which the host waits

Groups = Mapping[str, tuple[int, ...]]


class Mail:
    """Messages between the stages of a pipeline.

    Attributes:
        sent: by sender and receiver, how long each message takes and when it is there.
    """

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)


class Clocks:
    """Where time stands while rows are replayed.

    Args:
        cluster: what rows run on.
        groups: the ranks along each axis.
        mail: of the stages that are replayed together, if they are.
        pipe: the axis of stages.
        stage: which of them this is.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: Groups,
        mail: Mail | None = None,
        pipe: str = "",
        stage: int = 0,
    ) -> None:
        self._operations, self._links = OperationTimes(cluster), LinkTimes(cluster, groups)
        self._on_host = cluster.kind == "cpu"
        self._dispatch = cluster.dispatch
        self._host = self._device = 0.0
        self._free: defaultdict[str, float] = defaultdict(float)  # of lanes: when they are
        self._ends: dict[int, float] = {}  # of what was started, by its number
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._spans: list[LaneSpan] = []
        self._mail, self._pipe, self._stage = mail, pipe, stage
        self._expected: dict[int, tuple[int, int]] = {}  # sender and place of messages, by number
        self._posted: Counter[int] = Counter()

    def run(self, row: StepRow) -> bool:
        """The next row; False if it waits for a message that nobody has sent yet."""
        if row.kind == "wait":
            return self._wait(row)
        self._host += self._dispatch
        if row.kind == "start":
            self._start(row)
        elif row.on_host and not self._on_host:
            self._compute_there(row)
        else:
            self._compute(row)
        if self._on_host:
            self._host = self._device = max(self._host, self._device)
        return True

    def _compute(self, row: StepRow) -> None:
        self._stand_until(self._host, "host")
        seconds = self._operations.of(row)
        self._spans.append(LaneSpan("compute", row.name, row.layer, self._device, seconds))
        self._parts["compute"] += seconds
        self._device += seconds

    def _compute_there(self, row: StepRow) -> None:
        seconds = self._operations.by_host(row)
        self._spans.append(LaneSpan("host", row.name, row.layer, self._host, seconds))
        self._host += seconds
        self._stand_until(self._host, "host")

    def _start(self, row: StepRow) -> None:
        if row.name == "receive" and self._mail is not None and row.axis == self._pipe:
            self._expected[row.number] = row.peer, self._posted[row.peer]
            self._posted[row.peer] += 1
            return
        lane, seconds = self._links.lane(row), self._links.of(row)
        start = max(self._free[lane], self._host, self._ends.get(row.after, 0.0))
        if row.name not in ("read", "write"):  # what is computed before it comes before it
            start = max(start, self._device)
        self._spans.append(LaneSpan(lane, row.name, row.label, start, seconds))
        self._free[lane] = self._ends[row.number] = start + seconds
        if row.name == "send" and self._mail is not None and row.axis == self._pipe:
            self._mail.sent[self._stage, row.peer].append((seconds, start + seconds))

    def _wait(self, row: StepRow) -> bool:
        if row.number in self._expected:
            return self._get(row)
        if row.name != "send":  # whoever sends goes on at once
            end = self._ends.get(row.number, 0.0)
            self._stand_until(end, PARTS.get(row.name, "communication"))
            if row.name in BY_HOST:
                self._host = max(self._host, end)
        return True

    def _get(self, row: StepRow) -> bool:
        """Wait for a message: first for its sender, and then for the link."""
        assert self._mail is not None
        peer, place = self._expected[row.number]
        sent = self._mail.sent[peer, self._stage]
        if place >= len(sent):
            return False
        seconds, end = sent[place]
        self._stand_until(end - seconds, "stages")
        self._stand_until(end, "communication")
        return True

    def _stand_until(self, when: float, part: str) -> None:
        if when > self._device:
            self._parts[part] += when - self._device
            self._device = when

    def end(self) -> None:
        """Everything has ended."""
        for lane, when in sorted(self._free.items(), key=lambda item: item[1]):
            self._stand_until(when, PARTS.get(lane, "communication"))
        self._stand_until(self._host, "host")

    def wait_for_stages(self, bubble: float) -> None:
        """Of the whole time this share is waiting for other stages."""
        self._stand_until(self._device / (1 - bubble), "stages")

    def wait_for_others(self, when: float) -> None:
        """The step is over when its last stage has ended."""
        self._stand_until(when, "stages")

    @property
    def seconds(self) -> float:
        """Where the device's clock stands."""
        return self._device

    def timing(self, notes: Iterable[str] = ()) -> Timing:
        """What it took."""
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self._spans:
            busy[span.lane] += span.seconds
        return Timing(self._device, dict(self._parts), dict(busy), tuple(self._spans), tuple(notes))


def replay(
    rows: Iterable[StepRow], cluster: Cluster, groups: Groups, bubble: float = 0.0
) -> Timing:
    """How long rows take on a cluster.

    Args:
        rows: of a step, in its order.
        cluster: where.
        groups: the ranks along each axis that rows name.
        bubble: the share of a pipeline's time that its stages wait for each other.

    Raises:
        DeviceError: the cluster lacks a link, drives or memory of the host that they need.

    >>> cluster = Cluster.preset("h100", gpus=8, gap=0, dispatch=0)
    >>> copied = StepRow("compute", "copy_", read=3_350_000_000)
    >>> round(replay([copied], cluster, {}).seconds, 5)  # at 90 % of 3.35 TB/s
    0.00111
    """
    clocks = Clocks(cluster, groups)
    for row in rows:
        clocks.run(row)
    clocks.end()
    clocks.wait_for_stages(bubble)
    equal = f"stages wait {bubble:.0%} of the time, as their schedule says for equal ones"
    return clocks.timing([*notes_on(cluster), *([equal] if bubble else [])])


def replay_stages(
    stages: Sequence[tuple[Sequence[StepRow], Groups]], cluster: Cluster, pipe: str
) -> list[Timing]:
    """How long the stages of a pipeline take together, each with rows of its own.

    Args:
        stages: the rows of each, and its ranks along each axis.
        cluster: where.
        pipe: the axis of stages; peers of messages along it are their numbers.

    Returns:
        Of each stage; all end when the last one does.

    Raises:
        DeviceError: as for :func:`replay`.
        ValueError: stages wait for messages that nobody sends (:func:`fit_together`).
    """
    mail = Mail()
    clocks = [Clocks(cluster, groups, mail, pipe, k) for k, (_, groups) in enumerate(stages)]
    at = [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for k, (rows, _) in enumerate(stages):
            while at[k] < len(rows) and clocks[k].run(rows[at[k]]):
                at[k] += 1
                moved = True
    if any(n < len(rows) for n, (rows, _) in zip(at, stages, strict=True)):
        raise ValueError("stages wait for messages that none of them sends.")
    for each in clocks:
        each.end()
    last = max(each.seconds for each in clocks)
    for each in clocks:
        each.wait_for_others(last)
    return [each.timing(notes_on(cluster)) for each in clocks]


def fit_together(stages: Sequence[Sequence[StepRow]], pipe: str) -> bool:
    """Whether each message along an axis that one stage sends is received by another.

    >>> send = StepRow("start", "send", axis="pipe", peer=1)
    >>> receive = StepRow("start", "receive", axis="pipe", peer=0)
    >>> fit_together([[send], [receive]], "pipe"), fit_together([[send], []], "pipe")
    (True, False)
    """
    sent: Counter[tuple[int, int]] = Counter()
    for k, rows in enumerate(stages):
        for row in rows:
            if row.kind == "start" and row.axis == pipe and row.name == "send":
                sent[k, row.peer] += 1
            elif row.kind == "start" and row.axis == pipe and row.name == "receive":
                sent[row.peer, k] -= 1
    return not any(sent.values())


def notes_on(cluster: Cluster) -> list[str]:
    """What times on a cluster rest on."""
    if cluster.calibrated:
        told = f"{cluster.device}, measured {cluster.calibrated}"
        between = " between nodes" if cluster.measured_links else ""
        published = cluster.gpus > 1 and (cluster.nodes > 1 or not cluster.measured_links)
        return [f"{told}; links{between} as published or given" if published else told]
    return [
        f"{cluster.device}, from published peaks, which is optimistic: `zfunc calibrate` "
        f"measures one; guessed: {', '.join(cluster.guessed)}"
    ]
