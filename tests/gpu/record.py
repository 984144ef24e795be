"""What happened on the pretended device, in the order in which the host asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["HOST_WAITS", "Flight", "Report", "Row"]

Kind = Literal[
    "launch",  # an operation of torch on the device
    "kernel",  # a launch of a Triton kernel, with its checked arguments
    "copy",  # between host and device
    "collective",  # issued; it runs on a stream of its communicator
    "await",  # Work.wait: the current stream waits for a collective
    "sync",  # the host waits for the device
    "pageable",  # a copy from pageable memory: the driver stages it, and may wait
    "pin",  # page-locked memory is allocated or registered
    "event",  # a stream waits for an event or for another stream
    "kept",  # Tensor.record_stream
    "mixed",  # operands on different devices
    "race",  # memory is used by two actors without an order between them
    "capture",  # a CUDA graph is recorded or replayed
]
LAUNCHES = ("launch", "kernel", "copy")
HOST_WAITS = ("sync", "pageable")
SMALL = ("loss", "norm", "flag", "sum", "metric", "finite", "square")


@dataclass(slots=True)
class Row:
    """One thing that happened.

    Attributes:
        kind: see ``Kind``.
        what: the operation, the kernel, the copy's direction, ...
        where: the innermost line of the project, and who called it: ``file:line function < ...``.
        stream: on which it happens.
        label: of a collective, as the project calls it.
        group: of a collective, its ranks and its communicator.
        nbytes: that are moved, allocated or waited for.
        number: of a collective; the ``await`` of it has the same.
        arguments: storages by name, shapes, dtypes, scalars; only if they are kept.
        grid: of a kernel.
    """

    kind: Kind
    what: str
    where: str = ""
    stream: str = ""
    label: str = ""
    group: str = ""
    nbytes: int = 0
    number: int = -1
    arguments: tuple[Any, ...] = ()
    grid: tuple[int, ...] = ()

    @property
    def site(self) -> str:
        """The line of the project alone."""
        return self.where.partition(" < ")[0]

    def __str__(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        return f"{self.kind} {self.what}{label} on {self.stream or 'the host'} at {self.where}"


@dataclass(frozen=True)
class Flight:
    """A collective from its issue to its first wait.

    Attributes:
        issued: its row.
        launches: between the two on other streams than its own.
        awaited: whether anything waited for it in the recorded time.
    """

    issued: Row
    launches: int
    awaited: bool

    @property
    def label(self) -> str:
        return self.issued.label or self.issued.what

    @property
    def beside(self) -> bool:
        """Whether it has compute beside it: more than 3 launches."""
        return self.launches > 3


@dataclass
class Report:
    """Rows, in order, and questions about them.

    >>> report = Report([Row("launch", "mm"), Row("sync", "item", "a.py:3 f < b.py:1 g")])
    >>> report.launches(), [row.site for row in report.host_waits()]
    (1, ['a.py:3 f'])
    """

    rows: list[Row] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Row]:
        """The rows of some kinds."""
        return [row for row in self.rows if row.kind in kinds]

    def count(self, *kinds: str) -> int:
        """How many rows of some kinds there are."""
        return len(self.of(*kinds))

    def sites(self, *kinds: str) -> Counter[str]:
        """How often a line of the project is behind rows of some kinds, and what it does there."""
        return Counter(f"{row.site} [{row.what}]" for row in self.of(*kinds))

    def host_waits(self, *, besides: Iterable[str] = ()) -> list[Row]:
        """Where the host waits for the device, or may (pageable copies).

        Args:
            besides: parts of ``where`` or ``what`` that are not counted.
        """
        return [
            row
            for row in self.of(*HOST_WAITS)
            if not any(part in row.where or part in row.what for part in besides)
        ]

    def launches(self) -> int:
        """Launches of kernels and copies."""
        return self.count(*LAUNCHES)

    def faults(self) -> list[Row]:
        """Races and mixed devices."""
        return self.of("race", "mixed")

    def collectives(self) -> list[Row]:
        """In the order of issue."""
        return self.of("collective")

    def flights(self, *, small: Iterable[str] = SMALL) -> list[Flight]:
        """Each collective from its issue to its first wait.

        Args:
            small: collectives with one of these words in their label are not counted.
        """
        found: list[Flight] = []
        words = tuple(small)
        for i, row in enumerate(self.rows):
            if row.kind != "collective" or any(word in row.label for word in words):
                continue
            launches, awaited = 0, False
            for later in self.rows[i + 1 :]:
                if later.kind == "await" and later.number == row.number:
                    awaited = True
                    break
                launches += later.kind in LAUNCHES
            found.append(Flight(row, launches, awaited))
        return found

    def exposed(self, *, exempt: Callable[[Row], bool] = lambda row: False) -> list[Flight]:
        """Collectives that were waited for with no compute beside them, but those exempt."""
        return [
            flight
            for flight in self.flights()
            if flight.awaited and not flight.beside and not exempt(flight.issued)
        ]

    def in_flight(self, matches: Callable[[Row], bool] = lambda row: True) -> int:
        """The most bytes of collectives that were issued and not yet waited for."""
        return max((held for held in self._held(matches)), default=0)

    def _held(self, matches: Callable[[Row], bool]) -> Iterator[int]:
        open_: dict[int, int] = {}
        for row in self.rows:
            if row.kind == "collective" and matches(row):
                open_[row.number] = row.nbytes
                yield sum(open_.values())
            elif row.kind == "await":
                open_.pop(row.number, None)

    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory that were allocated or registered."""
        return sum(row.nbytes for row in self.of("pin"))

    def difference(self, other: Report) -> str:
        """The first thing that two steps do differently; ``""`` if they could be one graph.

        Both are of steps whose arguments were kept. Launches, copies, collectives and what
        streams wait for count, with their grids, scalars and storages; temporaries count as the
        same where they are the n-th that the step allocated.
        """
        kinds = (*LAUNCHES, "collective", "await", "event", "sync", "pageable")
        mine, theirs = self.of(*kinds), other.of(*kinds)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            for name in ("kind", "what", "stream", "label", "group", "nbytes", "grid"):
                if getattr(a, name) != getattr(b, name):
                    return (
                        f"row {i}: {name} is {getattr(a, name)!r}, then {getattr(b, name)!r}: {b}"
                    )
            if a.arguments != b.arguments:
                return f"row {i}: {b}: {_first(a.arguments, b.arguments)}"
        if len(mine) != len(theirs):
            more = max(mine, theirs, key=len)[min(len(mine), len(theirs))]
            return f"{len(mine)} rows, then {len(theirs)}: {more}"
        return ""

    def host_temporaries(self) -> list[Row]:
        """Copies to the device from host memory that is younger than the step.

        A graph would copy from that address at each replay, whatever lies there by then.
        """
        return [
            row
            for row in self.of("copy")
            if row.what == "up" and any("host new" in str(x) for x in row.arguments)
        ]

    def summary(self) -> str:
        """Counts by kind, then the lines behind what should not be."""
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(r.kind for r in self.rows).items())
        lines = [
            f"  {n} x {kind}: {site}"
            for kind in ("race", "mixed", *HOST_WAITS)
            for site, n in self.sites(kind).most_common()
        ]
        return "\n".join([counts, *lines])


def _first(a: tuple[Any, ...], b: tuple[Any, ...]) -> str:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"argument {i} is {x}, then {y}"
    return f"{len(a)} arguments, then {len(b)}"
