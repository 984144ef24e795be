"""Python's and NumPy's own generators of random numbers, which the process has one of each."""

from __future__ import annotations

import random
import sys
from typing import Any

__all__ = ["GlobalGenerators"]


class GlobalGenerators:
    """They are put back behind a rehearsal, which tells who has drawn.

    Attributes:
        drawn: whether code outside of layers has.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._first = self._last = _states()

    def begin_layer(self) -> None:
        """What was drawn until here was drawn outside."""
        now = _states()
        self.drawn |= now != self._last

    def end_layer(self) -> None:
        """What a layer draws is its own."""
        self._last = _states()

    def put_back(self) -> None:
        """Let them be as they were."""
        state, numbers = self._first
        random.setstate(state)
        if numbers is not None:
            kind, keys, *rest = numbers
            numpy = sys.modules["numpy"]
            numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)
