"""Blocks of code in which torch's functions do something else, or something more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["FunctionMode"]


class FunctionMode(TorchFunctionMode):
    """A block in which ``called`` answers for each of torch's functions.

    >>> import torch
    >>> class Counting(FunctionMode):
    ...     calls = 0
    ...
    ...     def called(self, func, args, named):
    ...         self.calls += 1
    ...         return func(*args, **named)
    >>> with Counting() as counting:
    ...     _ = torch.ones(2).sum()
    >>> counting.calls
    2
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.called(func, args, dict(kwargs or {}))

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of a call."""
        raise NotImplementedError
