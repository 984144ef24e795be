"""Who holds the full parameters that a step places, so that he can let go of them.

A functionalized module holds its parameters until a step has placed them. The placed state has a
copy then, and nobody who writes ``step.place(zf.TrainState.create(model.params, tx))`` means to
keep the full one. Parameters are known by their memory: whatever aliases of them are placed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor

__all__ = ["Origin", "let_go"]

_lock = threading.Lock()
_holding: WeakSet[Origin] = WeakSet()


class Origin:
    """Something that holds tensors until a step has placed them.

    Args:
        tensors: which; their memory must not be given to others while they are held.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = frozenset(_memory(tensors))
        if self._storages:
            with _lock:
                _holding.add(self)

    def let_go(self) -> None:
        """Hold them no longer."""
        raise NotImplementedError


def let_go(tensors: Iterable[Any]) -> None:
    """Tell all of whose tensors these are that a step has placed them."""
    there = _memory(x for x in tensors if type(x) is Tensor)
    with _lock:
        # Who was asked for a part of what he holds is asked for the rest later.
        placed = [origin for origin in _holding if origin._storages <= there]
        for origin in placed:
            _holding.discard(origin)
    for origin in placed:
        origin.let_go()


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors if not x.is_meta}
