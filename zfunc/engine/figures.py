"""The figures of a step, of which ``step.describe()`` makes its text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Description", "Traffic"]


class Description(str):
    """Text with its figures as attributes.

    Attributes:
        state_bytes: bytes of the placed state on this rank; None before ``place``.
        sent_bytes: bytes that this rank sends in one step, headers included; None
            before ``place``.
    """

    state_bytes: int | None = None
    sent_bytes: int | None = None


@dataclass
class Traffic:
    """Payload bytes that one rank sends, by purpose, and how many headers each neighbour gets."""

    payload: Counter[str] = field(default_factory=Counter)
    headers: int = 0

    def add(self, purpose: str, nbytes: int) -> None:
        self.payload[purpose] += nbytes
        self.headers += 1
