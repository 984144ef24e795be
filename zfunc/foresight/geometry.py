"""The shapes, strides and dtypes that an operation results in, from its kernel for meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zfunc.foresight.assumptions import ForesightError, place
from zfunc.rehearsal.grouped_products import GROUPED, grouped_shape

__all__ = ["Geometries", "Made", "Results"]


@dataclass(frozen=True)
class Made:
    """A tensor that an operation makes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.size)


@dataclass(frozen=True)
class Returned:
    """One of an operation's arguments, which it returns."""

    index: int


@dataclass(frozen=True)
class Results:
    """What an operation returns: made tensors, arguments, and values that are no tensors."""

    leaves: tuple[Any, ...]
    spec: Any

    @property
    def numel(self) -> int:
        """The elements of what it makes."""
        return sum(leaf.numel for leaf in self.leaves if isinstance(leaf, Made))


class Geometries:
    """Results by operation and arguments, so that each is asked for once."""

    def __init__(self) -> None:
        self._known: dict[Any, Results | None] = {}

    def of(self, func: Any, flat: Sequence[Any], spec: Any) -> Results | None:
        """What ``func`` returns for these arguments; ``None`` if it depends on their values.

        Raises:
            ForesightError: the operator has no kernel for meta tensors.
        """
        key = (func, spec, tuple(map(_key, flat)))
        try:
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that is no key
            return _results(func, flat, spec)
        found = self._known[key] = _results(func, flat, spec)
        return found


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return None if isinstance(x, torch.Generator) else (type(x), x)


def _results(func: Any, flat: Sequence[Any], spec: Any) -> Results | None:
    given = [_on_meta(x) for x in flat]
    args, kwargs = pytree.tree_unflatten(given, spec)
    call = OWN.get(func, func)
    try:
        out = call(*args, **kwargs)
    except NotImplementedError as error:
        if _by_values(func):
            return None
        raise ForesightError(
            f"{func} has no kernel for the meta device, so nobody knows what shape it results in: "
            "register one (torch.library.register_fake), or leave the operator out of the step "
            "that is foreseen."
        ) from error
    except RuntimeError as error:
        if _by_values(func) or "meta tensor" in str(error) or ".item()" in str(error):
            return None
        shapes = ", ".join(str(list(x.shape)) for x in flat if isinstance(x, Tensor))
        raise ForesightError(
            f"{func._opname} does not take tensors of shapes {shapes}: {str(error).rstrip('.')}. "
            f"Does the batch fit the step? This is at {place()}."
        ) from error
    index = {id(x): i for i, x in enumerate(given) if isinstance(x, Tensor)}
    for x, was in zip(given, flat, strict=True):
        if isinstance(x, Tensor) and x.shape != was.shape:
            raise ForesightError(
                f"{func._opname} makes a tensor of shape {list(was.shape)} that it is given (out=) "
                f"one of shape {list(x.shape)}: give it one of that shape. This is at {place()}."
            )
    leaves, its = pytree.tree_flatten(out)
    return Results(tuple(_described(x, index) for x in leaves), its)


# Whose kernels for meta tensors refuse what those for numbers take.
OWN = {GROUPED: grouped_shape}


def _by_values(func: Any) -> bool:
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


def _on_meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, torch.device):
        return torch.device("meta")
    return None if isinstance(x, torch.Generator) else x


def _described(x: Any, index: dict[int, int]) -> Any:
    if not isinstance(x, Tensor):
        return x
    if id(x) in index:
        return Returned(index[id(x)])
    return Made(tuple(x.size()), tuple(x.stride()), x.dtype)
