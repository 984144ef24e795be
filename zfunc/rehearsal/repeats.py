"""Whether a loss that runs again, from where it has left Python's state, does the same.

A stage with several chunks runs the loss once for each of them. A loss that counts its calls would
count each chunk. So a rehearsal for such a stage runs twice, where the first run has changed
something, and compares the two: what was there at each layer, and which functions were called
outside of layers. What layers change is their own, and they run once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zfunc.rehearsal.ghosts import Ghost, has_own_memory

__all__ = ["Repeats", "frozen"]

_MANY = 1000  # of what is longer the length is compared
_LARGE = 1 << 20  # and of tensors with more numbers the shape


class Repeats:
    """What was there in a first run, and in a second.

    Attributes:
        second: whether it is the second one.
        left: what modules of a user's have left, for the second one to begin with.
    """

    def __init__(self) -> None:
        self.second = False
        self.left: dict[Any, Any] = {}
        self._start: dict[Any, Any] = {}
        self._rows: tuple[list[dict[Any, Any]], list[dict[Any, Any]]] = [], []
        self._calls: tuple[list[Any], list[Any]] = [], []
        self._of_layers: set[Any] = set()

    def start(self, state: Mapping[Any, Any]) -> None:
        """What is there before anything has run."""
        if not self.second:
            self._start.update((key, frozen(x)) for key, x in state.items())

    def before_layer(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """What is there at a layer, or at the end; returns it as :meth:`behind_layer` wants it."""
        row = {key: frozen(x) for key, x in state.items()}
        self._rows[self.second].append(row)
        return row

    def behind_layer(self, before: Mapping[Any, Any], state: Mapping[Any, Any]) -> None:
        """What is there behind it."""
        self._of_layers.update(
            k for k, x in state.items() if k in before and frozen(x) != before[k]
        )

    def called(self, name: str, given: Any) -> None:
        """A function was called outside of layers, with what layers have or parameters."""
        self._calls[self.second].append((name, frozen(given)))

    @property
    def changed(self) -> bool:
        """Whether the first run has changed anything."""
        return any(self._unlike(row, self._start) is not None for row in self._rows[0])

    def difference(self) -> str:
        """What was not alike in both, for a message; empty where all was."""
        first, second = self._rows
        for one, other in zip(first, second, strict=False):
            if (key := self._unlike(one, other)) is not None:
                return f"it changes {key[-1]}"
        if len(first) != len(second) or self._calls[0] != self._calls[1]:
            return "it does something else when it is called again"
        return ""

    def _unlike(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> Any:
        """Something that is another in one of them."""
        known = (key for key in one if key in other and key not in self._of_layers)
        return next((key for key in known if one[key] != other[key]), None)


def frozen(x: Any, seen: frozenset[int] = frozenset()) -> Any:
    """What can be compared of a value: of containers what is in them, of tensors their shape and
    sum, of other objects the type."""
    if isinstance(x, bool | int | float | complex | str | bytes) or x is None:
        return type(x), repr(x)  # NaN is NaN
    if isinstance(x, Tensor):
        return _of_tensor(x)
    if id(x) in seen or not isinstance(x, list | tuple | dict | set | frozenset | deque):
        return type(x)
    if len(x) > _MANY:
        return type(x), len(x)
    within = seen | {id(x)}
    if isinstance(x, dict):
        return type(x), [(frozen(key), frozen(value, within)) for key, value in x.items()]
    if isinstance(x, set | frozenset):
        return type(x), sorted(map(repr, map(frozen, x)))
    return type(x), [frozen(value, within) for value in x]


def _of_tensor(x: Tensor) -> Any:
    if type(x) is Ghost or x.is_meta:
        return Tensor
    with torch._C.DisableTorchFunction(), torch.no_grad():
        here = x.device.type == "cpu" and x.layout is torch.strided and x.numel() <= _LARGE
        own = here and has_own_memory(x)
        alone = own and torch._C._functorch.maybe_current_level() is None
        wide = torch.complex128 if x.is_complex() else torch.float64
        return Tensor, tuple(x.shape), x.dtype, repr(x.to(wide).sum().item()) if alone else ""
