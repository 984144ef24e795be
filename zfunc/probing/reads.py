"""Which parameters code asks for their values, be it without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zfunc.modules.lazy import METADATA
from zfunc.probing.arguments import tensors_in
from zfunc.trees.function_modes import FunctionMode

__all__ = ["ReadParameters"]

Home = tuple[str, str]
_ABOUT = ("requires_grad", "is_leaf", "grad", "grad_fn", "_version", "output_nr")
QUIET = {
    *METADATA,
    *(getattr(Tensor, name).__get__ for name in _ABOUT),
    *(Tensor.stride, Tensor.storage_offset, Tensor.data_ptr, Tensor.is_contiguous),
}


class ReadParameters(FunctionMode):
    """A block in which torch's functions tell which of some parameters they are given.

    Args:
        homes: by ``id`` of a parameter where it is: modules and attributes.

    >>> import torch
    >>> w = torch.ones(2)
    >>> with ReadParameters({id(w): [("a", "weight")]}) as reads:
    ...     w.shape, w.detach().sum()
    (torch.Size([2]), tensor(2.))
    >>> reads.found
    {('a', 'weight')}
    """

    def __init__(self, homes: Mapping[int, Sequence[Home]]) -> None:
        super().__init__()
        self.homes = homes
        self.found: set[Home] = set()
        self._quiet = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose reads do not count."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @property
    def counts(self) -> bool:
        """Whether reads count now."""
        return not self._quiet

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self._quiet and func not in QUIET:
            for x in tensors_in((args, named)):
                self.found.update(self.homes.get(id(x), ()))
        return func(*args, **named)
