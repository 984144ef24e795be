"""What parts of a step cost: sums over rows, by module and by operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zfunc.foresight.watch import TimedRow

__all__ = ["Cost", "by_module", "by_operator", "covered", "gaps"]


@dataclass
class Cost:
    """What a part of a step costs: a module with all that is in it, or an operator.

    Attributes:
        parameters: of all ranks together.
        calls: of operators.
        forward, backward, recomputed, update: FLOPs (:mod:`zfunc.foresight.flops`); ``update`` are
            those behind the last backward.
        bytes_moved: that operators read and write; what a cache saves is not known.
        kept_bytes: of what forward has made and is there when backward begins.
        seconds: within operators.
        forward_seconds, backward_seconds: the parts of it; what is recomputed counts as backward.
        between_seconds: from one operator of a module to the next of it: Python, and memory that is
            freed; on a GPU the device has nothing to do then.
    """

    parameters: int = 0
    calls: int = 0
    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    update: int = 0
    bytes_moved: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    between_seconds: float = 0.0

    @property
    def update_seconds(self) -> float:
        """What is neither forward nor backward."""
        return self.seconds - self.forward_seconds - self.backward_seconds

    @property
    def flops(self) -> int:
        """All of them."""
        return self.forward + self.backward + self.recomputed + self.update

    @property
    def macs(self) -> int:
        """Multiplications with an addition in forward: half of its FLOPs."""
        return self.forward // 2

    @property
    def flops_per_second(self) -> float:
        """FLOPs by the time within operators."""
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    def add(self, row: TimedRow) -> None:
        """One more operation."""
        self.calls += 1
        setattr(self, row.phase, getattr(self, row.phase) + row.flops)
        self.bytes_moved += row.read + row.written
        self.seconds += row.seconds
        if row.phase == "forward":
            self.forward_seconds += row.seconds
        elif row.phase != "update":
            self.backward_seconds += row.seconds

    def join(self, other: Cost) -> None:
        """All that another costs, besides."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def by_module(
    rows: Sequence[TimedRow], parameters: Mapping[str, int], kept: Mapping[str, int]
) -> dict[str, Cost]:
    """By dotted name, ``""`` being the whole step: each has what is in its modules.

    The time between two operators is that of the module that both are in. Where one is in forward
    and the next in backward, or they share no module, it is attributed to none.

    >>> rows = [TimedRow("compute", "mm", "blocks.0", "forward", flops=8)]
    >>> {name: cost.forward for name, cost in by_module(rows, {"blocks.0.w": 4}, {}).items()}
    {'': 8, 'blocks': 8, 'blocks.0': 8}
    """
    found: dict[str, Cost] = {"": Cost()}
    for row in rows:
        for name in _around(row.layer):
            found.setdefault(name, Cost()).add(row)
    for before, after, seconds in gaps(rows):
        shared = _shared(before.layer, after.layer)
        if before.phase == after.phase and (shared or before.layer == after.layer):
            for name in _around(shared):
                found[name].between_seconds += seconds
    for layer, nbytes in kept.items():
        for name in _around(layer):
            found.setdefault(name, Cost()).kept_bytes += nbytes
    for path, count in parameters.items():
        for name in _around(path.rpartition(".")[0]):
            found.setdefault(name, Cost()).parameters += count
    met = {name: i for i, name in enumerate(found)}  # in this order, and each within its module
    return dict(sorted(found.items(), key=lambda item: [met[x] for x in _around(item[0])]))


def by_operator(rows: Iterable[TimedRow]) -> dict[str, Cost]:
    """By the operator's name, the one that takes most time first."""
    found: dict[str, Cost] = {}
    for row in rows:
        found.setdefault(row.name, Cost()).add(row)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def covered(rows: Iterable[TimedRow]) -> float:
    """The seconds in which one of these is under way.

    >>> covered([TimedRow("compute", "mm", begin=begin, seconds=2.0) for begin in (0.0, 1.0, 5.0)])
    5.0
    """
    rows = sorted(rows, key=lambda row: row.begin)
    if not rows:
        return 0.0
    end = max(row.begin + row.seconds for row in rows)
    return end - rows[0].begin - sum(seconds for *_, seconds in gaps(rows))


def gaps(rows: Iterable[TimedRow]) -> Iterator[tuple[TimedRow, TimedRow, float]]:
    """Where none of them is under way: the row before, the one behind, and the seconds between."""
    last: TimedRow | None = None
    for row in sorted(rows, key=lambda row: row.begin):
        if last is not None and (seconds := row.begin - last.begin - last.seconds) > 0:
            yield last, row, seconds
        if last is None or row.begin + row.seconds > last.begin + last.seconds:
            last = row


def _shared(one: str, other: str) -> str:
    """The innermost module that both are in."""
    inside = set(_around(other))
    return max((name for name in _around(one) if name in inside), key=len)


def _around(name: str) -> list[str]:
    """A dotted name, and those of all that it is in."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]
