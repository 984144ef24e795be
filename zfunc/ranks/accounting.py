"""What went over the wire: exact bytes sent by this rank, by kind and by label.

A ledger counts the bytes that this rank sends. They are payload, and headers of 16 bytes (kind
``"header"``). A collective sends a header to every peer, or to two neighbours in a group of more
than 16 ranks and beside NCCL; an all-reduce in two rounds sends one in each. A ledger counts for
the rank that opened it, whichever thread issues the collective: on CUDA backward has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from zfunc.ranks.world import current

__all__ = ["HEADER", "HEADER_BYTES", "Ledger", "ledger"]

HEADER = "header"
HEADER_BYTES = 16  # a digest and the number of elements that follow

on_close: list[Callable[[], None]] = []
"""Called when a ledger closes: what it has counted is completed, and so has been sent."""


@dataclass
class Ledger:
    """Bytes sent by one rank while the ledger was open.

    Attributes:
        by_kind: bytes per collective (``"all_gather"``, ...), and ``"header"``.
        by_label: payload bytes per label, which names the unit concerned.
        by_axis: payload bytes per axis of the mesh (``"data"``, ``"replica+data"``).
        headers_by_label: bytes of headers per label.
        calls_by_label: number of collectives per label.
        calls: number of collectives.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    by_label: Counter[str] = field(default_factory=Counter)
    by_axis: Counter[str] = field(default_factory=Counter)
    headers_by_label: Counter[str] = field(default_factory=Counter)
    calls_by_label: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def total_bytes(self) -> int:
        """Everything sent: payload and headers."""
        return sum(self.by_kind.values())

    @property
    def payload_bytes(self) -> int:
        """Everything sent except headers."""
        return self.total_bytes - self.by_kind[HEADER]

    def record(self, kind: str, label: str, axis: str, payload: int, headers: int) -> None:
        """Add one collective: ``payload`` and ``headers`` are the bytes sent to all peers."""
        with self._lock:
            self.calls += 1
            self.by_kind[kind] += payload
            self.by_kind[HEADER] += headers
            self.by_label[label] = self.by_label.get(label, 0) + payload  # labels are often new
            self.by_axis[axis] += payload
            self.headers_by_label[label] = self.headers_by_label.get(label, 0) + headers
            self.calls_by_label[label] = self.calls_by_label.get(label, 0) + 1


@contextmanager
def ledger(complete: bool = True) -> Iterator[Ledger]:
    """Count the bytes that this rank sends inside the block. Nested ledgers all count.

    Args:
        complete: whether the block ends only when all of it has been sent.

    >>> with ledger() as led:
    ...     pass
    >>> led.total_bytes, led.calls
    (0, 0)
    """
    opened, ledgers = Ledger(), current().ledgers
    ledgers.append(opened)
    try:
        yield opened
    finally:
        # By identity: two ledgers with equal counts are equal dataclasses.
        ledgers[:] = [other for other in ledgers if other is not opened]
    for finish in on_close if complete else ():
        finish()
