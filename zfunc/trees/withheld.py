"""Donated memory of a step of which it is not known yet whether it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from zfunc.trees.memory import Donation

__all__ = ["Withheld"]


@dataclass
class Withheld(Donation):
    """Donated memory that is given away once ``ask`` has said whether the step counts at all.

    Whoever wants it first asks, and may have to wait for the answer; until then nobody does.
    """

    given: Donation = field(default_factory=Donation)
    ask: Callable[[], bool] = bool

    @classmethod
    def until(cls, given: Donation, ask: Callable[[], bool]) -> Withheld:
        """The memory of ``given``."""
        return cls(given.owners, given.boxes, given=given, ask=ask)

    def spend(self, x: Tensor) -> bool:
        return self.ask() and self.given.spend(x)
