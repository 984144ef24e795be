"""Moves between a device, the host and drives in a step that is foreseen: told, and not done.

There the CPU stands for a device, so a tensor does not say whether it is in the device's memory or
in the host's. Whoever foresees knows, and hears of each copy, each block that is read or written,
and each wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from zfunc.trees.kinds import FORESEEN

__all__ = ["MOVES", "MoveEvent", "Moves", "crossing", "on_device"]


class Moves(Protocol):
    """Who is told of what moves."""

    def moved(self, way: str, nbytes: int) -> int:
        """So many bytes go ``"up"`` or ``"down"``, or a drive's ``"read"`` or ``"write"`` begins.

        Returns:
            Its number.
        """

    def waited(self, number: int) -> None:
        """The program waits until it is over."""

    def behind(self) -> AbstractContextManager[None]:
        """A block in which the next move waits, and not the program."""

    def arrived(
        self, written: Sequence[Tensor], given: Sequence[Tensor], fill: Callable[[], Any]
    ) -> None:
        """``written`` has what ``given`` has; ``fill`` copies it."""

    def hosts(self, x: Tensor) -> None:
        """A tensor is in the host's memory."""

    def on_host(self, x: Tensor) -> bool:
        """Whether it is there."""


MOVES: ContextVar[Moves | None] = ContextVar("zfunc_moves", default=None)


def crossing() -> Moves | None:
    """Who is told of copies between the host and a device; None where they are done."""
    return MOVES.get() if FORESEEN.get() == "cuda" else None


def on_device(x: Tensor) -> bool:
    """Whether a tensor is in the memory of a GPU, or of one that is foreseen."""
    told = crossing()
    return x.device.type == "cuda" if told is None else not told.on_host(x)


class MoveEvent:
    """The event of a move that is foreseen, and a stream that waits for such events."""

    def __init__(self, told: Moves, number: int = 0) -> None:
        self._told, self.number = told, number

    def query(self) -> bool:
        """Whether it has happened: nobody knows before it is waited for."""
        return False

    def synchronize(self) -> None:
        """Wait for it."""
        self._told.waited(self.number)

    def wait_event(self, event: MoveEvent) -> None:
        """Let the device wait for another."""
        event.synchronize()
